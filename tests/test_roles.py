"""Services of several roles on one database, in one process: who leads, who is asked, who follows."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from adaptive_spec.cluster.idle import IdleEngine
from adaptive_spec.core import Request, SamplingParams, ThresholdOverride, Thresholds
from adaptive_spec.errors import NotLeaderError, UnavailableError
from adaptive_spec.records.decoders import list_decoders
from adaptive_spec.records.runs import get_run
from adaptive_spec.releases.bundle import write_bundle
from adaptive_spec.releases.registry import publish
from adaptive_spec.service import Service
from adaptive_spec.serving.app import create_app
from adaptive_spec.settings import Settings
from tests.test_service import open_gate, serve, settings, until, wait

__all__ = ["open_gate", "settings"]  # fixtures of a service on tiny models


@pytest.fixture
def begin(settings: Settings) -> Iterator[Callable[..., Service]]:
    """Start services of a role, one after the other."""
    services: list[Service] = []

    def start(role: str, port: int = 8000) -> Service:
        cluster = settings.cluster.model_copy(update={"role": role, "heartbeat_seconds": 0.5})
        server = settings.server.model_copy(update={"port": port})
        service = Service(settings.model_copy(update={"cluster": cluster, "server": server}))
        service.start()
        services.append(service)
        return service

    yield start
    for service in services:
        if service.ready:
            service.stop()


def listed(service: Service) -> dict[str, tuple[str, int]]:
    """Role -> state and release."""
    return {row.role: (row.state, row.release) for row in list_decoders(service.database, 10)}


def release(service: Service, version: int, settings: Settings) -> None:
    folder = settings.releases.folder
    provenance = {"parent": 0, "hashes": service.hashes}
    thresholds = {"a": Thresholds(temperature=2.0)}
    write_bundle(folder, version, adapter=None, thresholds=thresholds, provenance=provenance)
    publish(service.database, folder, version, {})


@pytest.mark.slow
def test_a_trainer_trains_what_a_decoder_asks_for(begin: Callable[..., Service], settings: Settings) -> None:
    decoder = begin("decoder", 8001)
    assert not decoder.leads
    with pytest.raises(NotLeaderError, match="No process leads"):
        decoder.calibrate()
    serve(decoder, 40, "a")
    decoder.writer.flush(10)
    run_id = decoder.retrain("person")
    assert get_run(decoder.database, run_id).state == "requested"  # it waits for somebody who may

    trainer = begin("trainer", 8002)
    assert trainer.leads and isinstance(trainer.engine, IdleEngine)
    assert trainer.pipeline.cost.to_dict() == decoder.pipeline.cost.to_dict()  # as the decoder has measured it
    assert wait(trainer, run_id) == "passed"
    run = get_run(trainer.database, run_id)
    assert run.settings == settings.learning.model_dump(mode="json") and run.trigger == "person"
    until(lambda: {decoder.engine.release.version, trainer.engine.release.version} == {run.release})
    until(lambda: listed(decoder) == {"decoder": ("follows", run.release), "trainer": ("leads", run.release)})

    with pytest.raises(NotLeaderError, match=f"Process {os.getpid()} .* leads. Ask it: --url http://127.0.0.1:8002"):
        decoder.calibrate()
    assert {row["domain"] for row in trainer.calibrate()} >= {"a"}
    assert decoder.rollback(0, "test") == 0
    until(lambda: trainer.engine.release.version == 0)


def test_a_trainer_answers_http_without_decoding(begin: Callable[..., Service], settings: Settings) -> None:
    trainer = begin("trainer")  # no decoder has measured a cost: it does so itself, then lets the models go
    assert not hasattr(trainer, "pair") and set(trainer.pipeline.cost.measured) == {1, 2, 4}
    with pytest.raises(UnavailableError, match="only trains"):
        trainer.engine.submit(Request("r", (1, 2), SamplingParams(), domain="a"))
    release(trainer, 1, settings)
    until(lambda: trainer.engine.release.version == 1)
    with TestClient(create_app(trainer)) as client:
        assert client.get("/readyz").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert client.get("/api/thresholds").json()["thresholds"]["a"]["temperature"] == 2.0
        assert "adaptive_spec_live_release 1.0" in client.get("/metrics").text

        def leading() -> list[dict[str, Any]]:
            listed = client.get("/api/decoders").json()["decoders"]
            return [row for row in listed if (row["state"], row["release"]) == ("leads", 1)]

        (row,) = until(leading)
        assert (row["role"], row["pid"]) == ("trainer", os.getpid())
        assert "trainer" in client.get("/").text


def test_thresholds_set_by_hand_anywhere_are_in_force_everywhere(begin: Callable[..., Service]) -> None:
    decoder, trainer = begin("decoder", 8001), begin("trainer", 8002)
    trainer.override_thresholds("a", ThresholdOverride(max_chain_length=0), "test", hours=1)
    until(lambda: decoder.engine.decoder.lineup.overrides.of("a") == ThresholdOverride(max_chain_length=0))
    assert decoder.engine.release.for_domain("a").max_chain_length > 0
    assert trainer.clear_override("a", "done")
    until(lambda: decoder.engine.decoder.lineup.overrides.of("a") is None)


def test_the_second_of_two_takes_over(begin: Callable[..., Service], settings: Settings) -> None:
    first, second = begin("all", 8001), begin("all", 8002)
    assert first.leads and not second.leads
    with TestClient(create_app(second)) as client:
        answer = client.post("/api/calibrate")
        assert answer.status_code == 409 and "http://127.0.0.1:8001" in answer.json()["error"]["message"]
    release(first, 1, settings)
    until(lambda: second.engine.release.version == 1)  # SQLite: by polling
    late = begin("decoder", 8003)
    assert late.engine.release.version == 1
    first.stop()
    until(lambda: second.leads)
    until(lambda: listed(second) == {"all": ("leads", 1), "decoder": ("follows", 1)})
    second.calibrate()  # is not refused any more


@pytest.mark.slow
def test_a_run_is_cut_short_with_the_lead_and_goes_on_with_it(settings: Settings) -> None:
    learning = settings.learning.model_copy(update={"checkpoint_seconds": 0.01, "batch_tokens": 32})
    service = Service(settings.model_copy(update={"learning": learning}))
    service.start()
    serve(service, 40, "a")
    run_id = service.retrain("person")
    checkpoint = settings.releases.folder / "runs" / str(run_id) / "checkpoint.safetensors"
    until(checkpoint.exists)
    service._lose_lead()
    until(lambda: get_run(service.database, run_id).state == "cancelled")
    assert "no longer leads" in (get_run(service.database, run_id).error or "")
    until(lambda: not service._training.locked())
    service._take_lead()
    until(lambda: get_run(service.database, run_id).report.get("num_resumptions") == 1)
    assert wait(service, run_id) == "passed"
    service.stop()
