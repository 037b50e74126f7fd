import asyncio
import json
import threading
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from adaptive_spec.core import DEFAULT_DOMAIN
from adaptive_spec.errors import ModelError

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
    assert answer["speculation"] == {"domain": DEFAULT_DOMAIN, "releases": [7], "num_spec_steps": 1}
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
        {"prompt": "x", "n": 2},
        {"prompt": "x", "logprobs": 3},
        {"prompt": "x", "presence_penalty": 2.5},
        {"prompt": "x", "min_p": -0.1},
        {"prompt": "x", "repetition_penalty": 0},
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
