"""What a decoder step costs on this machine, measured.

The engine hands in two timers; this room only decides how often to call them and what to believe.
"""

import math
import os
import platform
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from adaptive_spec.core import StepCost

_SOME_LENGTHS = (0, 1, 3)  # of chains, timed in batches
_CLIP = 3.0  # samples further than this many median absolute deviations from the median are dropped
_CONTEXT_STEP = 128  # tokens; contexts that differ by less are priced alike
_LATELY = 64  # newest samples of a cell that count
_ENOUGH = 8  # of them, to believe a cell; as many of all cells together, to believe the whole
_REFRESH_STEPS = 32


class CostModel:
    """The cost of a step by its number of rows and the tokens of context that each of them attends to.

    Args:
        measured: the cost of a step of so many rows; 1 is there at least.
        context_tokens: the context at which it was measured.
        per_context_token: what every further token of context adds, for each row: to drafting one token, and to
            verifying chains of 0, 1, 2 … tokens; None: nothing.
    """

    def __init__(
        self, measured: Mapping[int, StepCost], context_tokens: int = 0, per_context_token: StepCost | None = None
    ) -> None:
        self.measured = dict(sorted(measured.items()))
        self.context_tokens = context_tokens
        self.per_context_token = per_context_token
        self._found: dict[tuple[int, int], StepCost] = {}

    @property
    def step(self) -> StepCost:
        """Of one row."""
        return self.measured[1]

    def at(self, rows: int, context_tokens: int = 0) -> StepCost:
        """The cost of a step of so many rows; between what was measured on straight lines, beyond it as the last."""
        beyond = max(0, context_tokens - self.context_tokens) // _CONTEXT_STEP if self.per_context_token else 0
        if (rows, beyond) not in self._found:
            self._found[rows, beyond] = self._priced(rows, beyond * _CONTEXT_STEP)
        return self._found[rows, beyond]

    def _priced(self, rows: int, beyond: int) -> StepCost:
        slope = self.per_context_token
        if slope is not None and beyond:
            near, extra = self.at(rows), rows * beyond
            verify = (a + extra * b for a, b in zip(near.verify_seconds, slope.verify_seconds, strict=True))
            return StepCost(near.draft_seconds + extra * slope.draft_seconds, tuple(verify), near.key)
        if rows in self.measured:
            return self.measured[rows]
        batches, costs = list(self.measured), list(self.measured.values())

        def on_lines(values: Sequence[float]) -> float:
            return float(np.interp(rows, batches, values))

        return StepCost(
            on_lines([cost.draft_seconds for cost in costs]),
            tuple(on_lines(seconds) for seconds in zip(*(c.verify_seconds for c in costs), strict=True)),
            _keyed(self.step.key, rows),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        slope = self.per_context_token
        return {
            "key": self.step.key,
            "context_tokens": self.context_tokens,
            "per_context_token": None if slope is None else _plain(slope),
            "measured": {str(rows): _plain(cost) for rows, cost in self.measured.items()},
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], key: str) -> "CostModel":
        """Read it back.

        Raises:
            ValueError: it was measured under another key, or is malformed.
        """
        if value.get("key") != key:
            raise ValueError(f"these costs were measured for {value.get('key')!r}, not for {key!r}")
        try:
            measured = {int(rows): _step_cost(cost, _keyed(key, int(rows))) for rows, cost in value["measured"].items()}
            slope = value["per_context_token"]
            model = cls(measured, int(value["context_tokens"]), None if slope is None else _step_cost(slope, key))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these costs are malformed: {error!r}") from error
        costs, slopes = list(measured.values()), [model.per_context_token] if model.per_context_token else []
        every = [seconds for cost in costs for seconds in (cost.draft_seconds, *cost.verify_seconds)]
        lengths = {len(cost.verify_seconds) for cost in (*costs, *slopes)}
        if 1 not in measured or len(lengths) != 1 or not all(math.isfinite(s) and s > 0 for s in every):
            raise ValueError("these costs are incomplete or not positive")
        return model


class CostKeeper:
    """Keeps a measured model up to date with what steps really take while serving.

    A machine gets busier, hotter or quieter.  What counts is how a step's time compares with the model's, cell by cell:
    the median of the newest ratios.  A cell seldom met moves with those of its batch, or with all.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._measured = model
        self._draft: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_LATELY))
        self._verify: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_LATELY))
        self._steps = 0

    def add(
        self, rows: int, chain_length: int, context_tokens: int, draft_seconds: float | None, verify_seconds: float
    ) -> None:
        """Count a step; every so many of them the model is made anew.

        Args:
            chain_length: of the longest chain of the step.
            draft_seconds: per token that the draft model drafted; None when it did not.
        """
        cost = self._measured.at(rows, context_tokens)
        batch = min(self._measured.measured, key=lambda measured: abs(measured - rows))
        if chain_length < len(cost.verify_seconds):
            self._verify[batch, chain_length].append(verify_seconds / cost.verify_seconds[chain_length])
        if draft_seconds is not None:
            self._draft[batch].append(draft_seconds / cost.draft_seconds)
        self._steps += 1
        if self._steps % _REFRESH_STEPS == 0:
            self.model = self._refreshed()

    def add_whole(self, rows: int, chain_length: int, context_tokens: int, seconds: float) -> None:
        """The same where drafting and verifying cannot be told apart: both moved alike."""
        cost = self._measured.at(rows, context_tokens)
        if chain_length < len(cost.verify_seconds):
            expected = chain_length * cost.draft_seconds + cost.verify_seconds[chain_length]
            ratio = seconds / expected
            draft = ratio * cost.draft_seconds if chain_length else None
            self.add(rows, chain_length, context_tokens, draft, ratio * cost.verify_seconds[chain_length])

    def _refreshed(self) -> CostModel:
        overall = _median_of([ratio for ratios in self._verify.values() for ratio in ratios], 1.0)
        drafting = _median_of([ratio for ratios in self._draft.values() for ratio in ratios], overall)
        measured = {}
        for batch, cost in self._measured.measured.items():
            draft = cost.draft_seconds * _median_of(self._draft.get(batch, ()), drafting)
            cells = [self._verify.get((batch, length), ()) for length in range(len(cost.verify_seconds))]
            alike = _median_of([ratio for ratios in cells for ratio in ratios], overall)
            verify = [s * _median_of(ratios, alike) for s, ratios in zip(cost.verify_seconds, cells, strict=True)]
            measured[batch] = StepCost(draft, tuple(map(float, _monotone(verify))), cost.key)
        return CostModel(measured, self._measured.context_tokens, self._measured.per_context_token)


def _median_of(ratios: Collection[float], otherwise: float) -> float:
    return statistics.median(ratios) if len(ratios) >= _ENOUGH else otherwise


def _plain(cost: StepCost) -> dict[str, Any]:
    return {"draft_seconds": cost.draft_seconds, "verify_seconds": list(cost.verify_seconds)}


def _step_cost(value: Mapping[str, Any], key: str) -> StepCost:
    return StepCost(float(value["draft_seconds"]), tuple(map(float, value["verify_seconds"])), key)


def _keyed(key: str, rows: int) -> str:
    return key.replace("batch=1", f"batch={rows}")


def this_hardware() -> str:
    """What every key of a cost measured here begins with."""
    return f"{platform.machine()}-{os.cpu_count()}"


def cost_key(
    *, target: str, draft: str, dtype: str, device: str, threads: int, batch_size: int, hardware: str | None = None
) -> str:
    """Name what a measured cost is valid for.  ``hardware`` defaults to the processor's kind and number of cores."""
    hardware = hardware or this_hardware()
    return f"{hardware}|{device}|{target}|{draft}|{dtype}|threads={threads}|batch={batch_size}"


def measure_cost(
    time_draft: Callable[[int, int], float],
    time_verify: Callable[[int, int, int], float],
    max_chain_length: int,
    key: str,
    rows: int = 1,
    repeats: int = 5,
    contexts: Sequence[int] = (0,),
) -> CostModel:
    """Measure drafting and verifying, for chains of 0 … ``max_chain_length`` and batches of 1, 2, 4 … ``rows``.

    Each is timed ``repeats`` times after one warm-up; all take turns, so that a machine that slows down slows all of
    them.  Outliers are dropped, medians taken, and verification made non-decreasing in length (isotonic fit), because
    noise that makes a longer chain look cheaper would be exploited by the policies.  Of batches, and of one row at the
    far context, only some lengths are timed, the others are put on straight lines between.

    Args:
        time_draft: runs the draft for one token in each of so many rows, at a context; returns seconds.
        time_verify: runs the target over so many rows with chains of that length, at a context; returns seconds.
        contexts: tokens; all is measured at the first, and what a longer one adds at the second, if there is one.

    Raises:
        ValueError: ``repeats`` is not positive, or a timer returned something that is no positive time.
    """
    if repeats < 1:
        raise ValueError("repeats must be at least 1")
    some = sorted({length for length in (*_SOME_LENGTHS, max_chain_length) if length <= max_chain_length})
    near, *far = contexts[:2]
    cells = [(batch, near, list(range(max_chain_length + 1)) if batch == 1 else some) for batch in _doubling(rows)]
    cells += [(1, context, some) for context in far]
    rounds = [
        [
            [time_draft(batch, context), *(time_verify(batch, length, context) for length in lengths)]
            for batch, context, lengths in cells
        ]
        for _ in range(repeats + 1)
    ][1:]
    found = []
    for (batch, _, lengths), timed in zip(cells, zip(*rounds, strict=True), strict=True):
        draft, *verify = (_typical(list(samples)) for samples in zip(*timed, strict=True))
        seconds = np.interp(np.arange(max_chain_length + 1), lengths, _monotone(verify))
        found.append(StepCost(draft, tuple(map(float, seconds)), _keyed(key, batch)))
    if not far:
        return CostModel(dict(zip(_doubling(rows), found, strict=True)), near)
    *costs, distant = found
    return CostModel(dict(zip(_doubling(rows), costs, strict=True)), near, _slope(costs[0], distant, far[0] - near))


def _monotone(seconds: Sequence[float]) -> NDArray[np.float64]:
    """The nearest times that never fall with the length."""
    return np.asarray(IsotonicRegression().fit_transform(np.arange(len(seconds)), np.asarray(seconds)))


def _slope(near: StepCost, far: StepCost, tokens: int) -> StepCost:
    """What one more token of context adds; noise must not make it a gift."""
    pairs = zip(near.verify_seconds, far.verify_seconds, strict=True)
    verify = tuple(max(0.0, b - a) / tokens for a, b in pairs)
    return StepCost(max(0.0, far.draft_seconds - near.draft_seconds) / tokens, verify, near.key)


def _doubling(last: int) -> list[int]:
    """1, 2, 4 … and the last itself."""
    counts = [1]
    while counts[-1] * 2 < last:
        counts.append(counts[-1] * 2)
    return sorted({*counts, last})


def _typical(samples: list[float]) -> float:
    """Return the median of the samples that are near the median."""
    if not all(math.isfinite(sample) and sample > 0 for sample in samples):
        raise ValueError(f"a timer returned {samples}; every time must be positive and finite")
    values = np.asarray(samples)
    distance = np.abs(values - np.median(values))
    return float(np.median(values[distance <= _CLIP * np.median(distance)]))
