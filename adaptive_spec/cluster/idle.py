"""What stands where the engine stands in a process that only trains: it knows the live release, and decodes nothing."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NoReturn

from adaptive_spec.core import Release, Request
from adaptive_spec.decoding.budget import Budget
from adaptive_spec.decoding.engine import Pauses
from adaptive_spec.decoding.overrides import Overrides
from adaptive_spec.errors import UnavailableError
from adaptive_spec.models.weights import LoadedRelease


class IdleEngine:
    """The part of ``decoding.engine.Engine`` that the service and its routes use, without models and threads."""

    release = Release()
    canary: Release | None = None
    canary_share = 0.0
    pauses = Pauses()
    num_active = 0
    queue_depth = 0
    num_recalled_tokens = 0
    num_listener_failures = 0
    cost = None
    alive = True

    @property
    def budgets(self) -> Mapping[str, Budget]:
        """None: nothing is verified here."""
        return {}

    def submit(self, request: Request) -> NoReturn:
        """Refuse.

        Raises:
            UnavailableError: always.
        """
        raise UnavailableError("This process only trains. Send requests to a decoder (adaptive-spec releases status).")

    def swap(self, loaded: LoadedRelease) -> "Future[float]":
        """Take note of the live release; the future gives a pause of no seconds."""
        self.release = loaded.release
        return _done(0.0)

    def end_canary(self, promote: bool) -> NoReturn:
        """Refuse: no request gets a release on trial here."""
        raise UnavailableError("This process only trains; no release is on trial in it.")

    def override(self, overrides: Overrides) -> "Future[None]":
        """Pass over thresholds that a person has set: nothing is drafted here."""
        return _done(None)

    def call(self, job: Callable[[], Any]) -> "Future[Any]":
        """Pass over what is meant for a decoder's thread."""
        return _done(None)

    def drain(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Nothing runs."""


def _done(result: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(result)
    return future
