"""The shape of the service that HTTP stands in front of; ``adaptive_spec.service.Service`` has it.

Only what the routes use is listed, so that the routes are tested without loading a model.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from adaptive_spec.calibration.watch import StreamState
from adaptive_spec.core import Release, Request, ThresholdOverride
from adaptive_spec.decoding.budget import Budget
from adaptive_spec.errors import AdaptiveSpecError
from adaptive_spec.records.database import Database
from adaptive_spec.records.drops import Reason
from adaptive_spec.records.overrides import OverrideRecord
from adaptive_spec.records.retention import Forgotten
from adaptive_spec.settings import Settings
from adaptive_spec.telemetry.telemetry import Telemetry


class Usage(Protocol):
    """What one request cost, known when it ends."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_draft_tokens(self) -> int: ...
    @property
    def releases(self) -> tuple[int, ...]: ...
    @property
    def cached(self) -> bool: ...
    @property
    def num_divergent_tokens(self) -> int: ...


class TokenLogProb(Protocol):
    """A token's log-prob, and the most probable tokens of its position with theirs."""

    @property
    def token_id(self) -> int: ...
    @property
    def log_prob(self) -> float: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


class Delta(Protocol):
    """A piece of a choice.  ``finish_reason`` and ``usage`` come with the choice's last one only, and ``error`` when it
    is not whole."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def usage(self) -> Usage | None: ...
    @property
    def error(self) -> AdaptiveSpecError | None: ...
    @property
    def log_probs(self) -> Sequence[TokenLogProb]: ...
    @property
    def index(self) -> int: ...


class Stream(Protocol):
    """A submitted request."""

    def events(self) -> Iterator[Delta]:
        """Yield the pieces as they are decoded; blocks between them and ends after ``cancel``."""

    def cancel(self) -> None:
        """Stop decoding; harmless after the end."""


class Pauses(Protocol):
    """How long decoding stood still while releases were exchanged."""

    @property
    def num_swaps(self) -> int: ...
    @property
    def last_seconds(self) -> float: ...
    @property
    def longest_seconds(self) -> float: ...
    @property
    def total_seconds(self) -> float: ...


class Engine(Protocol):
    """The live decoder."""

    @property
    def release(self) -> Release: ...
    @property
    def canary(self) -> Release | None: ...
    @property
    def canary_share(self) -> float: ...
    @property
    def pauses(self) -> Pauses: ...
    @property
    def num_active(self) -> int: ...
    @property
    def queue_depth(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def num_recalled_tokens(self) -> int: ...
    @property
    def num_listener_failures(self) -> int: ...
    @property
    def budgets(self) -> Mapping[str, Budget]: ...

    def submit(self, request: Request) -> Stream:
        """Queue a request; raises RequestError, BusyError or UnavailableError."""


class Writer(Protocol):
    """The thread that writes records."""

    @property
    def num_written(self) -> int: ...
    @property
    def num_dropped(self) -> int: ...
    @property
    def queue_depth(self) -> int: ...
    @property
    def lag_seconds(self) -> float: ...


class Traces(Protocol):
    """Where traces go, and what became of them here."""

    @property
    def num_stored(self) -> Counter[str]: ...
    @property
    def num_dropped(self) -> Counter[tuple[str, Reason]]: ...


class Service(Protocol):
    """Everything behind the routes."""

    @property
    def settings(self) -> Settings: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def database(self) -> Database: ...
    @property
    def writer(self) -> Writer: ...
    @property
    def traces(self) -> Traces: ...
    @property
    def telemetry(self) -> Telemetry: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def ready(self) -> bool: ...
    @property
    def leads(self) -> bool: ...
    @property
    def last_sign(self) -> float | None: ...
    @property
    def drift_states(self) -> Sequence[StreamState]: ...

    def drain(self) -> None:
        """Take no more requests; returns at once."""

    def retrain(self, trigger: str, *, resume: bool = False, force: bool = False) -> int:
        """Start a run, or go on with the interrupted one, and return its id; raises RunError when none can begin."""

    def cancel_run(self, run_id: int, reason: str) -> str:
        """Have a run ended, and return its state; raises RunError when it has ended."""

    def calibrate(self, domain: str | None = None) -> list[dict[str, Any]]:
        """Refit temperatures and thresholds now."""

    def rollback(self, to: int | None, reason: str) -> int:
        """Put an earlier release live and return its version."""

    def end_canary(self, promote: bool, reason: str) -> int:
        """Promote the release on trial or roll it back; return the live version.  Raises ReleaseError."""

    def publish(self, version: int, reason: str, *, force: bool = False) -> int:
        """Put the named release live and return its version; raises ReleaseError when it may not."""

    def override_thresholds(
        self, domain: str, override: ThresholdOverride, reason: str, hours: float | None = None
    ) -> OverrideRecord:
        """Set thresholds of a domain by hand; raises RequestError."""

    def clear_override(self, domain: str, reason: str) -> bool:
        """Give a domain its release's thresholds back; False when no override is in force."""

    def forget(self, request_id: str) -> Forgotten:
        """Delete what is stored of a request's text."""
