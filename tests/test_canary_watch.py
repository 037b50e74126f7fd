"""A release on trial in a real service: it is tried, judged, survives restarts, and ends."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from adaptive_spec.core import Request, SamplingParams, Thresholds
from adaptive_spec.errors import ReleaseError, RunError
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.records import canaries
from adaptive_spec.records.canaries import ServedRequest, list_canaries, running_canary
from adaptive_spec.records.events import list_events
from adaptive_spec.records.releases import list_releases, live_version
from adaptive_spec.releases.bundle import write_bundle
from adaptive_spec.releases.registry import publish
from adaptive_spec.service import Service
from adaptive_spec.settings import Settings, load_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(
        {
            "decoder": {"max_context_tokens": 64, "max_chain_length": 2, "slots": 4},
            "records": {"url": f"sqlite:///{tmp_path / 'r.db'}", "folder": tmp_path / "traces", "flush_seconds": 0.02},
            "releases": {"folder": tmp_path / "releases", "poll_seconds": 0.05, "canary_share": 0.5},
            "schedule": {"retrain_hours": 0, "calibrate_hours": 0},
            "drift": {"enabled": False},
        }
    )


@pytest.fixture
def start(settings: Settings, pair: ModelPair) -> Iterator[Callable[..., Service]]:
    begun: list[Service] = []

    def begin(**changes: object) -> Service:
        releases = settings.releases.model_copy(update=changes)
        service = Service(settings.model_copy(update={"releases": releases}), pair)
        service.start()
        begun.append(service)
        return service

    yield begin
    for service in begun:
        service.stop()


def release(service: Service, version: int, parent: int = 0) -> None:
    """Publish thresholds alone, as a calibration does."""
    settings = service.settings.releases
    provenance = {"parent": parent, "hashes": dict(service.pair.hashes)}
    thresholds = {"*": Thresholds(stop_below=0.0, max_chain_length=2)}
    write_bundle(settings.folder, version, adapter=None, thresholds=thresholds, provenance=provenance)
    publish(service.database, settings.folder, version, {}, canary_share=settings.canary_share)


def serve(service: Service, count: int, name: str) -> set[tuple[int, ...]]:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    streams = [service.engine.submit(Request(f"{name}-{i}", (i, 7, 9), params, domain="a")) for i in range(count)]
    return {stream.collect()[2].usage.releases for stream in streams}  # type: ignore[union-attr]


def counted(service: Service) -> dict[str, float]:
    """Trials that this process has counted, by outcome."""
    samples = [sample for metric in service.telemetry.learning.collect() for sample in metric.samples]
    return {
        one.labels["outcome"]: one.value for one in samples if one.name == "adaptive_spec_canaries_total" and one.value
    }


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)


def test_a_trial_is_run_survives_a_restart_and_is_promoted_by_a_person(start: Callable[..., Service]) -> None:
    service = start()
    release(service, 1)
    until(lambda: service.engine.canary is not None)
    assert serve(service, 24, "first") == {(0,), (1,)}
    with pytest.raises(RunError, match="on trial"):
        service.calibrate()
    with pytest.raises(RunError, match="on trial"):
        service.retrain("person", force=True)
    until(lambda: bool(running_canary(service.database).report))  # type: ignore[union-attr]
    service.stop()
    again = start()
    assert again.engine.canary is not None and again.engine.canary.version == 1 and again.engine.release.version == 0
    assert again.end_canary(True, "looks good") == 1
    assert again.engine.canary is None and serve(again, 8, "second") == {(1,)}
    assert again.engine.pauses.num_swaps == 2  # the trial's start after the restart, and its end
    with pytest.raises(ReleaseError, match="No release is on trial"):
        again.end_canary(False, "twice")


def test_a_rollback_without_a_version_ends_the_trial_for_good(start: Callable[..., Service]) -> None:
    service = start()
    release(service, 1)
    until(lambda: service.engine.canary is not None)
    assert service.rollback(None, "do not like it") == 0
    assert service.engine.canary is None
    release(service, 2)
    until(lambda: service.engine.canary is not None)
    service.end_canary(True, "fine")
    assert service.engine.release.version == 2
    service.rollback(None, "after all")
    assert live_version(service.database) == 0
    assert {one.version: one.state for one in list_releases(service.database)} == {1: "rolled_back", 2: "rolled_back"}
    assert counted(service) == {"aborted": 1, "promoted": 1}


def test_a_trip_in_one_decoder_ends_the_trial_for_all(start: Callable[..., Service]) -> None:
    service, other = start(), start()
    release(service, 1)
    until(lambda: service.engine.canary is not None and other.engine.canary is not None)
    service.engine.call(lambda: service.engine.decoder.lineup.wire.trip("planted"))  # type: ignore[union-attr]
    serve(service, 8, "tripping")
    until(lambda: other.engine.canary is None and service.engine.canary is None)
    (ended,) = list_canaries(service.database)
    assert (ended.state, ended.reason) == ("rolled_back", "planted")
    assert [event.kind for event in list_events(service.database, kind="canary_rolled_back")] == ["canary_rolled_back"]
    assert serve(service, 8, "after") == {(0,)} == serve(other, 8, "beside")
    assert counted(service) == {"rolled_back": 1} == counted(other)


@pytest.mark.parametrize(("default", "live"), [("promote", 1), ("rollback", 0)])
def test_a_trial_without_a_decision_ends_as_the_setting_says(
    start: Callable[..., Service], default: str, live: int
) -> None:
    service = start(canary_max_requests=5, canary_default=default)
    release(service, 1)
    until(lambda: service.engine.canary is not None)
    serve(service, 24, "some")
    until(lambda: service.engine.canary is None)
    assert live_version(service.database) == service.engine.release.version == live
    (ended,) = list_canaries(service.database)
    assert "without a decision" in ended.reason and ended.report["num_canary_requests"] >= 5


@pytest.mark.parametrize(("factor", "state"), [(0.2, "rolled_back"), (5.0, "promoted")])
def test_what_requests_show_decides(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, factor: float, state: str
) -> None:
    """The records are real; what the canary's requests accepted is then multiplied."""

    def shown(*args: object) -> list[ServedRequest]:
        found = canaries.served_requests(*args)  # type: ignore[arg-type]
        copies = [replace(one, request_id=f"{one.request_id}.{i}") for one in found for i in range(8)]
        return [
            replace(
                one,
                num_accepted=int(one.num_steps * 100 * (factor if one.release else 1)),
                num_steps=one.num_steps * 100,
                num_emitted=one.num_emitted * (factor if one.release else 1),
                decoder_seconds=1.0,
                finished_at=one.finished_at + timedelta(microseconds=i),
            )
            for i, one in enumerate(copies)
        ]

    monkeypatch.setattr("adaptive_spec.canary.served_requests", shown)
    service = start()
    release(service, 1)
    until(lambda: service.engine.canary is not None)
    serve(service, 60, "judged")
    until(lambda: service.engine.canary is None)
    (ended,) = list_canaries(service.database)
    assert ended.state == state, ended
    assert service.engine.release.version == (1 if state == "promoted" else 0)


def test_a_release_that_does_not_load_is_rolled_back(start: Callable[..., Service]) -> None:
    service = start()
    settings = service.settings.releases
    write_bundle(settings.folder, 1, adapter=None, thresholds={}, provenance={"parent": 0, "hashes": {"target": "x"}})
    publish(service.database, settings.folder, 1, {}, canary_share=0.5)
    until(lambda: running_canary(service.database) is None)
    (ended,) = list_canaries(service.database)
    assert ended.state == "rolled_back" and "refused by a decoder" in ended.reason
    assert service.engine.canary is None and live_version(service.database) == 0
