"""The whole loop on tiny real models: serve, record, retrain in a child process, gate, publish, hot-reload."""

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from sqlalchemy import text
from starlette.testclient import TestClient

from adaptive_spec.core import Request, SamplingParams
from adaptive_spec.errors import ReleaseError, RunError
from adaptive_spec.learning.yielding import Yielding
from adaptive_spec.records.events import EventRecord, list_events
from adaptive_spec.records.releases import get_release
from adaptive_spec.records.runs import create_run, get_run, list_runs, update_run
from adaptive_spec.records.statistics import DomainStatistics, domain_statistics
from adaptive_spec.releases.bundle import bundle_name, write_bundle
from adaptive_spec.releases.registry import refuse
from adaptive_spec.releases.report import Check, GateReport
from adaptive_spec.service import Service
from adaptive_spec.serving.app import create_app
from adaptive_spec.serving.metrics import registry_of
from adaptive_spec.settings import Settings, load_settings
from tests.calibration.recorded import STEPS, record_requests
from tests.conftest import byte_tokenizer, tiny_model


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Models on disk, as the child process needs them; the draft is an untrained model of the same family."""
    target, draft = tiny_model(0), tiny_model(7, layers=1)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    return load_settings(
        {
            "model": {"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft"), "threads": 1},
            "decoder": {"max_context_tokens": 96, "max_chain_length": 3, "slots": 4},
            "records": {"url": f"sqlite:///{tmp_path / 'r.db'}", "folder": tmp_path / "traces", "flush_seconds": 0.05},
            "releases": {"folder": tmp_path / "releases", "poll_seconds": 0.1},
            "learning": {"min_traces": 10, "rank": 8, "max_epochs": 6, "learning_rate": 1e-2, "nice": 0},
            "schedule": {"retrain_hours": 0, "calibrate_hours": 0},
            "server": {"token_file": tmp_path / "tokens.json", "allowed_hosts": ["testserver"]},
        }
    )


@pytest.fixture(autouse=True)
def open_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little text teaches these drafts nothing for certain.  What the gate asks has tests of its own."""
    passing = GateReport((Check("goodput", True, "not asked"),))
    monkeypatch.setattr("adaptive_spec.pipeline.gate", lambda before, after, share: passing)


@pytest.fixture
def service(settings: Settings) -> Iterator[Service]:
    service = Service(settings)
    service.start()
    yield service
    service.stop()


def serve(service: Service, count: int, domain: str, chain_length: int | None = 3) -> list[list[int]]:
    params = SamplingParams(max_tokens=24, ignore_eos=True, chain_length=chain_length)
    streams = [
        service.engine.submit(Request(f"{domain}-{time.time_ns()}-{i}", (i % 200, 7, 9), params, domain=domain))
        for i in range(count)
    ]
    return [stream.collect()[1] for stream in streams]


def wait(service: Service, run_id: int) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        state = get_run(service.database, run_id).state
        if state not in ("queued", "running"):
            return state
        time.sleep(0.1)
    raise AssertionError(f"run {run_id} did not end")


def test_costs_are_measured_once_and_kept_up_to_date(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Service(settings)
    first.start()
    measured = first.engine.cost
    assert measured is not None and set(measured.measured) == {1, 2, 4}
    serve(first, 40, "a")
    lately = first.engine.cost
    assert lately is not None and lately.to_dict() != measured.to_dict()
    first.stop()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr("adaptive_spec.decoding.engine.Engine.measure_cost", refuse)
        again = Service(settings)
        again.start()
        kept = again.engine.cost
        assert kept is not None and kept.to_dict() == lately.to_dict()
        again.stop()
        longer = settings.model_copy(update={"decoder": settings.decoder.model_copy(update={"max_chain_length": 5})})
        other = Service(longer)  # costs of other chains do not fit
        with pytest.raises(AssertionError, match="measured again"):
            other.start()
        other.stop()


def test_the_loop_closes(service: Service) -> None:
    before = serve(service, 40, "a")
    assert service.writer.flush(10)
    (stats,) = domain_statistics(service.database, domain="a")
    assert stats.num_requests == 40
    assert stats.num_emitted_tokens == 40 * 24

    run_id = service.retrain("person")
    during = serve(service, 20, "a")
    assert during == before[:20]
    state = wait(service, run_id)
    run = get_run(service.database, run_id)
    assert state == "passed", (run.error, run.report)
    assert [check["name"] for check in run.report["checks"]] == [
        "integrity",
        "golden",
        "parent",
        "goodput",
    ]
    deadline = time.monotonic() + 10
    while service.engine.release.version != run.release and time.monotonic() < deadline:
        time.sleep(0.05)
    assert service.engine.release.version == run.release

    assert serve(service, 40, "a") == before
    service.writer.flush(10)
    (old,) = domain_statistics(service.database, domain="a", release=0)
    (new,) = domain_statistics(service.database, domain="a", release=run.release)
    assert new.mean_acceptance_length > old.mean_acceptance_length
    check_counters(service, old, 0)
    check_counters(service, new, run.release)
    until(lambda: counted(service, "runs_total", outcome="passed") == 1)
    assert counted(service, "swaps_total") == 1

    assert service.rollback(0, "test") == 0
    assert service.engine.release.version == 0
    assert serve(service, 5, "a") == before[:5]
    kinds = [event.kind for event in list_events(service.database, limit=50)]
    assert {"release_live", "release_swapped"} <= set(kinds) and "rollback" in kinds


def counted(service: Service, name: str, **labels: str) -> float:
    return registry_of(service).get_sample_value(f"adaptive_spec_{name}", labels) or 0


def check_counters(service: Service, recorded: DomainStatistics, release: int) -> None:
    """What the process counted of domain "a" under a release is what the records hold of it."""
    source = {"domain": "a", "release": str(release), "drafter": "model"}
    assert counted(service, "spec_decode_num_drafts_total", **source) == recorded.num_spec_steps > 0
    assert counted(service, "spec_decode_num_draft_tokens_total", **source) == recorded.num_draft_tokens
    assert counted(service, "spec_decode_num_accepted_tokens_total", **source) == recorded.num_accepted_draft_tokens
    by_drafter = [counted(service, "generation_tokens_total", **source | {"drafter": one}) for one in ("model", "none")]
    assert sum(by_drafter) == recorded.num_emitted_tokens


def test_the_counters_are_those_of_the_records(service: Service) -> None:
    serve(service, 12, "a")
    service.writer.flush(30)
    (stats,) = domain_statistics(service.database, domain="a")
    check_counters(service, stats, 0)
    assert counted(service, "request_success_total", domain="a", finished_reason="length") == 12
    assert counted(service, "time_to_first_token_seconds_count", domain="a") == 12
    until(lambda: counted(service, "traces_stored_total", domain="a") == len(service.traces.load()) > 0)
    run_id = create_run(service.database, "person", {})
    update_run(service.database, run_id, state="refused", report={"gain": {"gain_share": 0.02}})
    service._count_run(run_id, 3.0)
    service._count_run(99, 1.0)  # of which the database knows nothing
    assert [counted(service, "runs_total", outcome=outcome) for outcome in ("refused", "failed", "passed")] == [1, 1, 0]
    assert (counted(service, "last_run_seconds"), counted(service, "last_run_gain_share")) == (1.0, 0.02)


def test_calibration_publishes_thresholds(service: Service) -> None:
    serve(service, 40, "a")  # chains of a fixed length: under the policy there might be none
    reports = service.calibrate()
    assert {report["domain"] for report in reports} >= {"a", "*"}
    assert service.engine.release.version > 0
    assert "a" in service.engine.release.thresholds


def drifting(settings: Settings, **drift: object) -> Service:
    """A service that looks for drift often and soon finds it."""
    given = {"min_steps": 500, "poll_seconds": 0.05, "false_alarm_steps": 10_000, **drift}
    return Service(settings.model_copy(update={"drift": settings.drift.model_copy(update=given)}))


def answer_to_drift(service: Service) -> EventRecord:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := list_events(service.database, kind="drift_answer"):
            return found[-1]
        time.sleep(0.05)
    raise AssertionError("no drift was answered")


def test_drift_of_calibration_calibrates_to_what_came_after(settings: Settings) -> None:
    service = drifting(settings)
    service.start()
    record_requests(service.database, 100, 0.6, name="before", domain="a")
    record_requests(service.database, 60, 0.6, confidence=0.9, name="after", domain="a", seed=1)
    answer = answer_to_drift(service)
    assert (answer.domain, answer.detail["action"], answer.detail["started"]) == ("a", "calibrate", True), answer
    (event, *_) = reversed(list_events(service.database, kind="drift"))
    assert (event.domain, event.release) == ("a", 0)
    assert (event.detail["stream"], event.detail["direction"]) == ("calibration", "down")
    live = service.engine.release
    assert live.version == 1 and f"release {live.version}" in answer.detail["reason"]
    assert 0 < live.thresholds["a"].num_observations <= 70 * STEPS  # not the 1,000 steps before
    assert live.thresholds["a"].temperature > 2  # a confidence of .9 means .6 now
    with TestClient(create_app(service)) as client:
        assert (
            'adaptive_spec_drifts_total{direction="down",domain="a",stream="calibration"} 1'
            in client.get("/metrics").text
        )
        serve(service, 4, "a")
        service.writer.flush(10)
        deadline = time.monotonic() + 10
        while not (found := client.get("/api/drift").json()["streams"]) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert {row["release"] for row in found} == {live.version}
    assert found[1]["stream"] == "calibration" and found[1]["last_drift"]["direction"] == "down"
    service.stop()


@pytest.mark.slow
def test_a_stale_draft_retrains_and_a_rise_does_not(settings: Settings) -> None:
    service = drifting(settings, triggers="retrain")
    service.start()
    serve_short(service, 40, 11)
    record_requests(service.database, 100, 0.6, name="before", domain="a")
    record_requests(service.database, 60, 0.95, confidence=0.95, name="after", domain="a", seed=1)
    answer = answer_to_drift(service)
    assert (answer.detail["direction"], answer.detail["action"], answer.detail["started"]) == ("up", "nothing", False)
    assert list_runs(service.database) == []
    record_requests(service.database, 100, 0.6, name="b-before", domain="b")
    record_requests(service.database, 60, 0.2, confidence=0.2, name="b-after", domain="b", seed=1)
    deadline = time.monotonic() + 30
    while not (runs := list_runs(service.database)) and time.monotonic() < deadline:
        time.sleep(0.05)
    (run,) = runs
    assert run.trigger == "drift"
    service.stop()  # which cancels it


def test_drift_does_not_wait_for_a_run(settings: Settings) -> None:
    service = drifting(settings)
    service.start()
    with service._training:  # as a run holds it
        record_requests(service.database, 100, 0.6, name="before", domain="a")
        record_requests(service.database, 60, 0.2, confidence=0.2, name="after", domain="a", seed=1)
        answer = answer_to_drift(service)
    assert not answer.detail["started"] and answer.detail["reason"].startswith("not now, because Run")
    service.stop()


def test_drift_can_be_turned_off(settings: Settings) -> None:
    service = drifting(settings, enabled=False)
    service.start()
    record_requests(service.database, 3, 0.6, name="a")
    time.sleep(0.3)
    assert service.drift_states == ()
    service.stop()


def test_a_refused_release_is_forced_on_record(service: Service, settings: Settings, tmp_path: Path) -> None:
    before = serve(service, 8, "a")
    adapter = tmp_path / "adapter"
    get_peft_model(copy.deepcopy(service.pair.draft), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        str(adapter)
    )
    provenance = {"parent": 0, "hashes": dict(service.pair.hashes)}
    write_bundle(settings.releases.folder, 1, adapter=adapter, thresholds={}, provenance=provenance)
    report = GateReport((Check("goodput", False, "no gain is certain"),)).to_dict()
    refuse(service.database, 1, 0, report, bundle_name(1))
    with pytest.raises(ReleaseError, match="no gain is certain"):
        service.publish(1, "please")
    assert service.engine.release.version == 0
    assert service.publish(1, "to see it", force=True) == 1
    assert service.engine.release.version == 1
    assert serve(service, 8, "a") == before
    assert get_release(service.database, 1).report["override"]["checks"] == ["goodput"]


def test_too_little_data_fails_the_run_with_advice(service: Service) -> None:
    serve(service, 2, "a")
    with TestClient(create_app(service)) as client:
        answer = client.post("/api/retrain")
        assert answer.status_code == 409 and "learning.min_traces is 10" in answer.json()["error"]["message"]
        (event,) = client.get("/api/events?kind=retrain_declined").json()["events"]
    assert event["detail"]["trigger"] == "person" and "not now, because" in event["detail"]["reason"]
    assert list_runs(service.database) == []
    run_id = service.retrain("person", force=True)
    assert wait(service, run_id) == "failed"
    assert "min_traces" in (get_run(service.database, run_id).error or "")


@pytest.mark.slow
def test_new_traces_start_a_run_and_a_cool_down_holds_the_next(settings: Settings) -> None:
    schedule = settings.schedule.model_copy(update={"retrain_new_traces": 20, "poll_seconds": 0.3})
    learning = settings.learning.model_copy(update={"max_epochs": 1})
    service = Service(settings.model_copy(update={"schedule": schedule, "learning": learning}))
    service.start()
    serve_short(service, 40, 11)
    until(lambda: list_runs(service.database))
    (run,) = list_runs(service.database)
    assert run.trigger == "volume"
    declined = until(lambda: list_events(service.database, kind="retrain_declined"))
    assert [event.detail["kind"] for event in declined] == ["active"]
    wait(service, run.id)
    serve_short(service, 40, 17)
    declined = until(lambda: list_events(service.database, kind="retrain_declined")[:-1])
    assert declined[0].detail["kind"] == "cooldown" and declined[0].detail["trigger"] == "volume"
    time.sleep(1.0)  # three looks
    assert len(list_events(service.database, kind="retrain_declined")) == 2  # told once each
    service.stop()


def serve_short(service: Service, count: int, second: int) -> None:
    """Answers too short to be held for a loop: every one is a trace."""
    params = SamplingParams(max_tokens=8, ignore_eos=True, chain_length=3)
    requests = [Request(f"{second}-{i}", (i, second, 13), params, domain="short") for i in range(count)]
    streams = [service.engine.submit(request) for request in requests]
    assert all(len(stream.collect()[1]) == 8 for stream in streams)


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(0.05)
    raise AssertionError("nothing came")


@pytest.mark.slow
def test_a_killed_run_fails_and_goes_on_when_told(settings: Settings) -> None:
    """kill -9 of the child: decoding goes on, nothing goes live; the same run then ends with a release."""
    learning = settings.learning.model_copy(update={"checkpoint_seconds": 0.01, "batch_tokens": 32})
    service = Service(settings.model_copy(update={"learning": learning}))
    service.start()
    with pytest.raises(RunError, match="No run was interrupted"):
        service.retrain(resume=True)
    before = serve(service, 40, "a")
    run_id = service.retrain("person")
    kill_child(service, run_id)
    assert wait(service, run_id) == "failed"
    run = get_run(service.database, run_id)
    assert run.error is not None and "signal 9" in run.error and "--resume" in run.error
    assert serve(service, 5, "a") == before[:5] and service.engine.release.version == 0
    left = settings.releases.folder / "runs" / str(run_id)
    assert (left / "settings.json").stat().st_mode & 0o777 == 0o600
    assert service.retrain(resume=True) == run_id
    assert wait(service, run_id) == "passed", get_run(service.database, run_id)
    run = get_run(service.database, run_id)
    assert run.report["num_resumptions"] == 1 and run.report["passed"] is True
    assert run.report["training"]["throughput_share"] > 0
    assert run.report["serving"].keys() == {"slowdown_share", "num_steps", "num_pauses", "paused_seconds"}
    until(lambda: service.engine.release.version == run.release)
    service.stop()  # joins the run's thread, which clears up after the row says that it passed
    assert not left.exists()


@pytest.mark.slow
def test_a_run_that_ended_with_its_service_goes_on_with_the_next(settings: Settings) -> None:
    learning = settings.learning.model_copy(update={"checkpoint_seconds": 0.01, "batch_tokens": 32})
    settings = settings.model_copy(update={"learning": learning})
    service = Service(settings)
    service.start()
    serve(service, 40, "a")
    run_id = service.retrain("person")
    child = pid_of_child(service, run_id)
    service.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    again = Service(settings)
    again.start()
    assert get_run(again.database, run_id).error in (None, "The service stopped. " + ADVICE)
    pid_of_child(again, run_id)
    assert get_run(again.database, run_id).report["num_resumptions"] == 1
    again.stop()
    third = Service(settings)  # once is enough: what failed twice may fail always
    third.start()
    time.sleep(0.5)
    assert [(run.id, run.state) for run in list_runs(third.database)] == [(run_id, "cancelled")]
    third.stop()


@pytest.mark.slow
def test_a_cancelled_run_ends_at_once_and_does_not_go_on_with_the_next_start(settings: Settings) -> None:
    learning = settings.learning.model_copy(update={"checkpoint_seconds": 0.01, "batch_tokens": 32})
    settings = settings.model_copy(update={"learning": learning})
    service = Service(settings)
    service.start()
    serve(service, 40, "a")
    run_id = service.retrain("person")
    pid_of_child(service, run_id)
    assert service.cancel_run(run_id, "wrong data") == "running"
    assert wait(service, run_id) == "cancelled"
    assert (get_run(service.database, run_id).error or "").startswith("Cancelled: wrong data.")
    service.stop()
    again = Service(settings)
    again.start()
    time.sleep(1.0)
    assert get_run(again.database, run_id).state == "cancelled" and again.engine.release.version == 0
    again.stop()


ADVICE = "`adaptive-spec retrain --resume` goes on from its checkpoint."


def pid_of_child(service: Service, run_id: int) -> int:
    """Wait until the run has a process and a checkpoint."""
    checkpoint = service.settings.releases.folder / "runs" / str(run_id) / "checkpoint.safetensors"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        run = get_run(service.database, run_id)
        if run.state == "running" and checkpoint.exists():
            assert run.pid is not None and run.pid != os.getpid()
            return run.pid
        time.sleep(0.02)
    raise AssertionError(f"run {run_id} does not train: {run}")


def kill_child(service: Service, run_id: int) -> None:
    os.kill(pid_of_child(service, run_id), signal.SIGKILL)


@pytest.mark.slow
def test_a_run_that_may_cost_nothing_pauses_while_requests_are_decoded(settings: Settings) -> None:
    learning = settings.learning.model_copy(update={"batch_tokens": 32, "max_epochs": 20})
    service = Service(settings.model_copy(update={"learning": learning}))
    service.start()
    before = serve(service, 40, "a")
    cores: list[bool] = []
    service.pipeline.yielding = Yielding(service._pace, 0.0, cores.append, window_seconds=0.2)
    run_id = service.retrain("person")
    phases = set()
    deadline = time.monotonic() + 120
    while (run := get_run(service.database, run_id)).state in ("queued", "running"):
        assert time.monotonic() < deadline, run
        phases.add(run.progress.get("phase"))
        if "paused" not in phases:  # afterwards it is alone, and ends
            assert serve(service, 10, "a") == before[:10]
    assert run.state == "passed" and "paused" in phases, (run, phases)
    serving = run.report["serving"]
    assert serving["num_pauses"] >= 1 and serving["paused_seconds"] > 0 and serving["num_steps"] >= 10
    assert cores[:3] == [True, False, True] and cores[-1] is False
    service.stop()


def test_answers_over_http(settings: Settings) -> None:
    """Choices, log-probs, cached answers and deadlines, from the route down to the records."""
    decoder = settings.decoder.model_copy(update={"answer_cache_tokens": 500, "max_context_tokens": 400})
    service = Service(settings.model_copy(update={"decoder": decoder}))
    service.start()
    with TestClient(create_app(service)) as client:
        body = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "metadata": {"domain": "a"}}
        first = client.post("/v1/completions", json={**body, "logprobs": 2, "n": 2}).json()
        one, two = first["choices"]
        assert {**one, "index": 1} == two and len(one["logprobs"]["tokens"]) == 8
        assert max(one["logprobs"]["token_logprobs"]) <= 0 and first["speculation"]["cached"] is False
        again = client.post("/v1/completions", json={**body, "logprobs": 2}).json()
        assert again["choices"] == [one] and again["speculation"]["cached"] is True
        late = client.post("/v1/completions", json={**body, "max_tokens": 390, "deadline_seconds": 0.02})
        assert late.status_code == 408 and "raise deadline_seconds" in late.json()["error"]["message"]
        service.writer.flush(10)
        (stats,) = client.get("/api/stats?domain=a").json()["domains"]
        assert stats["num_cached_requests"] == 1
        assert client.get("/api/stats?policy=cache").json()["domains"][0]["num_requests"] == 0
        assert 'adaptive_spec_num_cached_requests_total{domain="a"} 1.0' in client.get("/metrics").text
        with service.database.session_scope(read_only=True) as session:
            reasons = sorted(session.execute(text("SELECT policy, finish_reason FROM requests")))
    assert [tuple(row) for row in reasons] == [
        ("cache", "length"),
        ("policy", "deadline"),
        ("policy", "length"),
        ("policy", "length"),
    ]
    service.stop()


def relaxing(settings: Settings, **verification: object) -> Service:
    given = {"verifier": "logits", "divergence_budget": 0.9, "evidence_share": 1.0, **verification}
    service = Service(settings.model_copy(update={"verification": settings.verification.model_copy(update=given)}))
    service.start()
    return service


def rule_of_a(service: Service) -> dict[str, Any]:
    """What a calibration says of the verifier of domain a."""
    rule: dict[str, Any] = {row["domain"]: row["report"] for row in service.calibrate()}["a"]["rule"]
    return rule


def test_verifiers_are_calibrated_on_what_was_measured(settings: Settings) -> None:
    """From decoded chains to the rule that the decoder then judges by.  The models are strangers: much may diverge."""
    service = relaxing(settings)
    serve(service, 60, "a")
    found = rule_of_a(service)
    assert (found["reason"], found["verifier"], found["num_requests"]) == ("certified", "logits", 60)
    assert 0.1 < found["divergence_share"] < 0.9 and found["tokens_per_step"] > found["tokens_per_step_before"]
    live = service.engine.release
    assert live.version == 1 and live.thresholds["a"].rule is not None
    assert live.thresholds["a"].rule.numbers == found["numbers"]
    assert live.thresholds["*"].rule is None

    serve(service, 10, "a")  # what earlier releases with this draft and like temperatures have shown still counts
    again = rule_of_a(service)
    assert again["before"] == {"verifier": found["verifier"], "numbers": found["numbers"]}
    assert again["num_requests"] >= 60
    service.stop()


def test_a_verifier_without_enough_evidence_is_exact_and_says_so(settings: Settings) -> None:
    service = relaxing(settings, verifier="ngram", divergence_budget=0.02)
    serve(service, 20, "a")
    with TestClient(create_app(service)) as client:
        found = {row["domain"]: row["report"] for row in client.post("/api/calibrate").json()["calibrations"]}["a"][
            "rule"
        ]
    assert (found["reason"], found["num_requests"], found["requests_needed"]) == ("not_enough", 20, 114)
    rule = service.engine.release.thresholds["a"].rule
    assert rule is not None and rule.verifier == "exact" == found["verifier"]
    service.stop()


def test_an_exact_service_measures_nothing(service: Service) -> None:
    serve(service, 40, "a")
    assert all("rule" not in row["report"] for row in service.calibrate())
    with service.database.session_scope(read_only=True) as session:
        assert session.scalar(text("SELECT count(*) FROM evidence")) == 0


def test_requests_are_forgotten_and_domains_left_untraced(settings: Settings) -> None:
    records = settings.records.model_copy(update={"untraced_domains": ("law",), "flush_seconds": 60.0})
    service = Service(settings.model_copy(update={"records": records}))
    service.start()
    for seed, (name, domain) in enumerate((("one", "a"), ("two", "a"), ("three", "law"))):
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=seed, n=2)
        service.engine.submit(Request(name, (5, 7, 9), params, domain=domain)).collect()
    forgotten = service.forget("one")  # what waits in the writer's queue too
    assert forgotten.num_traces == 2
    assert {trace.request_id for trace in service.traces.load()} == {"two-0", "two-1"}
    assert {row.domain: row.num_requests for row in domain_statistics(service.database)} == {"a": 4, "law": 2}
    service.stop()
