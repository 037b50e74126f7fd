"""The dashboard's pages over real records, and its forms through to the service."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from starlette.testclient import TestClient

from adaptive_spec.records.canaries import begin_canary, running_canary
from adaptive_spec.records.overrides import standing_overrides
from adaptive_spec.records.releases import add_release, set_live
from adaptive_spec.records.runs import create_run, list_runs, update_run
from adaptive_spec.serving.dashboard import pages
from adaptive_spec.serving.dashboard.charts import Marker, bars, reliability, sparkline, time_chart
from tests.records.rows import make_finish, make_step, record
from tests.serving.conftest import Service

CONFIRMED = {"confirmed": "yes", "reason": "a test"}
EVIL = "<script>alert(1)</script>"


@pytest.fixture
def full(service: Service) -> Service:
    """Records of two domains, one of them with a name that has to be escaped."""
    database = service.database
    for domain in ("code", EVIL):
        record(
            database,
            *(make_step(f"{domain}-{index}", index, domain=domain) for index in range(4)),
            make_finish(f"{domain}-0", domain=domain),
        )
    for version in (1, 2):
        add_release(database, version, f"release-{version:06d}", version - 1, {})
    set_live(database, 1, "made live by a test")
    begin_canary(database, 2, 0.25, "tried by a test")
    return service


def text_of(client: TestClient, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "<script" not in answer.text and not re.search(r"(src|href)=.?https?:", answer.text)
    return answer.text


def test_the_overview_shows_what_there_is(full: Service, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "OVERVIEW_DAYS", 1000)
    text = text_of(client, "/")
    assert "tiny/target" in text and "release 7" in text and "made live by a test" in text
    assert "release 2</a> for 25% of requests" in text
    assert "/domains/code" in text and "&lt;script&gt;" in text


def test_a_domain_has_its_numbers_charts_and_thresholds(full: Service, client: TestClient) -> None:
    text = text_of(client, "/domains/code?days=1825")
    assert "position 1" in text and "1.5 (release 7)" in text and 'role="img"' in text
    assert "Nothing" not in text.split("Divergence budget")[1]
    assert client.get("/domains/unknown").status_code == 404
    assert client.get("/domains/code?days=0").status_code == 400
    assert "&lt;script&gt;" in text_of(client, "/domains/%3Cscript%3Ealert(1)%3C/script%3E")


def test_an_active_run_is_shown_as_it_goes_on(full: Service, client: TestClient) -> None:
    run_id = create_run(full.database, "<i>x</i>", {})
    update_run(full.database, run_id, state="running", progress={"phase": "distil", "step": 3, "steps": 12})
    for path in ("/", f"/runs/{run_id}"):
        text = text_of(client, path)
        assert "<i>" not in text and 'value="0.25"' in text and "refresh" not in text
    assert 'http-equiv="refresh"' in text_of(client, f"/runs/{run_id}?live=true")
    report = {
        "reasons": ["too bad"],
        "checks": [{"name": "goodput", "passed": False, "reason": "lower", "figures": {}}],
    }
    update_run(full.database, run_id, state="refused", report=report)
    text = text_of(client, f"/runs/{run_id}?live=true")
    assert "too bad" in text and "lower" in text and "refresh" not in text
    assert "refused" in text_of(client, "/runs") and client.get("/runs/99").status_code == 404


def test_releases_and_events_are_listed(full: Service, client: TestClient) -> None:
    text = text_of(client, "/releases")
    assert "On trial: release 2" in text and '<option value="0">' in text
    assert "live" in text_of(client, "/releases/1") and client.get("/releases/9").status_code == 404
    assert "canary_started" in text_of(client, "/events")


def test_forms_need_their_box_ticked(full: Service, client: TestClient) -> None:
    answer = client.post("/actions/rollback", data={"to": "1", "reason": "x"})
    assert answer.status_code == 400 and "Tick the box" in answer.text


def test_forms_do_what_they_say(full: Service, client: TestClient) -> None:
    assert "Run 1 was asked for" in client.post("/actions/retrain", data=CONFIRMED).text
    assert [run.trigger for run in list_runs(full.database)] == ["person"]
    assert "1 calibrations" in client.post("/actions/calibrate", data=CONFIRMED).text
    assert "Release 1 is live" in client.post("/actions/rollback", data={**CONFIRMED, "to": "1"}).text
    client.post("/actions/canary", data={**CONFIRMED, "action": "abort"})
    assert running_canary(full.database) is None
    numbers = {"domain": "code", "stop_below": "0.7", "max_chain_length": "", "hours": "2"}
    assert (
        client.post("/actions/thresholds/set", data={**CONFIRMED, **numbers}, follow_redirects=False).status_code == 303
    )
    (standing,) = standing_overrides(full.database)
    assert standing.override.numbers == {"stop_below": 0.7} and standing.reason == "a test"
    assert "0.7 (set by hand until" in text_of(client, "/domains/code")
    client.post("/actions/thresholds/clear", data={**CONFIRMED, "domain": "code"})
    assert standing_overrides(full.database) == []


def test_buttons_need_the_token_that_browsers_are_asked_for(full: Service, client: TestClient) -> None:
    full.set_token("secret")
    answer = client.post("/actions/rollback", data={**CONFIRMED, "to": "1"})
    assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Basic")
    assert full.engine.release.version == 7 and client.get("/").status_code == 200
    elsewhere = {"origin": "http://elsewhere.example"}
    told = client.post("/actions/rollback", data={**CONFIRMED, "to": "1"}, auth=("", "secret"), headers=elsewhere)
    assert told.status_code == 403
    client.post("/actions/rollback", data={**CONFIRMED, "to": "1"}, auth=("", "secret"))
    assert full.engine.release.version == 1


def test_what_cannot_be_done_is_said_on_a_page(full: Service, client: TestClient) -> None:
    answer = client.post("/actions/rollback", data={**CONFIRMED, "to": "99"})
    assert answer.status_code == 409 and "There is no release 99" in answer.text and "<h1>Error 409</h1>" in answer.text


def test_charts_say_their_figures_and_escape_names() -> None:
    begin = datetime(2026, 1, 2, tzinfo=UTC)
    points = [(begin + timedelta(hours=hour), value) for hour, value in enumerate((1.0, 2.0, None, 3.0))]
    stretch = (begin, begin + timedelta(hours=4))
    chart = time_chart(
        points, stretch, "Tokens", "tokens", [Marker(points[1][0], EVIL), Marker(begin - timedelta(days=1), "before")]
    )
    assert chart.count("<circle") == 3 and chart.count('class="marker') == 1 and "<script" not in chart
    path = re.search(r'class="line" d="([^"]*)"', chart)
    assert path is not None and path[1].count("M") == 2 and path[1].count("L") == 1  # the gap parts the line
    across = [float(x) for x in re.findall(r"[ML]([\d.]+) ", path[1])]
    assert across[1] - across[0] == pytest.approx((across[2] - across[1]) / 2, abs=0.2)
    assert sparkline(points[:1], "x") == "" and "from 1.00 to 3.00" in sparkline(points, "x")
    assert "50%" in bars([0.5], ["position 1"], "x") and "nothing on record" in bars([], [], "x")
    assert "8.0% accepted at 10.0%, 5 tokens" in reliability([("raw", [(0.1, 0.08, 5)])], "x")
