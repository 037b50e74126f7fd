"""What keeps clients from doing or reading things twice: idempotency keys, ETags, pages."""

from datetime import timedelta
from typing import Any

import pytest
from fastapi import FastAPI
from sqlalchemy import select
from starlette.testclient import TestClient

from adaptive_spec.errors import RunError
from adaptive_spec.records import events as event_records
from adaptive_spec.records import releases as release_records
from adaptive_spec.records import runs as run_records
from adaptive_spec.records.tables import IdempotencyRow


def keyed(key: str = "k") -> dict[str, str]:
    return {"Idempotency-Key": key}


def change(service: Any, ago: timedelta, forget: bool = False) -> None:
    """Make every order so much older, or one that is not answered."""
    with service.database.session_scope() as session:
        for row in session.scalars(select(IdempotencyRow)):
            row.begun_at -= ago
            row.answer = None if forget else row.answer


def test_an_order_with_a_key_is_carried_out_once(client: TestClient, service: Any) -> None:
    answers = [client.post("/api/retrain", headers=keyed()) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.headers["Location"] for answer in answers}) == 1
    assert len(run_records.list_runs(service.database)) == 1
    assert client.post("/api/retrain", headers=keyed("another")).status_code == 409  # a run is active
    other = client.post("/api/retrain", headers=keyed(), json={"trigger": "else"})
    assert other.status_code == 409 and "another order" in other.json()["error"]["message"]
    assert client.post("/api/releases/rollback", headers=keyed()).status_code == 409
    assert client.post("/api/retrain", headers=keyed("x" * 201)).status_code == 400


def test_a_key_is_free_again_after_a_refusal_and_after_a_day(
    client: TestClient, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def declined(*args: Any, **given: Any) -> int:
        raise RunError("Not now.")

    with monkeypatch.context() as patched:
        patched.setattr(service, "retrain", declined)
        assert client.post("/api/retrain", headers=keyed()).status_code == 409
    first = client.post("/api/retrain", headers=keyed()).json()
    run_records.update_run(service.database, first["run_id"], state="failed")
    assert client.post("/api/retrain", headers=keyed()).json() == first
    change(service, timedelta(days=1, seconds=1))
    assert client.post("/api/retrain", headers=keyed()).json() != first


def test_an_order_under_way_is_not_begun_again_unless_its_process_has_died(client: TestClient, service: Any) -> None:
    answered = client.post("/api/calibrate", headers=keyed())
    change(service, timedelta(minutes=1), forget=True)  # as while it is carried out
    again = client.post("/api/calibrate", headers=keyed())
    assert again.status_code == 409 and "under way" in again.json()["error"]["message"]
    change(service, timedelta(minutes=10))
    assert client.post("/api/calibrate", headers=keyed()).json() == answered.json()


def test_what_has_not_changed_is_not_sent_again(client: TestClient) -> None:
    for path in ("/api/runs", "/api/stats", "/api/releases"):
        first = client.get(path)
        again = client.get(path, headers={"If-None-Match": f'"other", {first.headers["ETag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["ETag"] == first.headers["ETag"]
    tag = client.get("/api/runs").headers["ETag"]
    client.post("/api/retrain")
    changed = client.get("/api/runs", headers={"If-None-Match": tag})
    assert changed.status_code == 200 and changed.headers["ETag"] != tag
    assert "ETag" not in client.get("/api/runs/99").headers


def test_pages_follow_one_another_and_filters_narrow_them(client: TestClient, service: Any) -> None:
    for number in range(5):
        event_records.add_event(service.database, "swap", {"number": number}, "a" if number % 2 else None, release=1)
        release_records.add_release(service.database, number + 1, None, None, {}, "candidate")
        run_id = run_records.create_run(service.database, "person" if number else "drift", {})
        run_records.update_run(service.database, run_id, state="failed")
    for path, rows, cursor in (
        ("/api/events?kind=swap&limit=2", "events", "id"),
        ("/api/runs?state=failed&limit=2", "runs", "id"),
        ("/api/releases?state=candidate&limit=2", "releases", "version"),
    ):
        seen, page = [], client.get(path)
        while True:
            seen += [row[cursor] for row in page.json()[rows]]
            if "next" not in page.links:
                break
            page = client.get(page.links["next"]["url"])
        assert len(seen) == 5 and seen == sorted(seen, reverse=True)
    numbers = [event["detail"]["number"] for event in client.get("/api/events?domain=a&release=1").json()["events"]]
    assert numbers == [3, 1]
    assert [run["trigger"] for run in client.get("/api/runs?trigger=drift").json()["runs"]] == ["drift"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/99999999999999999999",
        "/api/releases/2147483648",
        "/api/events?before=99999999999999999999",
        "/api/stats?release=99999999999999999999",
        "/api/runs?state=a%00b",
        "/api/series?since=0001-01-01T00:00:00%2B14:00",
    ],
)
def test_what_no_database_could_hold_is_a_wrong_question(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 400


def test_settings_are_told_without_secrets(client: TestClient, service: Any) -> None:
    service.set_token("s3cret")
    answer = client.get("/api/settings")
    assert "s3cret" not in answer.text
    found = answer.json()
    assert found["settings"]["server"]["token"] == "***"
    assert found["sources"]["decoder.max_context_tokens"] == "flag" and "server.port" not in found["sources"]


def test_the_schema_describes_errors_as_they_are(app: FastAPI) -> None:
    paths = app.openapi()["paths"]
    for path, item in paths.items():
        for method, operation in item.items():
            assert "422" not in operation["responses"], f"{method} {path}: a wrong body is 400"
            assert "4XX" in operation["responses"], f"{method} {path}"
    retrain = paths["/api/retrain"]["post"]["responses"]
    assert {"202", "401", "403", "409"} <= retrain.keys()
    assert "404" in paths["/api/runs/{run_id}"]["get"]["responses"]
    schema = retrain["409"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/Problem"}
