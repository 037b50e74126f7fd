"""Synthetic steps whose whole chains are known, and the censored records that a decoder would have kept of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.core import StepCost, Thresholds
from adaptive_spec.records.observations import Observations


@dataclass(frozen=True, slots=True)
class Chains:
    """confidence, accepted: [steps, length], verdicts as they would be had all earlier ones been accepted."""

    confidence: NDArray[np.float64]
    accepted: NDArray[np.bool_]


def chains(num_steps: int, length: int, low: float, high: float, seed: int = 0, shared: float = 0.5) -> Chains:
    """Draw confidences in [low, high], partly shared within a step; each token is accepted with its confidence."""
    random = np.random.default_rng(seed)
    difficulty = random.random((num_steps, 1))
    mixed = shared * difficulty + (1 - shared) * random.random((num_steps, length))
    confidence = low + (high - low) * mixed
    return Chains(confidence, random.random(confidence.shape) < confidence)


def drafted(confidence: NDArray[np.float64], thresholds: Thresholds) -> int:
    """The length policy, as a plain loop over one chain."""
    product, count = 1.0, 0
    while count < min(thresholds.max_chain_length, len(confidence)):
        product *= confidence[count]
        count += 1
        if product < thresholds.stop_below:
            break
    return count


def simulate(known: Chains, thresholds: Thresholds, cost: StepCost) -> float:
    """Goodput by brute force."""
    emitted, seconds = 0, 0.0
    for confidence, accepted in zip(known.confidence, known.accepted, strict=True):
        length = drafted(confidence, thresholds)
        kept = 0
        while kept < length and accepted[kept]:
            kept += 1
        emitted += kept + 1
        seconds += length * cost.draft_seconds + cost.verify_seconds[length]
    return emitted / seconds


def record(known: Chains, live: Thresholds, explore_share: float, seed: int = 1) -> Observations:
    """What is left of the chains after the live policy and the verifier."""
    random = np.random.default_rng(seed)
    rows = []
    for index, (confidence, accepted) in enumerate(zip(known.confidence, known.accepted, strict=True)):
        explored = bool(random.random() < explore_share)
        length = len(confidence) if explored else drafted(confidence, live)
        for position in range(length):
            rows.append((position, confidence[position], accepted[position], index // 10, explored))
            if not accepted[position]:
                break
    columns = [np.asarray(column) for column in zip(*rows, strict=True)]
    return Observations(
        position=columns[0],
        confidence=columns[1],
        overlap=columns[1],
        accepted=columns[2],
        request_index=columns[3],
        explored=columns[4],
        request_temperature=np.zeros(len(rows)),
    )


def linear_cost(draft_seconds: float, verify_seconds: float, slope: float = 0.0, length: int = 6) -> StepCost:
    """Verification grows by ``slope`` seconds a token."""
    return StepCost(draft_seconds, tuple(verify_seconds + slope * n for n in range(length + 1)), "planted")
