"""The trip wire of a canary: what is so plainly wrong that no test is needed.  Pure; each decoder has its own.

It looks at the first proposed token of the first few chains that the draft model proposes in each request, so that one
long answer, which may well repeat itself, cannot speak for the release.  The share of the newest of them that was
accepted must be neither near 0 nor near 1, unless the live release's is not far from there either.  So a release that
breaks acceptance is found within ``TRIP_STEPS`` counted steps of a decoder, long before a sequential test could say
anything.  What is near 1 takes ``LOOP_STEPS``, or a very good draft would be taken for one that only repeats itself.
"""

from collections import Counter, deque
from itertools import islice

from adaptive_spec.core import Step

TRIP_STEPS = 64  # of the canary in one decoder, counted as above: almost nothing is accepted
LOOP_STEPS = 256  # almost everything is
STEPS_PER_REQUEST = 16  # that count
MOST_ERRORS = 2  # requests of the canary that may end with an error while the live release's do not
_ENDS = ((0.0, TRIP_STEPS, 0.02, "almost nothing"), (1.0, LOOP_STEPS, 0.01, "almost everything"))  # end, steps, near
_BESIDE = 0.2  # of the same end: the live release's share is not far from it
_MOST_REQUESTS = 1024  # whose steps are counted at a time


class TripWire:
    """Watches the steps of one canary, and beside them the live release's."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.reason: str | None = None  # why the canary has to end
        self._canary: deque[bool] = deque(maxlen=LOOP_STEPS)  # the newest first
        self._live: deque[bool] = deque(maxlen=TRIP_STEPS)
        self._counted: Counter[str] = Counter()  # steps of each request
        self._errors: Counter[bool] = Counter()  # by whether they were the canary's

    def note(self, step: Step) -> None:
        """Count a step."""
        if not step.positions or step.drafter != "model" or self._counted[step.request_id] >= STEPS_PER_REQUEST:
            return
        self._counted[step.request_id] += 1
        if len(self._counted) > _MOST_REQUESTS:
            del self._counted[next(iter(self._counted))]
        accepted = step.positions[0].accepted
        if step.release != self.version:
            self._live.appendleft(accepted)
        else:
            self._canary.appendleft(accepted)
            self._judge()

    def note_error(self, release: int) -> None:
        """Count a request that ended with an error while a release drafted for it."""
        self._errors[release == self.version] += 1
        if self._errors[True] > MOST_ERRORS and self._errors[True] > self._errors[False]:
            self.trip(f"{self._errors[True]} of its requests ended with an error, {self._errors[False]} of the others")

    def trip(self, reason: str) -> None:
        """End the canary for a reason; the first one stays."""
        self.reason = self.reason or reason

    def _judge(self) -> None:
        beside = sum(self._live) / len(self._live) if self._live else None
        for end, steps, near, word in _ENDS:
            if len(self._canary) < steps:
                continue
            share = sum(islice(self._canary, steps)) / steps
            if abs(share - end) <= near and (beside is None or abs(beside - end) > _BESIDE):
                live = "is not known" if beside is None else f"is {beside:.2f}"
                self.trip(f"{word} is accepted: {share:.2f} of {steps} first tokens; the live release's share {live}")
