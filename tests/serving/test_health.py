import time
from typing import Any

from starlette.testclient import TestClient

from adaptive_spec.version import package_version


def test_readiness_says_what_is_missing(client: TestClient, service: Any) -> None:
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "not_ready": {}, "degraded": {}})
    service.ready = False
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "not ready")
    assert set(answer.json()["not_ready"]) == {"service"}
    service.ready, service.engine.alive = True, False
    assert "log" in client.get("/readyz").json()["not_ready"]["decoder"]
    assert client.get("/livez").json() == {"status": "ok"}


def test_without_its_database_it_is_ready_and_says_so(client: TestClient, service: Any) -> None:
    for last_sign, said in ((time.time() - 1000, "for 10"), (None, "yet")):
        service.last_sign = last_sign
        answer = client.get("/readyz")
        assert answer.status_code == 200 and said in answer.json()["degraded"]["database"]
        assert "adaptive_spec_database_up 0.0" in client.get("/metrics").text


def test_version(client: TestClient) -> None:
    assert client.get("/version").json()["version"] == package_version()
