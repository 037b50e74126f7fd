"""What this process does beside decoding, counted when it happens: runs, trials, drifts, releases it refuses.

Every process counts its own: of several on one database, runs are counted where they run, a trial in every decoder that
took part in it.
"""

import threading
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from adaptive_spec.telemetry.families import counter, gauge
from adaptive_spec.telemetry.labels import DomainLabels

RUN_OUTCOMES = ("passed", "refused", "failed", "cancelled")
CANARY_OUTCOMES = ("promoted", "rolled_back", "aborted")


class LearningMetrics(Collector):
    """Safe to call from any thread."""

    def __init__(self, domains: DomainLabels) -> None:
        self._domains = domains
        self._changing = threading.Lock()
        # Outcomes are there from the beginning, at 0: the first of a kind is an increase, too.
        self._runs = Counter(dict.fromkeys(RUN_OUTCOMES, 0))
        self._canaries = Counter(dict.fromkeys(CANARY_OUTCOMES, 0))
        self._drifts: Counter[tuple[str, str, str]] = Counter()
        self._last_seconds: float | None = None
        self._last_gain_share: float | None = None
        self._refused_in_a_row = 0
        self._refused_swaps = 0

    def run_ended(self, outcome: str, seconds: float, gain_share: float | None) -> None:
        """Count a run.

        Args:
            outcome: one of RUN_OUTCOMES.
            gain_share: of held-out acceptance length, where the run measured it.
        """
        with self._changing:
            self._runs[outcome] += 1
            self._last_seconds = seconds
            self._last_gain_share = self._last_gain_share if gain_share is None else gain_share
            if outcome in ("passed", "refused"):
                self._refused_in_a_row = self._refused_in_a_row + 1 if outcome == "refused" else 0

    def canary_ended(self, outcome: str) -> None:
        """Count a trial; ``outcome`` is one of CANARY_OUTCOMES."""
        with self._changing:
            self._canaries[outcome] += 1

    def drifted(self, domain: str, stream: str, direction: str) -> None:
        """Count a drift."""
        with self._changing:
            self._drifts[self._domains.of(domain), stream, direction] += 1

    def swap_refused(self) -> None:
        """Count a release that should have gone live here and could not."""
        with self._changing:
            self._refused_swaps += 1

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        with self._changing:
            runs, canaries, drifts = self._runs.items(), self._canaries.items(), self._drifts.items()
            yield counter("runs", "Training runs that ended.", ("outcome",), [((name,), n) for name, n in runs])
            last = self._last_seconds
            text = "From the beginning to the end of the last run."
            yield gauge("last_run_seconds", text, (), [] if last is None else [((), last)])
            gain = self._last_gain_share
            text = "What the last run gained of held-out acceptance length."
            yield gauge("last_run_gain_share", text, (), [] if gain is None else [((), gain)])
            text = "Runs that the gate refused since one last passed."
            yield gauge("gate_refusals_in_a_row", text, (), [((), self._refused_in_a_row)])
            text = "Trials that ended, of releases that served here."
            yield counter("canaries", text, ("outcome",), [((name,), n) for name, n in canaries])
            text = "Changes found in acceptance and calibration."
            yield counter("drifts", text, ("domain", "stream", "direction"), list(drifts))
            yield counter("swaps_refused", "Live releases that could not be loaded.", (), [((), self._refused_swaps)])
