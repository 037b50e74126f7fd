from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from adaptive_spec.calibration.watch import StreamState
from adaptive_spec.core import Thresholds
from adaptive_spec.errors import SettingsError
from adaptive_spec.records import calibrations as calibration_records
from adaptive_spec.records import canaries as canary_records
from adaptive_spec.records import events as event_records
from adaptive_spec.records import releases as release_records
from adaptive_spec.records import runs as run_records
from adaptive_spec.records.database import Database
from adaptive_spec.records.decoders import Sign, give_sign
from adaptive_spec.records.run_log import log_output
from adaptive_spec.records.spans import floor
from adaptive_spec.releases.bundle import write_bundle
from adaptive_spec.releases.registry import refuse
from adaptive_spec.releases.report import Check, GateReport
from adaptive_spec.serving.app import check_bind, create_app
from adaptive_spec.settings import ServerSettings
from tests.records.rows import START, make_step, make_trace, record

DOCS = Path(__file__).parents[2] / "docs"


def test_reads_of_an_empty_database(client: TestClient) -> None:
    assert client.get("/api/domains").json() == {"domains": []}
    assert client.get("/api/stats?domain=code&release=1&policy=policy").json() == {"domains": []}
    assert client.get("/api/series?domain=code&bucket=hour").json()["buckets"] == []
    assert client.get("/api/runs").json() == {"runs": []}
    assert client.get("/api/releases").json()["live"] == 0
    assert client.get("/api/events").json() == {"events": []}
    assert client.get("/api/runs?limit=0").status_code == 400


def test_series(client: TestClient, service: Any) -> None:
    record(service.database, make_step("a", 1, positions=((0.9, 0.8, True), (0.5, 0.4, False))))
    stretch = {"since": (START - timedelta(hours=1)).isoformat(), "until": (START + timedelta(hours=1)).isoformat()}
    found = client.get("/api/series", params=stretch).json()
    (bucket,) = found["buckets"]
    assert found["bucket"] == "minute" and bucket["start"] == floor(START, "minute").isoformat()
    assert (bucket["num_requests"], bucket["draft_acceptance_rate"], bucket["tokens_per_second"]) == (1, 1 / 3, None)
    assert client.get("/api/series", params={**stretch, "domain": "nobody"}).json()["buckets"] == []
    for wrong in (
        {"bucket": "week"},
        {"since": "2026-01-01", "bucket": "minute"},
        {"since": "2100-01-01"},
        {"until": "0.5"},
    ):
        assert client.get("/api/series", params=wrong).status_code == 400


def test_thresholds(client: TestClient) -> None:
    found = client.get("/api/thresholds").json()
    assert found["release"] == 7
    assert found["thresholds"]["code"]["temperature"] == 1.5
    assert found["fallback"]["stop_below"] == 0.3


def test_thresholds_are_set_by_hand_and_say_where_they_come_from(client: TestClient, service: Any) -> None:
    calibration_records.add_calibration(service.database, "code", Thresholds(), {"source": "own"}, 7)
    body = {"max_chain_length": 2, "reason": "slow", "hours": 2}
    told = client.put("/api/thresholds/code", json=body).json()
    assert (told["domain"], told["numbers"], told["reason"]) == ("code", {"max_chain_length": 2}, "slow")
    client.put("/api/thresholds/a/b", json={"stop_below": 0.9, "reason": "try"})
    found = client.get("/api/thresholds").json()
    assert found["thresholds"]["code"]["max_chain_length"] == 2 and found["thresholds"]["code"]["temperature"] == 1.5
    code = found["sources"]["code"]
    assert (code["max_chain_length"]["source"], code["max_chain_length"]["until"]) == ("override", told["until"])
    assert (code["temperature"]["source"], code["temperature"]["release"]) == ("calibration", 7)
    assert found["sources"]["a/b"]["temperature"] == {"source": "release", "release": 7, "domain": "*"}
    assert [each["domain"] for each in found["overrides"]] == ["a/b", "code"]
    assert client.request("DELETE", "/api/thresholds/code", json={"reason": "done"}).json() == {"cleared": "code"}
    assert client.delete("/api/thresholds/code").status_code == 404
    assert client.get("/api/thresholds").json()["sources"]["code"]["max_chain_length"]["source"] == "calibration"
    assert service.engine.release.thresholds["code"].max_chain_length == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"reason": "nothing is set"},
        {"stop_below": 0.5},
        {"stop_below": 0.5, "reason": " "},
        {"stop_below": 1.5, "reason": "no probability"},
        {"temperature": 0, "reason": "divides"},
        {"temperature": True, "reason": "no number"},
        {"max_chain_length": False, "reason": "no number"},
        {"max_chain_length": 7, "reason": "longer than the decoder's"},
        {"stop_below": 0.5, "reason": "for ever", "hours": 169},
        {"stop_below": 0.5, "reason": "never", "hours": 0},
        {"survival": [1.0], "reason": "is measured"},
    ],
)
def test_what_may_not_be_set_by_hand(client: TestClient, wrong: dict[str, Any]) -> None:
    assert client.put("/api/thresholds/code", json=wrong).status_code == 400
    assert client.get("/api/thresholds").json()["overrides"] == []
    assert client.put("/api/thresholds/no domain", json={"stop_below": 0.5, "reason": "x"}).status_code == 400


def test_divergence(client: TestClient) -> None:
    code, prose = client.get("/api/divergence").json()["domains"]
    assert (code["domain"], code["budget"], code["divergence_share"], code["fallen_back"]) == ("code", 0.02, 0.0, False)
    assert prose == {
        "domain": "prose",
        "budget": 0.1,
        "num_emitted_tokens": 60,
        "num_divergent_tokens": 5,
        "divergence_share": 5 / 60,
        "fallen_back": True,
        "exact_for_tokens": 50,
        "num_fallbacks": 1,
    }


def test_drift(client: TestClient, service: Any) -> None:
    assert client.get("/api/drift").json() == {"streams": [], "counts": []}
    service.drift_states = tuple(
        StreamState("code", "model", "exact", stream, 7, 0.5, 1200) for stream in ("acceptance", "calibration")
    )
    shift = {"direction": "down", "before": 0.6, "after": 0.45, "num_steps": 700, "first_step": 5, "last_step": 9}
    for stream, release in (("acceptance", 6), ("acceptance", 7)):
        detail = {"stream": stream, "drafter": "model", "verifier": "exact", **shift}
        event_records.add_event(service.database, "drift", detail, "code", release)
    found = client.get("/api/drift").json()
    acceptance, calibration = found["streams"]
    assert acceptance["last_drift"].pop("at").startswith("20")
    assert acceptance == {
        "domain": "code",
        "drafter": "model",
        "verifier": "exact",
        "stream": "acceptance",
        "release": 7,
        "mean": 0.5,
        "num_steps": 1200,
        "last_drift": {"direction": "down", "before": 0.6, "after": 0.45, "num_steps": 700, "release": 7},
    }
    assert calibration["last_drift"] is None
    assert found["counts"] == [{"domain": "code", "stream": "acceptance", "direction": "down", "num_drifts": 2}]


def test_retrain_starts_one_run_at_a_time(client: TestClient) -> None:
    answer = client.post("/api/retrain")
    assert answer.status_code == 202
    run_id = answer.json()["run_id"]
    run = client.get(answer.headers["Location"]).json()
    assert (run["id"], run["trigger"], run["state"]) == (run_id, "person", "queued")
    assert [run["id"] for run in client.get("/api/runs").json()["runs"]] == [run_id]
    assert client.post("/api/retrain", json={"trigger": "again"}).status_code == 409
    assert "interrupted" in client.post("/api/retrain", json={"resume": True}).json()["error"]["message"]


def test_a_run_is_cancelled_and_tells(client: TestClient, service: Any) -> None:
    run_id = client.post("/api/retrain").json()["run_id"]
    for progress in ({"phase": "load"}, {"phase": "distil", "step": 1}, {"phase": "distil", "step": 2}):
        run_records.update_run(service.database, run_id, state="running", progress=progress)
    log_output(service.database, run_id, "\n".join(f"line {number}" for number in range(300)) + "\n" + "x" * 999)
    answer = client.post(f"/api/runs/{run_id}/cancel", json={"reason": "wrong data"})
    assert (answer.status_code, answer.json()) == (202, {"run_id": run_id, "state": "running"})
    assert client.get(answer.headers["Location"]).json()["cancel_reason"] == "wrong data"
    run_records.update_run(service.database, run_id, error="Cancelled.", state="cancelled")
    assert client.post(f"/api/runs/{run_id}/cancel").status_code == 409
    entries = client.get(f"/api/runs/{run_id}/log").json()["entries"]
    assert [entry["kind"] for entry in entries] == ["progress", "state", "progress", "output", "state"]
    assert entries[2]["detail"] == {"phase": "distil", "step": 1}
    assert [len(entries[3]["detail"]["lines"]), len(entries[3]["detail"]["lines"][-1])] == [200, 500]
    assert entries[-1]["detail"] == {"state": "cancelled", "error": "Cancelled."}
    assert len(client.get(f"/api/runs/{run_id}/log?limit=1").json()["entries"]) == 1
    assert client.get("/api/runs/9/log").status_code == client.post("/api/runs/9/cancel").status_code == 404
    (event,) = client.get("/api/events?kind=run_cancelled").json()["events"]
    assert event["detail"] == {"run": run_id, "reason": "wrong data"}


def test_unknown_run_and_route(client: TestClient) -> None:
    for path in ("/api/runs/5", "/api/nothing"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"
    for path, methods in (
        ("/api/retrain", "POST"),
        ("/api/canary", "GET, POST"),
        ("/api/releases/rollback", "POST"),
        ("/api/thresholds/code", "DELETE, PUT"),
    ):
        answer = client.request("PATCH", path)
        assert (answer.status_code, answer.headers["Allow"]) == (405, methods)


def test_calibrate(client: TestClient) -> None:
    found = client.post("/api/calibrate", json={"domain": "code"}).json()["calibrations"]
    assert found[0]["domain"] == "code"
    assert found[0]["thresholds"]["stop_below"] == 0.4
    assert client.post("/api/calibrate").json()["calibrations"][0]["domain"] == "*"


def test_releases_and_rollback(client: TestClient, service: Any, tmp_path: Path) -> None:
    release_records.add_release(service.database, 1, str(tmp_path), None, {}, "candidate")
    release_records.set_live(service.database, 1, "passed")
    found = client.get("/api/releases").json()
    assert found["live"] == 1
    assert [release["version"] for release in found["releases"] if release["state"] == "live"] == [1]
    assert client.post("/api/releases/rollback", json={"to": 0, "reason": "bad"}).json() == {"live": 0}
    assert client.post("/api/releases/rollback", json={"to": 99}).status_code == 409
    assert client.post("/api/releases/rollback", json={"to": -1}).status_code == 400


def test_decoders(client: TestClient, service: Any) -> None:
    assert client.get("/api/decoders").json() == {"live": 0, "decoders": []}
    give_sign(service.database, Sign("a", "<i>h</i>", 7, "trainer", "http://h:1", "1", 3, {"draft": "d"}, True))
    (row,) = client.get("/api/decoders").json()["decoders"]
    assert (row["role"], row["release"], row["state"], row["hashes"]) == ("trainer", 3, "leads", {"draft": "d"})
    assert 0 <= row["age_seconds"] < 10
    page = client.get("/").text
    assert "&lt;i&gt;h&lt;/i&gt;" in page and "<td>leads</td>" in page


def test_a_canary_is_shown_and_ended(client: TestClient, service: Any) -> None:
    assert client.get("/api/canary").json() == {"running": None, "canaries": []}
    assert client.post("/api/canary", json={"action": "abort"}).status_code == 409
    release_records.add_release(service.database, 1, "release-000001", None, {}, "candidate")
    canary_records.begin_canary(service.database, 1, 0.2, "gate passed")
    running = client.get("/api/canary").json()["running"]
    assert (running["release"], running["live"], running["share"], running["state"]) == (1, 0, 0.2, "running")
    assert client.post("/api/canary", json={"action": "keep"}).status_code == 400
    assert client.post("/api/canary", json={"action": "promote", "reason": "sure"}).json() == {"live": 1}
    (ended,) = client.get("/api/canary").json()["canaries"]
    assert (ended["state"], ended["reason"]) == ("promoted", "sure")


def write_refused(service: Any, version: int) -> None:
    """A candidate whose bundle is sound and which the gate refused for its goodput."""
    folder = service.settings.releases.folder
    numbers = {"code": Thresholds(temperature=1.5)}
    report = GateReport(
        (Check("goodput", False, "no gain is certain: -2.0%"), Check("domains", True, "none"))
    ).to_dict()
    provenance = {"parent": 0, "seed": version, "gate": report}
    write_bundle(folder, version, adapter=None, thresholds=numbers, provenance=provenance)
    refuse(service.database, version, 0, report, f"release-{version:06d}")


def test_a_refused_release_is_shown_and_forced(client: TestClient, service: Any) -> None:
    write_refused(service, 1)
    found = client.get("/api/releases/1").json()
    assert (found["state"], found["unreadable"]) == ("refused", None)
    assert {check["name"]: check["passed"] for check in found["gate"]["checks"]} == {"goodput": False, "domains": True}
    assert found["thresholds"]["code"]["temperature"] == 1.5 and found["provenance"] == {"parent": 0, "seed": 1}
    assert client.get("/api/releases/9").status_code == 404
    assert client.get("/api/releases/0").json()["state"] == "live"
    page = client.get("/releases").text
    assert "refused: goodput" in page and "no gain is certain" in page

    answer = client.post("/api/releases/1/publish", json={"reason": "please"})
    assert answer.status_code == 409 and "no gain is certain" in answer.json()["error"]["message"]
    assert client.post("/api/releases/1/publish", json={"force": True}).status_code == 409
    assert client.post("/api/releases/1/publish", json={"force": True, "reason": "I know"}).json() == {"live": 1}
    assert client.get("/api/releases/1").json()["gate"]["override"]["reason"] == "I know"
    assert client.get("/api/events?kind=release_forced").json()["events"][0]["release"] == 1
    assert "forced over goodput: I know" in client.get("/releases").text


def test_events(client: TestClient, service: Any) -> None:
    event_records.add_event(service.database, "swap", {"seconds": 0.1}, release=1)
    event_records.add_event(service.database, "start", {})
    assert len(client.get("/api/events").json()["events"]) == 2
    (event,) = client.get("/api/events?kind=swap").json()["events"]
    assert event["detail"] == {"seconds": 0.1}


def test_traces(client: TestClient, service: Any) -> None:
    assert client.get("/api/traces").json() == {"domains": []}
    store = service.traces
    store.add([make_trace(1, request_id="cmpl-1"), make_trace(2, domain="law", completion=(3,) * 20)])
    code, law = client.get("/api/traces").json()["domains"]
    assert (code["domain"], code["num_traces"], code["num_completion_tokens"]) == ("code", 1, 7)
    assert 0 < code["kept_mass"] < 1 and code["bytes_per_token"] > 0 and code["oldest"].startswith("2026-01-02")
    assert (law["num_traces"], law["dropped"]) == (0, {"loop": 1})
    assert len(client.get("/api/traces?domain=law").json()["domains"]) == 1
    service.set_token("s3cret")
    assert client.delete("/api/traces/cmpl-1").status_code == 401
    told = {"Authorization": "Bearer s3cret"}
    assert client.delete("/api/traces/cmpl-1", headers=told | {"Origin": "https://evil.example"}).status_code == 403
    assert len(store.load()) == 1
    answer = client.delete("/api/traces/cmpl-1", headers=told)
    assert answer.json() == {"request_id": "cmpl-1", "num_traces": 1, "num_evidence": 0}
    assert store.load() == []
    answer = client.delete("/api/traces/cmpl-1", headers=told)
    assert answer.status_code == 404 and "cmpl-1" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/api/retrain", "/api/calibrate", "/api/releases/rollback", "/api/releases/1/publish"]
)
def test_changes_need_the_token(client: TestClient, service: Any, path: str) -> None:
    write_bundle(service.settings.releases.folder, 1, adapter=None, thresholds={}, provenance={})
    release_records.add_release(service.database, 1, "release-000001", None, {}, "candidate")
    service.set_token("s3cret")
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "s3cret"},
        {"Authorization": "Basic s3cret"},
    ):
        answer = client.post(path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
    assert client.post(path, headers={"Authorization": "Bearer s3cret"}).status_code in (200, 202)
    assert client.get("/api/runs").status_code == 200


def test_changes_are_refused_to_other_origins(client: TestClient) -> None:
    assert client.post("/api/calibrate", headers={"Origin": "https://evil.example"}).status_code == 403
    assert client.post("/api/calibrate", headers={"Origin": "http://testserver"}).status_code == 200


def test_a_database_that_is_away(client: TestClient, service: Any, tmp_path: Path) -> None:
    service.database = Database(f"sqlite:///{tmp_path / 'empty.db'}")
    answer = client.get("/api/stats")
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "service_unavailable_error"
    assert "adaptive_spec_database_errors_total 1.0" in client.get("/metrics").text
    service.database.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_open_bind_needs_a_token(host: str) -> None:
    with pytest.raises(SettingsError, match="token"):
        check_bind(ServerSettings(host=host))
    check_bind(ServerSettings(host=host, token="t"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_none(host: str) -> None:
    check_bind(ServerSettings(host=host))


def test_every_route_is_documented(service: Any) -> None:
    text = (DOCS / "http.md").read_text()
    for path, methods in routes(create_app(service)).items():
        for method in methods:
            assert f"`{method} {path}`" in text, f"{method} {path} is missing in docs/http.md"


def routes(app: FastAPI) -> dict[str, list[str]]:
    """Path -> methods, from the schema, plus the page, which the schema leaves out."""
    found = {path: [method.upper() for method in item] for path, item in app.openapi()["paths"].items()}
    return found | {"/": ["GET"], "/openapi.json": ["GET"]}
