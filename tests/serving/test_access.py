import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from adaptive_spec.telemetry.logs import JsonFormatter
from adaptive_spec.telemetry.spans import Spans

SECRET = "tell-nobody"


class Lines:
    """What is logged, as JSON."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    def answered(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [line for line in lines if line["message"] == "answered"]


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines = Lines()
    handler = logging.StreamHandler(lines.stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("adaptive_spec")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def complete(client: TestClient, **body: Any) -> Any:
    body = {"prompt": SECRET, "max_tokens": 5, "metadata": {"domain": "code"}} | body
    return client.post("/v1/completions?why=" + SECRET, json=body, headers={"X-Request-Id": "mine/1"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_leaves_one_line_and_none_of_its_words(client: TestClient, lines: Lines, stream: bool) -> None:
    answer = complete(client, stream=stream)
    assert answer.headers["X-Request-Id"] == "mine/1"
    (line,) = lines.answered()
    assert line.pop("at") and line.pop("duration_seconds") >= 0
    completion_id = line.pop("completion_id")
    assert completion_id in answer.text
    assert line == {
        "level": "info",
        "logger": "adaptive_spec.serving.access",
        "message": "answered",
        "request_id": "mine/1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "domain": "code",
    }
    assert SECRET not in lines.stream.getvalue() and "wörld" not in lines.stream.getvalue()


@pytest.mark.parametrize(
    "given", ["", " ", "a b", "a\tb", "x" * 129, "-a", '"', "ü".encode("latin-1").decode("latin-1")]
)
def test_ids_that_are_not_sane_are_replaced(client: TestClient, given: str) -> None:
    found = client.get("/livez", headers={"X-Request-Id": given.encode("latin-1")}).headers["X-Request-Id"]
    assert found != given and len(found) == 32


def test_every_answer_has_an_id_of_its_own(client: TestClient, service: Any) -> None:
    found = [
        client.get(path).headers["X-Request-Id"] for path in ("/livez", "/nothing", "/api/runs/7", "/api/runs?limit=0")
    ]
    assert len(set(found)) == 4
    service.engine.busy = True
    answer = complete(client)
    assert (answer.status_code, answer.headers["X-Request-Id"]) == (429, "mine/1")


def test_a_fault_is_answered_and_noted_under_its_id(app: FastAPI, client: TestClient, lines: Lines) -> None:
    @app.get("/broken")
    def broken() -> None:
        raise ZeroDivisionError

    answer = client.get("/broken", headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["X-Request-Id"]) == (500, "mine")
    (line,) = lines.answered()
    assert (line["status"], line["path"]) == (500, "/broken")


def test_probes_are_not_noted_and_paths_stay_on_their_line(client: TestClient, lines: Lines) -> None:
    client.get("/livez")
    client.get("/readyz")
    client.get("/metrics")
    assert lines.answered() == []
    client.get("/a%0Ab")
    assert [line["path"] for line in lines.answered()] == ["/a%0Ab"]


def test_answers_are_counted_by_route(client: TestClient) -> None:
    for version in (5, 6):
        client.get(f"/api/releases/{version}")
    client.get("/api/runs")
    client.get("/nowhere/5")
    client.request("BREW", "/api/runs")
    text = client.get("/metrics").text

    def counted(method: str, route: str, status: int) -> str:
        return f'adaptive_spec_http_requests_total{{method="{method}",route="{route}",status="{status}"}}'

    assert counted("GET", "/api/releases/{version}", 404) + " 2.0" in text
    assert counted("GET", "/api/runs", 200) + " 1.0" in text
    assert counted("GET", "none", 404) + " 1.0" in text
    assert 'method="BREW"' not in text and 'method="none"' in text


def test_the_span_that_asks_reaches_the_engine(client: TestClient, service: Any) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="needs the extra otel")
    asked_by = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for expected in ("", asked_by["traceparent"]):
        client.post("/v1/completions", json={"prompt": "a"}, headers=asked_by)
        assert service.engine.requests[-1].traceparent == expected
        service.telemetry.spans = Spans(trace.NoOpTracerProvider())  # from now on
