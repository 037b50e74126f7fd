import csv
import json
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from adaptive_spec import cli
from adaptive_spec.calibration.calibrate import calibrate
from adaptive_spec.core import MatchAcceptance, Thresholds
from adaptive_spec.records import canaries as canary_records
from adaptive_spec.records import events as event_records
from adaptive_spec.records import releases as release_records
from adaptive_spec.records import runs as run_records
from adaptive_spec.records.database import Database
from adaptive_spec.records.decoders import Sign, give_sign
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.releases.bundle import write_bundle
from adaptive_spec.releases.canary import Reading, Terms, judge
from adaptive_spec.releases.report import Check, GateReport
from adaptive_spec.settings import CalibrationSettings
from tests.calibration.planted import chains, linear_cost, record
from tests.records.rows import make_step, make_trace
from tests.records.rows import record as record_rows

DOCS = Path(__file__).parents[1] / "docs"
NOBODY = "http://127.0.0.1:9"
runner = CliRunner()


def commands(group: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name)


COMMANDS = sorted(commands(typer.main.get_command(cli.app)))
LISTINGS = {
    "traces": "domains",
    "stats": "domains",
    "domains": "domains",
    "runs": "runs",
    "releases": "releases",
    "events": "events",
    "drift": "streams",
    "calibrations": "calibrations",
}


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ADAPTIVE_SPEC_URL", "ADAPTIVE_SPEC_TOKEN", "ADAPTIVE_SPEC_SERVER__TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ADAPTIVE_SPEC_CONFIG", str(tmp_path / "adaptive-spec.toml"))
    (tmp_path / "adaptive-spec.toml").write_text("")
    monkeypatch.setenv("ADAPTIVE_SPEC_RECORDS__URL", f"sqlite:///{tmp_path / 'records.db'}")
    monkeypatch.setenv("ADAPTIVE_SPEC_RECORDS__FOLDER", str(tmp_path / "traces"))
    monkeypatch.setenv("ADAPTIVE_SPEC_RELEASES__FOLDER", str(tmp_path / "releases"))
    monkeypatch.setattr(cli.asking, "DEFAULT_URL", NOBODY)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    assert runner.invoke(cli.app, ["db", "upgrade"]).exit_code == 0
    database = Database(f"sqlite:///{tmp_path / 'records.db'}")
    yield database
    database.close()


class Handler(BaseHTTPRequestHandler):
    """Answers from ``server.answers``: (method, path) -> (status, object or server-sent events)."""

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server: Any = self.server
        server.calls.append((self.command, self.path, json.loads(body or "null"), self.headers.get("Authorization")))
        status, answer = server.answers[self.command, self.path]
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.answers, server.calls = {}, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("ADAPTIVE_SPEC_URL", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command: tuple[str, ...]) -> None:
    result = runner.invoke(cli.app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_is_documented(command: tuple[str, ...]) -> None:
    assert f"`adaptive-spec {' '.join(command)}`" in (DOCS / "cli.md").read_text()


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom adaptive_spec.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'transformers', 'sqlalchemy', 'fastapi', 'pydantic', 'sklearn'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("command", "key"), LISTINGS.items())
def test_listings_read_the_database_when_nothing_answers(database: Database, command: str, key: str) -> None:
    result = runner.invoke(cli.app, [command, "--json"])
    assert result.exit_code == 0, result.output
    assert key in json.loads(result.stdout)
    assert runner.invoke(cli.app, [command]).exit_code == 0


def test_releases_are_shown_and_compared(database: Database, tmp_path: Path) -> None:
    for version, share in ((1, 0.0), (2, 0.25)):
        report = GateReport((Check("goodput", share > 0, f"gain {share:.0%}"),), ({"domain": "*", "goodput": 9.5},))
        numbers = {"code": Thresholds(temperature=1.0 + share)}
        write_bundle(tmp_path / "releases", version, adapter=None, thresholds=numbers, provenance={"seed": version})
        release_records.add_release(database, version, f"release-{version:06d}", 0, report.to_dict(), "refused")
    shown = runner.invoke(cli.app, ["releases", "show", "1"])
    assert shown.exit_code == 0, shown.output
    assert "gain 0%" in shown.stdout and "9.500" in shown.stdout and "Release 1 is refused." in shown.stdout
    assert json.loads(runner.invoke(cli.app, ["releases", "show", "2", "--json"]).stdout)["gate"]["passed"] is True
    assert "unknown" in runner.invoke(cli.app, ["releases", "show", "3"]).output
    found = json.loads(runner.invoke(cli.app, ["releases", "diff", "1", "2", "--json"]).stdout)["differences"]
    values = {row["path"]: (row["before"], row["after"]) for row in found}
    assert values["code.temperature"] == (1.0, 1.25) and values["seed"] == (1, 2)
    assert values["checks.goodput.passed"] == (False, True)
    assert "thresholds: code.temperature" in runner.invoke(cli.app, ["releases", "diff", "1", "2"]).stdout
    assert "refused: goodput" in runner.invoke(cli.app, ["releases"]).stdout


def test_listings_show_what_is_recorded(database: Database) -> None:
    run_id = run_records.create_run(database, "[red]me", {})
    release_records.add_release(database, 1, None, None, {}, "candidate")
    release_records.set_live(database, 1, "passed")
    event_records.add_event(database, "swap", {"seconds": 0.5}, release=1)
    (run,) = json.loads(runner.invoke(cli.app, ["runs", "--json"]).stdout)["runs"]
    assert (run["id"], run["state"]) == (run_id, "queued")
    assert "[red]me" in runner.invoke(cli.app, ["runs"]).stdout
    assert json.loads(runner.invoke(cli.app, ["releases", "--json"]).stdout)["live"] == 1
    assert "Live: release 1" in runner.invoke(cli.app, ["releases"]).stdout
    assert "seconds=0.500" in runner.invoke(cli.app, ["events", "--kind", "swap"]).stdout


def test_series_and_tables_as_csv(database: Database) -> None:
    now = datetime.now(UTC)
    record_rows(database, replace(make_step("a", 1, positions=((0.9, 0.8, True), (0.5, 0.4, False))), at=now))
    result = runner.invoke(cli.app, ["stats", "--series", "--bucket", "day", "--csv"])
    assert result.exit_code == 0, result.output
    (row,) = csv.DictReader(result.stdout.splitlines())
    assert (row["num_requests"], row["draft_acceptance_rate"], row["tokens_per_second"]) == ("1", str(1 / 3), "")
    assert row["start"].startswith(f"{now:%Y-%m-%d}")
    shown = json.loads(runner.invoke(cli.app, ["stats", "--series", "--days", "400", "--json"]).stdout)
    assert (shown["bucket"], shown["buckets"][0]["num_spec_steps"]) == ("day", 1)
    assert runner.invoke(cli.app, ["stats", "--series", "--bucket", "week"]).exit_code == 2
    event_records.add_event(database, "swap", {"seconds": 1 / 3}, release=1)
    (event,) = csv.DictReader(runner.invoke(cli.app, ["events", "--csv"]).stdout.splitlines())
    assert json.loads(event["detail"]) == {"seconds": 1 / 3} and event["domain"] == ""
    assert runner.invoke(cli.app, ["releases", "--csv"]).stdout.splitlines()[1:] == []
    assert runner.invoke(cli.app, ["events", "--csv", "--json"]).exit_code == 2


def test_runs_are_cancelled_and_tell_without_a_service(database: Database) -> None:
    waiting = run_records.request_run(database, "person")
    done = runner.invoke(cli.app, ["runs", "cancel", str(waiting), "--reason", "later"])
    assert done.stdout == f"Run {waiting} is cancelled.\n", done.output
    assert run_records.get_run(database, waiting).error == "Cancelled: later"
    assert "state=cancelled" in runner.invoke(cli.app, ["runs", "log", str(waiting)]).stdout
    begun = run_records.create_run(database, "person", {})
    run_records.update_run(database, begun, progress={"phase": "distil", "step": 3})
    assert runner.invoke(cli.app, ["runs", "cancel", str(begun)]).stdout == f"Run {begun} is told to end.\n"
    assert "distil step 3" in runner.invoke(cli.app, ["runs", "log", str(begun)]).stdout
    assert runner.invoke(cli.app, ["runs", "cancel", str(waiting)]).exit_code == 2
    assert runner.invoke(cli.app, ["runs", "log", "99"]).exit_code == 2


def test_releases_status_shows_who_runs_what(database: Database) -> None:
    shown = runner.invoke(cli.app, ["releases", "status"])
    assert shown.exit_code == 0 and "None yet." in shown.stdout
    give_sign(database, Sign("a", "h", 7, "trainer", "http://h:1", "1", 3, {}, True))
    assert "trainer" in runner.invoke(cli.app, ["releases", "status"]).stdout
    found = json.loads(runner.invoke(cli.app, ["releases", "status", "--json"]).stdout)
    assert found["live"] == 0
    assert [(row["id"], row["state"], row["release"]) for row in found["decoders"]] == [("a", "leads", 3)]


@pytest.mark.parametrize("command", LISTINGS)
def test_a_named_service_is_never_replaced_by_the_database(database: Database, command: str) -> None:
    result = runner.invoke(cli.app, [command, "--url", NOBODY])
    assert result.exit_code == 2
    assert "adaptive-spec serve" in result.stderr


def test_no_service_and_no_database_leaves_no_file(tmp_path: Path) -> None:
    result = runner.invoke(cli.app, ["stats"])
    assert result.exit_code == 2
    assert "there is no database" in result.stderr
    assert not (tmp_path / "records.db").exists()


@pytest.mark.parametrize("command", [["retrain"], ["calibrate"], ["rollback"], ["generate", "x"]])
def test_orders_need_the_service(command: list[str]) -> None:
    result = runner.invoke(cli.app, command)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: No service answers")


def test_listings_ask_the_service(server: Any) -> None:
    row = {"domain": "code", "num_requests": 3, "mean_acceptance_length": 2.5}
    server.answers["GET", "/api/stats?domain=code"] = (200, {"domains": [row]})
    result = runner.invoke(cli.app, ["stats", "--domain", "code", "--json"])
    assert json.loads(result.stdout) == {"domains": [row]}
    assert "2.500" in runner.invoke(cli.app, ["stats", "--domain", "code"]).stdout


def test_orders_send_the_token(server: Any) -> None:
    server.answers["POST", "/api/releases/rollback"] = (200, {"live": 2})
    result = runner.invoke(cli.app, ["rollback", "--to", "2", "--reason", "bad", "--token", "t"])
    assert result.stdout == "Release 2 is live.\n"
    assert server.calls == [("POST", "/api/releases/rollback", {"to": 2, "reason": "bad"}, "Bearer t")]


def test_thresholds_are_set_by_hand_without_a_service(database: Database) -> None:
    refused = runner.invoke(cli.app, ["thresholds", "set", "code", "--stop-below", "2", "--reason", "x"])
    assert refused.exit_code == 2 and "probability" in refused.stderr
    asked = ["thresholds", "set", "code", "--stop-below", "0.6", "--reason", "[b]slow"]
    done = runner.invoke(cli.app, asked)
    assert done.exit_code == 0 and "stop_below=0.600 for code until" in done.stdout, done.output
    listed = json.loads(runner.invoke(cli.app, ["thresholds", "--json"]).stdout)
    assert listed["thresholds"]["code"]["stop_below"] == 0.6
    table = runner.invoke(cli.app, ["thresholds", "--domain", "code"]).stdout
    assert "[b]slow" in table and "default" in table
    assert "stop_below=0.600" in runner.invoke(cli.app, ["thresholds", "list"]).stdout
    assert runner.invoke(cli.app, ["thresholds", "clear", "code"]).exit_code == 0
    assert "No override" in runner.invoke(cli.app, ["thresholds", "clear", "code"]).stderr


def test_thresholds_are_set_at_the_service(server: Any) -> None:
    answer = {"numbers": {"max_chain_length": 0}, "until": "tomorrow"}
    server.answers["PUT", "/api/thresholds/a/b"] = (200, answer)
    asked = ["thresholds", "set", "a/b", "--max-chain-length", "0", "--reason", "x", "--hours", "2", "--token", "t"]
    assert runner.invoke(cli.app, asked).stdout == "max_chain_length=0 for a/b until tomorrow.\n"
    method, path, body, authorization = server.calls[-1]
    assert (method, path, authorization) == ("PUT", "/api/thresholds/a/b", "Bearer t")
    assert (body["max_chain_length"], body["reason"], body["hours"]) == (0, "x", 2.0)


def test_a_trial_is_shown(database: Database) -> None:
    release_records.add_release(database, 1, "release-000001", None, {}, "candidate")
    canary_records.begin_canary(database, 1, 0.1, "gate passed")
    assert "no request of it has ended yet" in runner.invoke(cli.app, ["releases", "canary"]).stdout
    readings = [Reading("code", index % 3 == 0, 1.0 + index % 2, 30.0) for index in range(60)]
    report = judge(readings, Terms(6, 0.05, 0.05)).to_dict()
    canary_records.note_canary(database, canary_records.running_canary(database).id, report)  # type: ignore[union-attr]
    text = runner.invoke(cli.app, ["releases", "canary"]).stdout
    assert "serves 10% of requests beside release 0: 20 requests against 40" in text and "goodput" in text
    shown = json.loads(runner.invoke(cli.app, ["releases", "canary", "--json"]).stdout)
    assert shown["running"]["release"] == 1 and len(shown["canaries"]) == 1


def test_a_trial_is_ended_by_order(server: Any) -> None:
    server.answers["POST", "/api/canary"] = (200, {"live": 1})
    result = runner.invoke(cli.app, ["releases", "canary", "--promote", "--reason", "sure"])
    assert result.stdout == "Release 1 is live.\n"
    assert server.calls[-1][:3] == ("POST", "/api/canary", {"action": "promote", "reason": "sure"})
    assert runner.invoke(cli.app, ["releases", "canary", "--promote", "--abort"]).exit_code == 2


def test_publishing_over_a_refusal(server: Any) -> None:
    server.answers["POST", "/api/releases/3/publish"] = (200, {"live": 3})
    asked = ["releases", "publish", "3", "--force", "--reason", "known", "--token", "t"]
    result = runner.invoke(cli.app, asked)
    assert result.stdout == "Release 3 is live.\n", result.output
    assert server.calls == [("POST", "/api/releases/3/publish", {"force": True, "reason": "known"}, "Bearer t")]


@pytest.fixture
def calibrated() -> list[dict[str, Any]]:
    """What a service answers: real calibrations of planted records, one of them too small."""
    observations = {
        "code": record(chains(400, 4, 0.3, 1.0), Thresholds(), 0.3),
        "law": record(chains(6, 4, 0.3, 1.0), Thresholds(), 0.3),
    }
    seen = {"code": (MatchAcceptance(3, 20, 40),)}
    found = calibrate(observations, {1: linear_cost(0.01, 0.1, 0.01)}, CalibrationSettings(), 4, {}, ngram=seen)
    rows = [{"domain": name, "release": 2, **asdict(one)} for name, one in found.items()]
    return json.loads(json.dumps(rows))  # type: ignore[no-any-return]


def test_calibrate_says_what_changed_and_draws_it(
    server: Any, calibrated: list[dict[str, Any]], tmp_path: Path
) -> None:
    server.answers["POST", "/api/calibrate"] = (200, {"calibrations": calibrated})
    server.answers["GET", "/api/calibrations?limit=20"] = (200, {"calibrations": calibrated})
    told = runner.invoke(cli.app, ["calibrate", "--chart", str(tmp_path / "a.png")])
    assert told.exit_code == 0, told.output
    assert "code, release 2: its own scaling" in told.stdout or "code, release 2: its own numbers" in told.stdout
    assert "law, release 2: the numbers of all domains;" in told.stdout
    later = next(row for row in calibrated if row["domain"] == "code")["report"]["later"]
    assert f"-> {later['calibration']['new']['error']:.1%} on {later['num_requests']} later requests" in told.stdout
    assert "n-grams      accepted by match length 3: 0.50 of 40" in told.stdout
    listed = runner.invoke(cli.app, ["calibrations", "--chart", str(tmp_path / "b.svg")])
    assert listed.stdout == told.stdout
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("a.png", "b.svg"))
    shown = runner.invoke(cli.app, ["calibrate", "--json"])
    assert json.loads(shown.stdout)["calibrations"] == calibrated
    refused = runner.invoke(cli.app, ["calibrate", "--chart", str(tmp_path / "c.doc")])
    assert refused.exit_code == 2 and len(server.calls) == 3


def test_a_refusal_is_the_services_message(server: Any) -> None:
    server.answers["POST", "/api/retrain"] = (409, {"error": {"message": "A run is active. Wait."}})
    result = runner.invoke(cli.app, ["retrain"])
    assert (result.exit_code, result.stderr) == (2, "Error: A run is active. Wait.\n")


def test_something_else_answers(server: Any) -> None:
    server.answers["GET", "/api/domains"] = (200, "<html>")
    server.answers["GET", "/api/runs?limit=20"] = (502, "bad gateway")
    for command in ("domains", "runs"):
        result = runner.invoke(cli.app, [command])
        assert result.exit_code == 2
        assert "not adaptive-spec" in result.stderr


@pytest.mark.parametrize(("state", "code"), cli.learning.RUN_EXIT_CODES.items())
def test_retrain_waits(server: Any, monkeypatch: pytest.MonkeyPatch, state: str, code: int) -> None:
    monkeypatch.setattr(cli.learning.time, "sleep", lambda seconds: None)
    server.answers["POST", "/api/retrain"] = (202, {"run_id": 4})
    running = {"state": "running", "progress": {"step": 1}}
    server.answers["GET", "/api/runs/4"] = (200, [running, {"state": state, "error": None}])
    result = runner.invoke(cli.app, ["retrain", "--wait"])
    assert result.exit_code == code
    assert f"Run 4 {state}" in result.stdout
    assert "running step=1" in result.stderr


def test_generate_prints_the_stream(server: Any) -> None:
    usage = {"completion_tokens": 2}
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Hé"}}]},
        {"choices": [], "usage": usage, "speculation": {"num_spec_steps": 1}},
    ]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    server.answers["POST", "/v1/chat/completions"] = (200, text)
    result = runner.invoke(cli.app, ["generate", "hi", "--domain", "code", "--chain-length", "0", "--no-record"])
    assert result.stdout == "Hé\n"
    assert "2 tokens in 1 steps" in result.stderr
    body = server.calls[0][2]
    assert body["metadata"] == {"domain": "code"}
    assert body["speculation"] == {"chain_length": 0, "drafter": None, "verifier": None, "record": False}
    answer = json.loads(runner.invoke(cli.app, ["generate", "-", "--json"], input="hi").stdout)
    assert answer["text"] == "Hé" and answer["usage"] == usage


def test_generate_fails_with_the_stream(server: Any) -> None:
    server.answers["POST", "/v1/completions"] = (200, 'data: {"error": {"message": "It broke."}}\n\n')
    result = runner.invoke(cli.app, ["generate", "hi", "--raw"])
    assert (result.exit_code, result.stderr) == (2, "Error: It broke.\n")


def test_chat_remembers_what_was_said_until_it_is_reset(server: Any) -> None:
    usage = {"completion_tokens": 1}
    events = [
        {"choices": [{"delta": {"content": "Yes."}}]},
        {"choices": [], "usage": usage, "speculation": {"num_spec_steps": 1}},
    ]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    server.answers["POST", "/v1/chat/completions"] = (200, text)
    typed = "One?\n\nTwo?\n/reset\nThree?\n/exit\nFour?\n"
    result = runner.invoke(cli.app, ["chat", "--domain", "talk", "--system", "Be brief."], input=typed)
    assert (result.exit_code, result.stdout) == (0, "Yes.\n" * 3)
    asked = [[message["content"] for message in call[2]["messages"]] for call in server.calls]
    assert asked == [["Be brief.", "One?"], ["Be brief.", "One?", "Yes.", "Two?"], ["Be brief.", "Three?"]]
    assert server.calls[0][2]["metadata"] == {"domain": "talk"}


def test_chat_goes_on_after_a_refusal_and_not_without_a_service(server: Any) -> None:
    refusal = {"error": {"message": "Too long.", "type": "invalid_request_error", "param": None, "code": None}}
    server.answers["POST", "/v1/chat/completions"] = (400, json.dumps(refusal))
    result = runner.invoke(cli.app, ["chat"], input="One?\nTwo?\n")
    assert result.exit_code == 0 and result.stderr.count("Error: Too long. /reset begins anew.") == 2
    assert [len(call[2]["messages"]) for call in server.calls] == [1, 1]
    away = runner.invoke(cli.app, ["chat", "--url", "http://127.0.0.1:9"], input="One?\n")
    assert away.exit_code == 2 and "No service answers" in away.stderr


def test_serve_refuses_an_open_host_without_a_token() -> None:
    result = runner.invoke(cli.app, ["serve", "--host", "0.0.0.0"])
    assert result.exit_code == 2
    assert "token" in result.stderr


def test_config_show_prints_what_a_settings_file_may_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ADAPTIVE_SPEC_DECODER__DOMAIN_DRAFTERS", '{"sql": "ngram", "a/b": "combined"}')
    shown = runner.invoke(cli.app, ["config", "show"]).stdout
    assert tomllib.loads(shown)["decoder"]["domain_drafters"] == {"sql": "ngram", "a/b": "combined"}
    (tmp_path / "again.toml").write_text(shown)
    monkeypatch.delenv("ADAPTIVE_SPEC_DECODER__DOMAIN_DRAFTERS")
    again = runner.invoke(cli.app, ["--config", str(tmp_path / "again.toml"), "config", "show"]).stdout
    assert tomllib.loads(again) == tomllib.loads(shown)
    drafters = [next(line for line in text.splitlines() if "domain_drafters" in line) for text in (shown, again)]
    assert drafters[0].endswith("  # environment") and drafters[1].endswith("  # file")
    assert "port = 8000\n" in shown  # a default needs no source


def test_config_show_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTIVE_SPEC_SERVER__TOKEN", "s3cret")
    monkeypatch.setenv("ADAPTIVE_SPEC_RECORDS__URL", "postgresql+psycopg://me:s3cret@db/records")
    as_toml = runner.invoke(cli.app, ["config", "show"]).stdout
    as_json = runner.invoke(cli.app, ["config", "show", "--json"]).stdout
    assert "s3cret" not in as_toml + as_json
    set_ones = {  # TOML has no null: what is not set is left out
        section: {name: value for name, value in values.items() if value is not None}
        for section, values in json.loads(as_json)["settings"].items()
    }
    assert tomllib.loads(as_toml) == set_ones
    assert json.loads(as_json)["sources"]["server.token"] == "environment"
    assert json.loads(as_json)["settings"]["records"]["url"] == "postgresql+psycopg://me:***@db/records"


def test_bad_settings_exit_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[server]\nport = -1\n")
    result = runner.invoke(cli.app, ["--config", str(bad), "config", "show"])
    assert result.exit_code == 2
    assert "server.port" in result.stderr


def test_traces_are_deleted_by_the_service(server: Any) -> None:
    gone = {"request_id": "cmpl-1", "num_traces": 2, "num_evidence": 3}
    server.answers["DELETE", "/api/traces/cmpl-1"] = (200, gone)
    result = runner.invoke(cli.app, ["traces", "delete", "cmpl-1", "--token", "t"])
    assert result.stdout == "Deleted 2 traces and 3 measured chains of cmpl-1.\n"
    assert server.calls == [("DELETE", "/api/traces/cmpl-1", None, "Bearer t")]


def test_traces_without_a_service(database: Database, tmp_path: Path) -> None:
    store = TraceStore(database, tmp_path / "traces", 0.2)
    store.add([make_trace(1, request_id="cmpl-1-0"), make_trace(2)])
    (row,) = json.loads(runner.invoke(cli.app, ["traces", "--json"]).stdout)["domains"]
    assert (row["domain"], row["num_traces"]) == ("code", 2)
    assert "kept mass" in runner.invoke(cli.app, ["traces"]).stdout
    result = runner.invoke(cli.app, ["traces", "delete", "cmpl-1", "--json"])
    assert json.loads(result.stdout) == {"request_id": "cmpl-1", "num_traces": 1, "num_evidence": 0}
    assert [trace.request_id for trace in store.load()] == ["request-2"]
    result = runner.invoke(cli.app, ["traces", "delete", "cmpl-1"])
    assert result.exit_code == 2 and "Nothing is stored" in result.stderr


def test_doctor(database: Database) -> None:
    result = runner.invoke(cli.app, ["doctor", "--no-models", "--json"])
    checks = {check["check"]: check["ok"] for check in json.loads(result.stdout)["checks"]}
    assert set(checks) == {"server", "port", "database", "clock", "disk", "threads", "device"}
    assert checks["server"] and checks["database"]


def test_doctor_knows_whose_the_port_is(database: Database, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def port() -> dict[str, Any]:
        checks = json.loads(runner.invoke(cli.app, ["doctor", "--no-models", "--json"]).stdout)["checks"]
        (found,) = (check for check in checks if check["check"] == "port")
        return dict(found)

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        monkeypatch.setenv("ADAPTIVE_SPEC_SERVER__PORT", str(other.getsockname()[1]))
    assert port()["ok"] and "is free" in port()["detail"]
    monkeypatch.setenv("ADAPTIVE_SPEC_SERVER__PORT", str(server.server_port))
    assert not port()["ok"] and "Something else" in port()["detail"]
    server.answers["GET", "/version"] = (200, json.dumps({"version": "9.9"}))
    assert port()["ok"] and "adaptive-spec 9.9 listens" in port()["detail"]


def test_doctor_tells_what_a_device_can_do(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def device() -> dict[str, Any]:
        checks = json.loads(runner.invoke(cli.app, ["doctor", "--no-models", "--json"]).stdout)["checks"]
        (found,) = (check for check in checks if check["check"] == "device")
        return dict(found)

    speeds = {torch.float32: 2e9, torch.bfloat16: 9e9, torch.float16: 1e9}
    with monkeypatch.context() as patch:
        patch.setattr("adaptive_spec.serving.doctor._multiplications", lambda device, dtype: speeds[dtype])
        assert device()["ok"] and "float32 2 GFLOP/s" in device()["detail"] and "dtype bfloat16" in device()["detail"]
        speeds[torch.bfloat16] = 2.5e9
        assert "consider" not in device()["detail"]
    assert device()["ok"] is True
    monkeypatch.setenv("ADAPTIVE_SPEC_MODEL__DEVICE", "cuda:77")
    assert not device()["ok"] and "There is: cpu" in device()["detail"]


def test_doctor_fails_without_a_database() -> None:
    result = runner.invoke(cli.app, ["doctor", "--no-models"])
    assert result.exit_code == 1
    assert "db upgrade" in re.sub(r"\s+", " ", result.stdout)


def test_bad_layers() -> None:
    result = runner.invoke(cli.app, ["models", "cut-draft", "x", "out", "--layers", "a"])
    assert result.exit_code == 2


def test_version() -> None:
    assert runner.invoke(cli.app, ["--version"]).exit_code == 0


def test_tokens_are_made_listed_and_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTIVE_SPEC_SERVER__TOKEN_FILE", str(tmp_path / "tokens.json"))
    made = runner.invoke(cli.app, ["tokens", "add", "ci", "--scope", "api", "--scope", "read"])
    token = made.stdout.strip()
    assert token.startswith("as-") and "not shown again" in made.stderr
    told = json.loads(runner.invoke(cli.app, ["tokens", "add", "me", "--json"]).stdout)
    assert (told["name"], told["scopes"]) == ("me", ["admin"])
    assert runner.invoke(cli.app, ["tokens", "add", "me"]).exit_code == 2
    assert runner.invoke(cli.app, ["tokens", "add", "x", "--scope", "root"]).exit_code == 2
    listed = runner.invoke(cli.app, ["tokens", "list", "--json"]).stdout
    assert [(row["name"], row["scopes"]) for row in json.loads(listed)["tokens"]] == [
        ("ci", ["api", "read"]),
        ("me", ["admin"]),
    ]
    listed += runner.invoke(cli.app, ["tokens", "list"]).stdout
    stored = json.loads((tmp_path / "tokens.json").read_text())["tokens"]
    for secret in (token, told["token"], *(row[name] for row in stored for name in ("salt", "digest"))):
        assert secret not in listed
    assert runner.invoke(cli.app, ["tokens", "revoke", "ci"]).exit_code == 0
    assert runner.invoke(cli.app, ["tokens", "revoke", "ci"]).exit_code == 2
    assert "ci" not in runner.invoke(cli.app, ["tokens", "list"]).stdout


def test_reads_take_the_token_from_the_environment(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers["GET", "/api/domains"] = (200, {"domains": []})
    monkeypatch.setenv("ADAPTIVE_SPEC_SERVER__TOKEN", "t")
    assert runner.invoke(cli.app, ["domains"]).exit_code == 0
    assert server.calls == [("GET", "/api/domains", None, "Bearer t")]
