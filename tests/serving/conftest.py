"""A service with a scripted engine and a real database, behind the real application."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adaptive_spec.calibration.override import override_by_hand
from adaptive_spec.calibration.watch import StreamState
from adaptive_spec.core import POOLED, Release, Request, ThresholdOverride, Thresholds
from adaptive_spec.decoding.budget import Budget
from adaptive_spec.decoding.engine import Pauses
from adaptive_spec.errors import AdaptiveSpecError, BusyError, ReleaseError, RunError
from adaptive_spec.records import runs as run_records
from adaptive_spec.records.canaries import ABORTED, PROMOTED, end_canary, running_canary
from adaptive_spec.records.database import Database
from adaptive_spec.records.overrides import OverrideRecord, clear_override
from adaptive_spec.records.retention import Forgotten, forget_request
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.releases.registry import put_live
from adaptive_spec.serving.app import create_app
from adaptive_spec.settings import Settings, load_settings
from adaptive_spec.telemetry.telemetry import Telemetry

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('the last message is ours') }}{% endif %}"
)


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int = 3
    num_steps: int = 1
    num_draft_tokens: int = 4
    num_accepted_draft_tokens: int = 2
    releases: tuple[int, ...] = (7,)
    cached: bool = False
    num_divergent_tokens: int = 1


@dataclass(frozen=True)
class TokenLogProb:
    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None
    error: AdaptiveSpecError | None = None
    log_probs: tuple[TokenLogProb, ...] = ()
    index: int = 0


class Stream:
    """Plays the engine's script, each line for every choice: texts and deltas are yielded, errors raised, None waits
    for the cancellation."""

    def __init__(self, script: list[Any], request: Request) -> None:
        self.script = script
        self.num_choices = request.params.n
        self.usage = Usage(len(request.prompt_ids))
        self.cancelled = threading.Event()

    def events(self) -> Iterator[Delta]:
        for item in self.script:
            if isinstance(item, Exception):
                raise item
            if item is None:
                assert self.cancelled.wait(10), "nobody cancelled the stream"
                yield Delta("", finish_reason="cancelled", usage=self.usage)
                return
            delta = Delta(item) if isinstance(item, str) else item
            for index in range(self.num_choices):
                yield replace(delta, index=index)
            if delta.finish_reason:
                return
        for index in range(self.num_choices):
            yield Delta("", finish_reason="stop", usage=self.usage, index=index)

    def cancel(self) -> None:
        self.cancelled.set()


class Engine:
    def __init__(self) -> None:
        thresholds = {POOLED: Thresholds(stop_below=0.3), "code": Thresholds(temperature=1.5)}
        self.release = Release(version=7, thresholds=MappingProxyType(thresholds))
        self.pauses = Pauses(2, 0.25, 0.5, 0.75)
        self.canary: Release | None = None
        self.canary_share = 0.0
        self.num_active = 1
        self.queue_depth = 2
        self.num_listener_failures = 5
        self.num_recalled_tokens = 96
        self.budgets = {"code": Budget(0.02, 1000), "prose": Budget(0.1, 100)}
        self.budgets["prose"].count(50, 0, False)
        self.budgets["prose"].count(10, 5, True)
        self.alive = True
        self.script: list[Any] = ["Hel", "lo ", "wörld"]
        self.busy = False
        self.requests: list[Request] = []
        self.streams: list[Stream] = []

    def submit(self, request: Request) -> Stream:
        if self.busy:
            raise BusyError("The queue is full. Try again later.")
        self.requests.append(request)
        self.streams.append(Stream(self.script, request))
        return self.streams[-1]


@dataclass
class Writer:
    num_written: int = 12
    num_dropped: int = 3
    queue_depth: int = 4
    lag_seconds: float = 1.5


class Service:
    def __init__(self, settings: Settings, database: Database, tokenizer: Any) -> None:
        self.settings = settings
        self.database = database
        self.tokenizer = tokenizer
        self.engine = Engine()
        self.writer = Writer()
        self.telemetry = Telemetry(settings)
        records = settings.records
        self.traces = TraceStore(database, records.folder, records.held_out_share)
        self.ready = True
        self.leads = True
        self.last_sign: float | None = time.time() + 3600  # lately, however slow the machine
        self.drift_states: tuple[StreamState, ...] = ()

    def set_token(self, token: str) -> None:
        self.configure("server", token=token)

    def configure(self, section: str, **values: Any) -> None:
        """Change settings; most are read when the application is created."""
        changed = getattr(self.settings, section).model_copy(update=values)
        self.settings = self.settings.model_copy(update={section: changed})

    def drain(self) -> None:
        self.ready = False

    def retrain(self, trigger: str, *, resume: bool = False, force: bool = False) -> int:
        if resume:
            raise RunError("No run was interrupted lately.")
        if run_records.active_run(self.database) is not None:
            raise RunError("A run is active. Wait for its end.")
        return run_records.create_run(self.database, trigger, {})

    def cancel_run(self, run_id: int, reason: str) -> str:
        return run_records.cancel_run(self.database, run_id, reason)

    def calibrate(self, domain: str | None = None) -> list[dict[str, Any]]:
        return [{"domain": domain or POOLED, "thresholds": Thresholds()}]

    def rollback(self, to: int | None, reason: str) -> int:
        if to == 99:
            raise ReleaseError("There is no release 99. `adaptive-spec releases` lists them.")
        self.engine.release = replace(self.engine.release, version=to or 0)
        return self.engine.release.version

    def end_canary(self, promote: bool, reason: str) -> int:
        canary = running_canary(self.database)
        if canary is None:
            raise ReleaseError("No release is on trial.")
        end_canary(self.database, canary.id, PROMOTED if promote else ABORTED, reason, {})
        return canary.release if promote else canary.live

    def publish(self, version: int, reason: str, *, force: bool = False) -> int:
        put_live(self.database, self.settings.releases.folder, version, reason, force=force)
        return version

    def override_thresholds(
        self, domain: str, override: ThresholdOverride, reason: str, hours: float | None = None
    ) -> OverrideRecord:
        return override_by_hand(self.database, self.settings, domain, override, reason, hours)

    def clear_override(self, domain: str, reason: str) -> bool:
        return clear_override(self.database, domain, reason)

    def forget(self, request_id: str) -> Forgotten:
        return forget_request(self.traces, request_id)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    vocabulary = {chr(code): code for code in range(127)} | {"[UNK]": 127}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", chat_template=TEMPLATE)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(
        {
            "model": {"target": "tiny/target"},
            "decoder": {"max_context_tokens": 64},
            "records": {"url": f"sqlite:///{tmp_path / 'records.db'}", "folder": tmp_path / "traces"},
            "releases": {"folder": tmp_path / "releases"},
            "server": {"token_file": tmp_path / "tokens.json", "allowed_hosts": ["test", "testserver"]},
        }
    )


@pytest.fixture
def service(settings: Settings, tokenizer: Any) -> Iterator[Service]:
    database = Database(settings.records.url)
    database.upgrade()
    yield Service(settings, database, tokenizer)
    database.close()


@pytest.fixture
def app(service: Service) -> FastAPI:
    return create_app(service)


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
