"""What a draft would make of a domain's traffic at each chain length, and which to take.

Pure: sums over judged requests and measured seconds in, goodput out.  ``choose_draft`` measures,
``choose_draft_report`` tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.learning.acceptance import Interval, RequestSums, drawn, interval

OFF = "no speculation"
# How tokens are chosen -> the sum of a request's steps.
STEPS = {"greedy": "num_steps", "sampled": "num_sampled_steps"}


@dataclass(frozen=True, slots=True)
class MeasuredDraft:
    """A candidate as measured.

    sums: what it showed on the held-out requests, for chains of 0, 1, 2 … tokens.  draft_seconds: of one token in each
    of the rows of a step, the median of ``samples``.
    """

    name: str
    reference: str
    num_layers: int
    vocabulary_tokens: int  # 0: all
    sums: tuple[RequestSums, ...]
    draft_seconds: float
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Prospect:
    """A candidate on a domain.

    lengths: emitted tokens of a row's step, by chain length from 0.  goodput: tokens per second of all rows, likewise.
    best: the chain length of at least 1 with the largest.  interval: of the goodput there, requests drawn; what the
    measured seconds may be off by is not in it.  resampled: the goodput there in each resample.
    """

    draft: str
    lengths: tuple[float, ...]
    goodput: tuple[float, ...]
    best: int
    interval: Interval
    resampled: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to take on a domain.

    draft: a candidate's name; ``OFF`` when plain decoding is faster than every candidate at any length.  runner_up: the
    next best, plain decoding among them.  gain_share: by which its goodput is exceeded; the interval draws requests, in
    pairs.
    """

    draft: str
    chain_length: int
    goodput: float
    runner_up: str
    gain_share: Interval

    @property
    def certain(self) -> bool:
        """Whether the held-out requests leave no doubt that it is better than the runner-up."""
        return self.gain_share.low is not None and self.gain_share.low > 0


def prospects(
    drafts: Sequence[MeasuredDraft],
    verify_seconds: Sequence[float],
    domain: str,
    kind: str = "greedy",
    rows: int = 1,
    seed: int = 0,
) -> list[Prospect]:
    """Predict every candidate at every fixed chain length.

    Goodput is rows x emitted tokens of a step / (length x draft_seconds + verify_seconds[length]).

    Args:
        verify_seconds: of the target, for chains of 0, 1, 2 … tokens in so many rows; as many as the drafts have sums,
            two at least.
        domain: or ``POOLED``.
        kind: one of ``STEPS``.
    """
    return [_prospect(draft, verify_seconds, domain, kind, rows, seed) for draft in drafts]


def recommend(judged: Sequence[Prospect]) -> Recommendation:
    """Choose between the candidates of a domain, each at its best length, and plain decoding."""
    plain = judged[0].goodput[0]
    options = [(OFF, 0, plain, np.full_like(judged[0].resampled, plain))]
    options += [(its.draft, its.best, its.goodput[its.best], its.resampled) for its in judged]
    first, second = sorted(options, key=lambda option: -option[2])[:2]
    enough = judged[0].interval.low is not None
    gains = np.percentile(first[3] / second[3] - 1, [2.5, 97.5])
    share = Interval(first[2] / second[2] - 1, *(map(float, gains) if enough else (None, None)))
    return Recommendation(first[0], first[1], first[2], second[0], share)


def _prospect(
    draft: MeasuredDraft, verify_seconds: Sequence[float], domain: str, kind: str, rows: int, seed: int
) -> Prospect:
    its = [sums.only(domain) for sums in draft.sums]
    seconds = [length * draft.draft_seconds + verify for length, verify in enumerate(verify_seconds)]
    lengths = [float(sums.num_tokens.sum() / getattr(sums, STEPS[kind]).sum()) for sums in its]
    goodput = [rows * tokens / time for tokens, time in zip(lengths, seconds, strict=True)]
    best = 1 + int(np.argmax(goodput[1:]))
    num_tokens, num_steps = its[best].num_tokens, getattr(its[best], STEPS[kind])
    draws = drawn(len(num_tokens), seed)
    resampled = rows * (draws @ num_tokens) / (draws @ num_steps) / seconds[best]
    around = interval(goodput[best], resampled, len(num_tokens))
    return Prospect(draft.name, tuple(lengths), tuple(goodput), best, around, resampled)
