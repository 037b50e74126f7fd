import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from adaptive_spec.errors import RateLimitError
from adaptive_spec.serving.app import create_app
from adaptive_spec.serving.limits import Bucket, Clients
from adaptive_spec.settings import LimitSettings
from tests.serving.conftest import Delta


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def clients(**limits: int) -> tuple[Clients, Clock]:
    clock = Clock()
    return Clients(LimitSettings(**limits), clock), clock


def test_a_bucket_fills_evenly_and_no_further() -> None:
    bucket = Bucket(60, now=0.0)
    bucket.take(60, 0.0)
    assert bucket.wait_seconds(1, 0.0) == 1.0
    assert bucket.wait_seconds(1, 0.75) == pytest.approx(0.25)
    assert bucket.wait_seconds(61, 1e6) == 1.0, "a minute's worth is all it ever holds"
    assert Bucket(0, 0.0).wait_seconds(1e9, 0.0) == 0.0


@given(st.integers(1, 50), st.lists(st.floats(0, 30), max_size=60))
def test_no_client_gets_more_than_its_rate_and_one_burst(per_minute: int, pauses: list[float]) -> None:
    table, clock = clients(client_requests_per_minute=per_minute)
    admitted = 0
    for pause in pauses:
        clock.now += pause
        try:
            table.release(table.admit("a"))
        except RateLimitError as error:
            clock.now += error.retry_after_seconds
            table.release(table.admit("a"))  # what it was told holds
        admitted += 1
    assert admitted <= per_minute + clock.now * per_minute / 60 + 1e-3


def test_concurrency_is_bounded_per_client_and_in_all() -> None:
    table, _ = clients(client_requests=2, concurrent_requests=3)
    first, _ = table.admit("a"), table.admit("a")
    with pytest.raises(RateLimitError, match="of this client"):
        table.admit("a")
    table.admit("b")
    with pytest.raises(RateLimitError, match="3 requests are open"):
        table.admit("c")
    table.release(first)
    table.admit("c")


def test_tokens_are_owed_and_paid_back() -> None:
    table, clock = clients(client_tokens_per_minute=60)
    client = table.admit("a")
    table.spend(client, 89)
    with pytest.raises(RateLimitError, match="60 tokens a minute") as refused:
        table.admit("a")
    assert refused.value.retry_after_seconds == 30
    table.admit("b")
    clock.now = 30.0
    table.admit("a")


def test_clients_are_forgotten_but_not_while_they_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptive_spec.serving.limits._KNOWN_CLIENTS", 3)
    table, _ = clients(client_requests=1)
    table.admit("a")
    for name in "bcdefg":
        table.release(table.admit(name))
    with pytest.raises(RateLimitError):
        table.admit("a")
    assert len(table._clients) == 3


@pytest.fixture
def limited(service: Any, request: pytest.FixtureRequest) -> Iterator[TestClient]:
    service.configure("limits", **request.param)
    with TestClient(create_app(service), raise_server_exceptions=False) as client:
        yield client


def refused(answer: Any) -> int:
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    return int(answer.headers["Retry-After"])


@pytest.mark.parametrize("limited", [{"client_requests_per_minute": 2}], indirect=True)
def test_requests_per_minute(limited: TestClient) -> None:
    for _ in range(2):
        assert limited.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert 1 <= refused(limited.post("/v1/completions", json={"prompt": "x", "stream": True})) <= 30
    assert limited.get("/v1/models").status_code == limited.get("/api/runs").status_code == 200


@pytest.mark.parametrize("limited", [{"client_tokens_per_minute": 60}], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_per_minute(limited: TestClient, service: Any, stream: bool) -> None:
    service.engine.script = [Delta("a", [1] * 70), Delta("b", [2] * 15)]
    body = {"prompt": "12345", "stream": stream}
    assert limited.post("/v1/completions", json=body).status_code == 200
    assert 1 <= refused(limited.post("/v1/completions", json=body)) <= 31


@pytest.mark.parametrize("limited", [{"client_requests": 1}, {"concurrent_requests": 1}], indirect=True)
def test_an_open_request_counts_until_it_ends(limited: TestClient, service: Any) -> None:
    service.engine.script = [None]
    thread = threading.Thread(target=limited.post, args=("/v1/completions",), kwargs={"json": {"prompt": "x"}})
    thread.start()
    while not service.engine.streams:
        time.sleep(0.01)
    assert refused(limited.post("/v1/completions", json={"prompt": "x"})) == 1
    assert limited.get("/readyz").status_code == 200
    service.engine.streams[0].cancel()
    thread.join(10)
    service.engine.script = ["Hi"]
    assert limited.post("/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("limited", [{"prompt_tokens": 5}], indirect=True)
def test_a_prompt_may_be_bounded_below_the_context(limited: TestClient) -> None:
    assert limited.post("/v1/completions", json={"prompt": "12345"}).status_code == 200
    answer = limited.post("/v1/completions", json={"prompt": "123456"})
    assert answer.status_code == 400
    assert "6 tokens; 5 are allowed" in answer.json()["error"]["message"]


@pytest.mark.parametrize("limited", [{"body_bytes": 200}], indirect=True)
@pytest.mark.parametrize("path", ["/v1/completions", "/api/retrain", "/nothing"])
def test_a_body_that_is_announced_too_large_is_not_read(limited: TestClient, path: str) -> None:
    answer = limited.post(path, content=b"{" + b" " * 200, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "limits.body_bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("limited", [{"body_bytes": 200}], indirect=True)
@pytest.mark.parametrize(("num_bytes", "status"), [(200, 200), (201, 413)])
def test_a_body_that_turns_out_too_large_is_cut_off(limited: TestClient, num_bytes: int, status: int) -> None:
    body = json.dumps({"prompt": "x"}).encode().ljust(num_bytes)
    pieces = (body[start : start + 50] for start in range(0, num_bytes, 50))  # without a content-length
    answer = limited.post("/v1/completions", content=pieces, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    if status == 413:
        assert "limits.body_bytes" in answer.json()["error"]["message"]


def test_a_body_that_does_not_arrive_is_given_up(service: Any) -> None:
    service.configure("limits", body_seconds=0.05)
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
        "scheme": "http",
        "server": ("test", 80),
        "client": ("127.0.0.1", 1),
    }
    asyncio.run(asyncio.wait_for(create_app(service)(scope, receive, send), 10))
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["type"] == "timeout_error"
