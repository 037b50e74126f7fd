"""The commands of the documentation's kind: ``curl`` and nothing else."""

import json
import shutil
import subprocess

import pytest

from tests.process import until

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
BODY = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def curl(*words: str) -> str:
    return subprocess.run(["curl", "-sS", *words], capture_output=True, text=True, check=True, timeout=60).stdout


def post(url: str, body: dict[str, object], *words: str) -> str:
    return curl(url, "-H", "Content-Type: application/json", "-d", json.dumps(body), *words)


def test_an_answer_and_its_stream(url: str) -> None:
    whole = json.loads(post(f"{url}/v1/completions", BODY, "-H", "X-Domain: curl"))
    streamed = post(f"{url}/v1/completions", {**BODY, "stream": True}, "-N")
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert all(line.startswith("data: ") for line in streamed.splitlines() if line) and events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert "".join(piece["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert pieces[-1]["finish_reason"] == "length"


def test_statistics_by_domain(url: str) -> None:
    post(f"{url}/v1/completions", BODY, "-H", "X-Domain: told")
    (told,) = until(lambda: json.loads(curl(f"{url}/api/stats?domain=told"))["domains"])
    assert told["domain"] == "told" and told["num_requests"] == 1


def test_what_has_not_changed_is_not_sent_again(url: str) -> None:
    etag = curl("-o", "/dev/null", "-w", "%header{etag}", f"{url}/api/releases")
    assert etag
    asked = ("-H", f"If-None-Match: {etag}", f"{url}/api/releases")
    assert curl("-o", "/dev/null", "-w", "%{http_code}", *asked) == "304"


def test_a_wrong_body_is_told_in_the_envelope(url: str) -> None:
    told = json.loads(post(f"{url}/v1/completions", {"prompt": ""}, "-w", "\n%{http_code}").rpartition("\n")[0])
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert curl(f"{url}/livez") and curl(f"{url}/version")
