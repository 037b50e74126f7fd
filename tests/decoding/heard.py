"""A listener that keeps everything it hears."""

from adaptive_spec.core import FinishedRequest, Step, Trace
from adaptive_spec.decoding.listeners import Listeners


class Heard:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.finished: list[FinishedRequest] = []
        self.traces: list[Trace] = []
        self.listeners = Listeners(self.steps.append, self.finished.append, self.traces.append, trace_top_k=8)

    def reasons(self) -> dict[str, str]:
        return {row.request_id: row.finish_reason for row in self.finished}
