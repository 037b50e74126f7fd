import asyncio
import json
import threading
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from adaptive_spec.core import DEFAULT_DOMAIN
from adaptive_spec.errors import DeadlineError, DecodingError, ModelError, OwnDeadlineError, UnavailableError
from tests.serving.conftest import Delta, TokenLogProb, Usage

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_models_lists_the_target(client: TestClient) -> None:
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny/target"]
    assert client.get("/v1/models/tiny/target").json()["object"] == "model"
    missing = client.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_completion_answers_whole(client: TestClient, service: Any) -> None:
    answer = client.post("/v1/completions", json={"prompt": "hi", "model": "tiny/target", "temperature": 0}).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "Hello wörld", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 2},
    }
    assert answer["speculation"] == {
        "domain": DEFAULT_DOMAIN,
        "releases": [7],
        "num_spec_steps": 1,
        "num_divergent_tokens": 1,
        "cached": False,
    }
    assert service.engine.requests[0].params.max_tokens == 16
    assert answer["id"] == service.engine.requests[0].request_id


def test_chat_writes_the_template_and_gets_the_rest_of_the_context(client: TestClient, service: Any) -> None:
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    answer = client.post(CHAT, json={"messages": messages}).json()
    assert answer["choices"][0]["message"]["content"] == "Hello wörld"
    request = service.engine.requests[0]
    assert bytes(request.prompt_ids).decode() == "<system>be<user>hi"
    assert request.params.max_tokens == 64 - len(request.prompt_ids)
    assert request.params.temperature == 1.0


def test_parameters_arrive(client: TestClient, service: Any) -> None:
    body = {
        "prompt": [72, 105],
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "seed": 3,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "speculation": {"chain_length": 0, "record": False},
    }
    assert client.post("/v1/completions", json=body).status_code == 200
    request = service.engine.requests[0]
    assert request.prompt_ids == (72, 105)
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (5, 0.5, 0.9, 0, 3)
    assert (params.stop, params.ignore_eos, params.chain_length, params.record) == (("a", "b"), True, 0, False)


@pytest.mark.parametrize(
    ("extra", "headers", "domain"),
    [
        ({}, {}, DEFAULT_DOMAIN),
        ({}, {"X-Domain": "legal"}, "legal"),
        ({"metadata": {"domain": "code"}}, {"X-Domain": "legal"}, "code"),
    ],
)
def test_domain(client: TestClient, service: Any, extra: Any, headers: Any, domain: str) -> None:
    assert client.post("/v1/completions", json={"prompt": "x"} | extra, headers=headers).status_code == 200
    assert service.engine.requests[0].domain == domain


def test_chat_stream(client: TestClient, service: Any) -> None:
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    answer = client.post(CHAT, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events(answer.text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in [*chunks, last]} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello wörld"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "stop"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert service.engine.streams[0].cancelled.is_set()


def test_completion_stream_has_no_usage_unless_asked(client: TestClient) -> None:
    *chunks, done = events(client.post("/v1/completions", json={"prompt": "x", "stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello wörld"
    assert not any("usage" in chunk for chunk in chunks)
    assert done == "[DONE]"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ""},
        {"prompt": ["a", "b"]},
        {"prompt": [5000]},
        {"prompt": "x" * 65},
        {"prompt": "x", "max_tokens": 64},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "n": 0},
        {"prompt": "x", "n": 9},
        {"prompt": "x", "n": 2, "best_of": 3},
        {"prompt": "x", "logprobs": 6},
        {"prompt": "x", "logprobs": True},
        {"prompt": "x", "top_logprobs": 2},
        {"prompt": "x", "deadline_seconds": 0},
        {"prompt": "x", "presence_penalty": 2.5},
        {"prompt": "x", "min_p": -0.1},
        {"prompt": "x", "repetition_penalty": 0},
        {"prompt": "x", "repetition_penalty": 5e-324},
        {"prompt": "x", "stop": list("abcde")},
        {"prompt": "x", "speculation": {"chain_length": -1}},
        {"prompt": "x", "speculation": {"chain": 1}},
        {"prompt": "x", "metadata": {"domain": "*"}},
        {"prompt": "x", "metadata": {"domain": "a b"}},
    ],
)
def test_bad_completions_are_refused_in_the_envelope(client: TestClient, service: Any, body: Any) -> None:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not service.engine.requests


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "content": "x"}],
    ],
)
def test_bad_chats_are_refused(client: TestClient, messages: Any) -> None:
    assert client.post(CHAT, json={"messages": messages}).status_code == 400


def test_parameters_that_ask_for_nothing_pass(client: TestClient) -> None:
    body = {"prompt": "x", "n": 1, "logprobs": None, "presence_penalty": 0.0, "user": "me", "tools": []}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_choices_of_one_request(client: TestClient, service: Any) -> None:
    answer = client.post(CHAT, json={"messages": HELLO, "n": 3, "seed": 1}).json()
    assert service.engine.requests[0].params.n == 3
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"Hello wörld"}
    assert answer["usage"]["prompt_tokens"] == len("<user>hi")
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["speculation"]["num_spec_steps"] == 3


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_stream_of_choices_names_each(client: TestClient, path: str) -> None:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    body = {**asked, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = events(client.post(path, json=body).text)
    texts, reasons = ["", ""], [[], []]
    for (choice,) in (chunk["choices"] for chunk in chunks):
        texts[choice["index"]] += choice["text"] if path != CHAT else choice["delta"].get("content", "")
        reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == ["Hello wörld"] * 2
    assert [own[-1] for own in reasons] == ["stop", "stop"] and not any(reasons[0][:-1])
    assert last["usage"]["completion_tokens"] == 6
    if path == CHAT:
        assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:2]] == ["assistant"] * 2


SCRIPT = [
    Delta("H", [72], log_probs=(TokenLogProb(72, -0.5, ((72, -0.5), (105, -1.5))),)),
    Delta("i!", [105, 33], log_probs=(TokenLogProb(105, -3.0, ((33, -0.1), (72, -2.5))), TokenLogProb(33, -0.25))),
]


def test_logprobs_of_a_completion(client: TestClient, service: Any) -> None:
    service.engine.script = SCRIPT
    (choice,) = client.post("/v1/completions", json={"prompt": "x", "logprobs": 2}).json()["choices"]
    assert service.engine.requests[0].params.logprobs == 2
    wanted = {
        "tokens": ["H", "i", "!"],
        "token_logprobs": [-0.5, -3.0, -0.25],
        "top_logprobs": [{"H": -0.5, "i": -1.5}, {"!": -0.1, "H": -2.5, "i": -3.0}, {"!": -0.25}],
        "text_offset": [0, 1, 2],
    }
    assert choice["logprobs"] == wanted
    *chunks, _ = events(client.post("/v1/completions", json={"prompt": "x", "logprobs": 2, "stream": True}).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [value for part in parts for value in part[name]] for name in wanted} == wanted


def test_logprobs_of_a_chat(client: TestClient, service: Any) -> None:
    service.engine.script = SCRIPT
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    content = client.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert content[1] == {
        "token": "i",
        "logprob": -3.0,
        "bytes": [105],
        "top_logprobs": [
            {"token": "!", "logprob": -0.1, "bytes": [33]},
            {"token": "H", "logprob": -2.5, "bytes": [72]},
        ],
    }
    *chunks, _ = events(client.post(CHAT, json={**body, "stream": True}).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == content
    assert client.post(CHAT, json={"messages": HELLO}).json()["choices"][0]["logprobs"] is None
    assert client.post(CHAT, json={"messages": HELLO, "top_logprobs": 2}).status_code == 400
    assert client.post(CHAT, json={"messages": HELLO, "logprobs": True}).status_code == 200
    assert [request.params.logprobs for request in service.engine.requests] == [2, 2, None, 0]


@pytest.mark.parametrize(
    ("reason", "error", "status", "kind"),
    [
        ("deadline", DeadlineError("Time was up. Raise it."), 504, "timeout_error"),
        ("deadline", OwnDeadlineError("Time was up. Raise it."), 408, "timeout_error"),
        ("error", UnavailableError("No memory. Lower it."), 503, "service_unavailable_error"),
        ("cancelled", UnavailableError("It stops. Go elsewhere."), 503, "service_unavailable_error"),
        ("error", DecodingError("It broke. See the log."), 500, "server_error"),
    ],
)
def test_an_answer_that_is_not_whole_says_why(
    client: TestClient, service: Any, reason: str, error: Exception, status: int, kind: str
) -> None:
    service.engine.script = ["He", Delta("", finish_reason=reason, error=error)]
    body = {"prompt": "x", "deadline_seconds": 2.5}
    whole = client.post("/v1/completions", json=body)
    assert whole.status_code == status
    assert whole.json()["error"] == {"message": str(error), "type": kind, "param": None, "code": None}
    assert service.engine.requests[0].params.deadline_seconds == 2.5
    *_, last = events(client.post("/v1/completions", json={**body, "stream": True}).text)
    assert last["error"] == whole.json()["error"]


def test_a_cached_answer_says_so(client: TestClient, service: Any) -> None:
    usage = Usage(1, 2, num_steps=0, num_draft_tokens=0, num_accepted_draft_tokens=0, cached=True)
    service.engine.script = [Delta("Hi", [72, 105], finish_reason="length", usage=usage)]
    answer = client.post("/v1/completions", json={"prompt": "x", "temperature": 0}).json()
    assert answer["speculation"]["cached"] is True
    assert answer["usage"]["completion_tokens"] == 2


def test_unknown_model(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"prompt": "x", "model": "gpt"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_full_queue(client: TestClient, service: Any) -> None:
    service.engine.busy = True
    answer = client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert answer.status_code == 429
    assert answer.headers["Retry-After"] == "1"
    assert answer.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("error", [ModelError("It broke. Look at the log."), ValueError("secret inside")])
def test_a_stream_that_breaks(client: TestClient, service: Any, error: Exception) -> None:
    service.engine.script = ["He", error]
    whole = client.post("/v1/completions", json={"prompt": "x"})
    assert whole.status_code == 500
    *_, last = events(client.post("/v1/completions", json={"prompt": "x", "stream": True}).text)
    assert last["error"] == whole.json()["error"]
    assert "secret" not in whole.text
    assert service.engine.streams[0].cancelled.is_set()


def test_a_stream_cancelled_by_the_service(client: TestClient, service: Any) -> None:
    service.engine.script = ["He", None]
    threading.Timer(0.2, lambda: [stream.cancel() for stream in service.engine.streams]).start()
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
def test_a_client_that_goes_away_cancels(app: Any, service: Any, stream: bool, spec_version: str) -> None:
    service.engine.script = ["He", None] if spec_version == "2.3" or not stream else ["He", "llo", None]
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    sent: list[Any] = []

    async def call() -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            if stream:
                await gone.wait()
            else:
                await asyncio.sleep(0.1)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if stream and message.get("body"):
                gone.set()
                if spec_version == "2.4":
                    raise OSError("the client is gone")

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }
        try:
            await asyncio.wait_for(app(scope, receive, send), 5)
        except Exception as error:
            assert spec_version == "2.4", error

    started = time.monotonic()
    asyncio.run(call())
    assert service.engine.streams[0].cancelled.is_set()
    assert time.monotonic() - started < 4


def test_waiting_streams_do_not_starve_the_control_plane(client: TestClient, service: Any) -> None:
    service.engine.script = [None]
    threads = [
        threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": {"prompt": "x"}})
        for _ in range(60)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 8
    while len(service.engine.streams) < 60 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert client.get("/livez").status_code == 200
    for stream in service.engine.streams:
        stream.cancel()
    for thread in threads:
        thread.join(10)
