"""A real service on tiny models: what clients send is stored as token ids alone, and told to nobody else."""

import io
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from adaptive_spec.decoding.text import TextStream
from adaptive_spec.service import Service
from adaptive_spec.serving.app import create_app
from adaptive_spec.settings import Settings
from tests.serving.test_logs import CANARY, log, raising
from tests.test_service import open_gate, settings

__all__ = ["log", "open_gate", "settings"]


def test_prompts_are_stored_as_token_ids_alone(
    settings: Settings, tmp_path: Path, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(settings)
    service.start()
    app = create_app(service)
    ask: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "stop": CANARY[::-1]}
    with TestClient(app, raise_server_exceptions=False) as client:
        message = {"role": "user", "content": CANARY}
        assert client.post("/v1/completions", json={"prompt": CANARY, **ask}).status_code == 200
        assert client.post("/v1/chat/completions", json={"messages": [message], **ask}).status_code == 200
        assert client.post("/v1/completions", json={"prompt": CANARY * 20, **ask}).status_code == 400
        with monkeypatch.context() as broken:
            broken.setattr(TextStream, "push", raising)
            assert client.post("/v1/completions", json={"prompt": CANARY, **ask}).status_code == 500
        assert service.writer.flush(60)
        paths = [path for path, item in app.openapi()["paths"].items() if "get" in item and "{" not in path]
        answers = {path: client.get(path).text for path in (*paths, "/")}
    assert [path for path, text in answers.items() if CANARY in text] == []
    prompts = [service.pair.tokenizer.decode(trace.tokens[: trace.prompt_tokens]) for trace in service.traces.load()]
    assert len(prompts) == 2 and all(CANARY in prompt for prompt in prompts), "the ids are the text to who has both"
    service.stop()
    written = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert any(file.suffix == ".db" for file in written) and any("traces" in file.parts for file in written)
    for said in (CANARY, CANARY[::-1]):
        forms = (said.encode(), said.encode("utf-16-le"))
        assert [file for file, content in written.items() if any(form in content for form in forms)] == []
        assert said not in log.getvalue()
    assert "ValueError" in log.getvalue()
