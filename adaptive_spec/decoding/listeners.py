"""Who hears of outcomes, and the guard that keeps a listener's faults out of decoding."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adaptive_spec.core import ChainEvidence, FinishedRequest, Step, Trace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears of outcomes.  ``trace_top_k`` 0 keeps no traces; without ``on_evidence`` no chain is measured whole.

    Requests of ``untraced_domains`` are as if each had asked not to be recorded.
    """

    on_step: Callable[[Step], None] = lambda _: None
    on_finish: Callable[[FinishedRequest], None] = lambda _: None
    on_trace: Callable[[Trace], None] = lambda _: None
    on_event: Callable[[str, dict[str, Any], str], None] = lambda kind, detail, domain: None
    trace_top_k: int = 0
    trace_share: float = 1.0
    on_evidence: Callable[[ChainEvidence], None] | None = None
    untraced_domains: frozenset[str] = frozenset()


class GuardedListeners:
    """Calls listeners.  One that raises is logged and counted, and decoding goes on."""

    def __init__(self, listeners: Listeners) -> None:
        self.trace_top_k = listeners.trace_top_k
        self.trace_share = listeners.trace_share
        self.untraced_domains = listeners.untraced_domains
        self.wants_evidence = listeners.on_evidence is not None
        self.num_failures = 0
        self._listeners = listeners

    def on_step(self, step: Step) -> None:
        self._tell(self._listeners.on_step, step)

    def on_finish(self, request: FinishedRequest) -> None:
        self._tell(self._listeners.on_finish, request)

    def on_trace(self, trace: Trace) -> None:
        self._tell(self._listeners.on_trace, trace)

    def on_evidence(self, evidence: ChainEvidence) -> None:
        if self._listeners.on_evidence is not None:
            self._tell(self._listeners.on_evidence, evidence)

    def on_event(self, kind: str, detail: dict[str, Any], domain: str) -> None:
        self._tell(self._listeners.on_event, kind, detail, domain)

    def _tell(self, listener: Callable[..., None], *outcome: Any) -> None:
        try:
            listener(*outcome)
        except Exception as error:
            self.num_failures += 1
            # The traceback once: a listener that is broken raises on every step.
            logger.error("a listener raised, its record is lost: %s", error, exc_info=self.num_failures == 1)
