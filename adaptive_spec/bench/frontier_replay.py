"""What every verifier would have kept of the recorded chains, and how fast that would have been.

An approximation: the states from which chains start are those of exact decoding.  Under a relaxed verifier later
chains would start from other texts.  ``frontier_live`` decodes some points for real and shows both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from adaptive_spec.bench.frontier_record import Recording
from adaptive_spec.core import SIMILARITIES, Rule, StepCost
from adaptive_spec.verification.divergence import diverging_tokens, within_allowance
from adaptive_spec.verification.exact import kept
from adaptive_spec.verification.relaxed import comparing_passes

_OVERLAPS = (0.0, 0.2, 0.25, 0.33, 0.4, 0.5, 0.6, 0.66, 0.75, 0.8, 1.0)
_ALIKE = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99)
_EPSILONS = (0.005, 0.01, 0.02, 0.05, 0.09, 0.12, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.8)
_DELTAS = (0.01, 0.02, 0.05, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class Point:
    """One rule at one chain length on the recorded chains of a domain.

    tokens_per_step: emitted.  divergence_share: diverging kept tokens / emitted.  total_variation, given_up_nats: means
    over the diverging tokens, 0 without any.  speed: relative to plain decoding.
    """

    rule: Rule
    chain_length: int
    tokens_per_step: float
    divergence_share: float
    num_divergent: int
    total_variation: float
    given_up_nats: float
    speed: float


def rules() -> Iterator[Rule]:
    """The grid.  ``typical`` has its delta tied to epsilon as in Medusa: delta = sqrt(epsilon)."""
    yield Rule()
    for size, overlap in product((1, 2, 3), _OVERLAPS):
        yield Rule("ngram", ngram_size=size, min_overlap=overlap)
    for measure, alike in product(SIMILARITIES, _ALIKE):
        yield Rule("logits", similarity=measure, min_similarity=alike)
    for size, overlap, measure, alike in product((1, 2), (0.25, 0.5, 0.75), ("cosine", "js", "tv"), _ALIKE[2:-2:2]):
        yield Rule("hybrid", ngram_size=size, min_overlap=overlap, similarity=measure, min_similarity=alike)
    for epsilon in _EPSILONS:
        yield Rule("typical", typical_epsilon=epsilon, typical_delta=round(epsilon**0.5, 3))
    for count, delta in product((2, 3, 5, 10), _DELTAS):
        yield Rule("topk_relaxed", relaxed_top_k=count, relaxed_delta=delta)


def passes(rule: Rule, recorded: Recording, chain_length: int) -> Tensor:
    """Which tokens of the chains' first ``chain_length`` pass a rule: [chains, chain_length] bool.

    The same as ``verification.relaxed.rule_passes`` of the forward that was recorded, without the vocabulary.
    """

    def of(name: str) -> Tensor:
        return torch.from_numpy(getattr(recorded, name)[:, :chain_length])

    def alike(rows: list[int]) -> Tensor:
        return torch.from_numpy(recorded.similarity[rule.similarity][rows, :chain_length])

    match rule.verifier:
        case "exact":
            return of("strict")
        case "ngram" | "logits" | "hybrid":
            lengths = torch.full((len(recorded),), chain_length)
            return comparing_passes(rule, of("chain"), of("target_tokens"), lengths, alike)
        case "typical":
            floor = (rule.typical_delta * (-of("entropy_nats")).exp()).clamp_max(rule.typical_epsilon)
            return of("token_probs") > floor
        case "topk_relaxed":
            near = of("token_probs") >= of("best_probs") - rule.relaxed_delta
            return (of("num_better") < rule.relaxed_top_k) & near
    raise ValueError(f"unknown verifier {rule.verifier!r}")


def replayed_kept(rule: Rule, recorded: Recording, chain_length: int) -> Tensor:
    """How many tokens of each chain a rule keeps when nothing limits what may diverge: [chains]."""
    strict = torch.from_numpy(recorded.strict[:, :chain_length])
    unlimited = torch.full((len(recorded),), chain_length)
    lengths = torch.from_numpy(recorded.lengths).clamp_max(chain_length)
    return kept(within_allowance(strict, passes(rule, recorded, chain_length), unlimited), lengths)


def replay(rule: Rule, recorded: Recording, chain_length: int, cost: StepCost) -> Point:
    """What a rule makes of the recorded chains, cut to ``chain_length``.

    Speed is tokens per step over the measured seconds of a step, relative to a step without a chain.
    """
    num_kept = replayed_kept(rule, recorded, chain_length)
    diverging = diverging_tokens(torch.from_numpy(recorded.strict[:, :chain_length]), num_kept).numpy()
    num_emitted, num_divergent = int(num_kept.sum()) + len(recorded), int(diverging.sum())
    tokens_per_step = num_emitted / len(recorded)
    seconds = chain_length * cost.draft_seconds + cost.verify_seconds[chain_length]
    return Point(
        rule,
        chain_length,
        tokens_per_step,
        num_divergent / num_emitted,
        num_divergent,
        _mean(recorded.total_variation[:, :chain_length][diverging]),
        _mean(recorded.given_up_nats[:, :chain_length][diverging]),
        tokens_per_step / seconds * cost.verify_seconds[0],
    )


def sweep(recorded: Recording, cost: StepCost) -> dict[str, list[Point]]:
    """Every rule of the grid at every chain length, by verifier."""
    found: dict[str, list[Point]] = {}
    for rule in rules():
        for length in range(1, recorded.chain_length + 1):
            found.setdefault(rule.verifier, []).append(replay(rule, recorded, length, cost))
    return found


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that are faster than every one that diverges no more, by rising divergence."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.divergence_share, -point.speed)):
        if not best or point.speed > best[-1].speed:
            best.append(point)
    return best


def best_within(points: Sequence[Point], divergence_share: float) -> Point | None:
    """The fastest point that diverges at most so much; None when all diverge more."""
    return max((p for p in points if p.divergence_share <= divergence_share), key=lambda p: p.speed, default=None)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
