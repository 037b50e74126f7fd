"""What a client sends is in no log and in no answer to anybody else, however its request breaks."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from adaptive_spec.serving.logs import withhold_text
from adaptive_spec.settings import load_settings

CANARY = "Xq7canaryZk"
PROMPT = {"prompt": CANARY}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that is logged at debug level, formatted as by default, while text is withheld."""
    factory, root, text = logging.getLogRecordFactory(), logging.getLogger(), io.StringIO()
    level, handler = root.level, logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    withhold_text()
    yield text
    logging.setLogRecordFactory(factory)
    root.setLevel(level)
    root.removeHandler(handler)


def raising(*_: Any, **__: Any) -> Any:
    try:
        raise KeyError(CANARY)
    except KeyError as error:
        raise ValueError(f"{CANARY} could not be handled") from error


BODIES: list[Any] = [
    {"prompt": {"text": CANARY}},
    {"prompt": [CANARY, 5]},
    {"prompt": [CANARY, CANARY]},
    {"prompt": CANARY * 20},
    {"prompt": CANARY, "temperature": CANARY},
    {"prompt": CANARY, "stop": [[CANARY]]},
    {"prompt": CANARY, "tools": [{"name": CANARY}]},
    {"prompt": CANARY, "metadata": {"domain": f"{CANARY} !"}},
    {"prompt": CANARY, "speculation": {"verifier": CANARY}},
    {"prompt": CANARY, "speculation": {CANARY: CANARY}},
    {"prompt": CANARY, "model": CANARY},
    {"prompt": CANARY + "\ud800"},
    [CANARY],
    CANARY,
    {"messages": [{"role": "user", "content": {"x": CANARY}}]},
    {"messages": [{"role": CANARY, "content": CANARY}]},
    {"messages": [{"role": "assistant", "content": CANARY}]},  # the template refuses it
]


def post(client: TestClient, path: str, body: Any) -> int:
    answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    return answer.status_code


def test_bad_requests_are_not_logged(client: TestClient, log: io.StringIO) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/api/retrain", "/api/calibrate"):
        for body in BODIES:
            assert 400 <= post(client, path, body) < 500
        assert client.post(path, content=f'{{"prompt": "{CANARY}'.encode()).status_code in (400, 415, 422)
    assert client.delete(f"/api/traces/{CANARY}").status_code == 404
    assert CANARY not in "\n".join(line for line in log.getvalue().splitlines() if "/api/traces/" not in line)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("breaks", ["tokenizer", "engine", "stream"])
def test_requests_that_break_are_logged_without_their_text(
    client: TestClient,
    service: Any,
    log: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
    breaks: str,
    stream: bool,
) -> None:
    if breaks == "tokenizer":
        monkeypatch.setattr(service, "tokenizer", raising)
    elif breaks == "engine":
        monkeypatch.setattr(service.engine, "submit", raising)
    else:
        error = ValueError(CANARY)
        error.__cause__ = KeyError(CANARY)
        service.engine.script = ["He", error]
    answer = client.post("/v1/completions", json={**PROMPT, "stream": stream})
    assert answer.status_code == (200 if stream and breaks == "stream" else 500)
    assert "Internal error" in answer.text
    assert CANARY not in answer.text + log.getvalue()
    if breaks == "stream":
        assert "ValueError" in log.getvalue() and "KeyError" in log.getvalue(), "the kind of error is told"


def test_servers_and_tasks_log_errors_without_their_messages(log: io.StringIO) -> None:
    for name in ("uvicorn.error", "asyncio", "adaptive_spec.decoding.engine"):
        try:
            raising()
        except ValueError as error:
            logging.getLogger(name).exception("it broke: %s", error)
    told = log.getvalue()
    assert CANARY not in told
    assert told.count("it broke: ValueError") == 3
    assert told.count("in raising") >= 6, "the place of the error and of its cause"


def test_other_errors_are_told_whole(log: io.StringIO) -> None:
    for name in ("adaptive_spec.pipeline", "adaptive_spec.servings"):
        logging.getLogger(name).warning("it broke: %s", ValueError("disk is full"))
    assert log.getvalue().count("disk is full") == 2


def test_no_other_route_tells_what_was_sent(app: FastAPI, client: TestClient) -> None:
    for body in (PROMPT, *BODIES):
        post(client, "/v1/completions", body)
    paths = [path for path, item in app.openapi()["paths"].items() if "get" in item and "{" not in path]
    for path in (*paths, "/", "/api/runs/1", "/api/releases/0", "/openapi.json"):
        assert CANARY not in client.get(path).text, path


def test_log_text_is_off_by_default() -> None:
    assert load_settings().server.log_text is False
