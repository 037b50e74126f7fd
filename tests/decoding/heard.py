"""A listener that keeps everything it hears."""

from typing import Any

from adaptive_spec.core import ChainEvidence, FinishedRequest, Step, Trace
from adaptive_spec.decoding.listeners import Listeners


class Heard:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.finished: list[FinishedRequest] = []
        self.traces: list[Trace] = []
        self.events: list[tuple[str, dict[str, Any], str]] = []
        self.evidence: list[ChainEvidence] = []
        self.listeners = Listeners(
            self.steps.append,
            self.finished.append,
            self.traces.append,
            lambda *event: self.events.append(event),
            trace_top_k=8,
            on_evidence=self.evidence.append,
        )

    def reasons(self) -> dict[str, str]:
        return {row.request_id: row.finish_reason for row in self.finished}
