"""Decoding on paper, worked by hand; and that nobody is judged on what taught it."""

from dataclasses import replace

import numpy as np
import pytest

from adaptive_spec.core import POOLED, StepCost, Thresholds
from adaptive_spec.learning.goodput import FOLDS, serve, served, without_fold
from adaptive_spec.records.observations import Observations
from adaptive_spec.releases.paired import TraceScore
from adaptive_spec.settings import DecoderSettings

COST = StepCost(draft_seconds=1.0, verify_seconds=(10.0, 11.0, 12.0, 13.0), key="test")
THRESHOLD = DecoderSettings(policy="threshold", max_chain_length=3)


def score(
    agrees: list[bool], confidence: list[float] | None = None, name: str = "r", domain: str = "code"
) -> TraceScore:
    return TraceScore(domain, name, 0.0, 0.0, 0.0, tuple(agrees), tuple(confidence or [0.9] * len(agrees)))


def test_a_request_worked_by_hand() -> None:
    """Chains of two: yes yes (no) / no (…) / yes and the end: the last step has room for one token."""
    full = Thresholds(stop_below=0.0, max_chain_length=2)
    found = served(score([True, True, False, False, True, True]), full, COST, 3, "threshold", chain_length=2)
    # positions 0-2 with two drafted, 3 with two drafted, 4-5 with room for one
    assert found.seconds == (2 + 12) + (2 + 12) + (1 + 11)
    assert (found.num_tokens, found.num_agreeing, found.num_steps) == (6, 4, 3)
    off = served(score([True] * 6), replace(full, max_chain_length=0), COST, 3, "threshold")
    assert off.seconds == 6 * 10.0


def test_thresholds_end_chains_where_the_draft_is_unsure() -> None:
    unsure = score([True, False, True, True], [0.2, 0.9, 0.9, 0.9])
    stops = Thresholds(stop_below=0.5, max_chain_length=3)
    # one token, unsure, kept; then two tokens are left, so one is drafted, and kept
    assert served(unsure, stops, COST, 3, "threshold").seconds == (1 + 11) + (1 + 11)
    # under a scaling that takes every confidence for low, chains have one token
    low = replace(stops, offset=-20.0)
    assert served(score([True] * 4), low, COST, 3, "threshold").seconds == 2 * (1 + 11)


def test_optimal_stopping_does_not_draft_what_never_lives() -> None:
    dead = Thresholds(survival=(0.01, 0.01, 0.01))
    assert served(score([False] * 5), dead, COST, 3, "stopping").seconds == 5 * 10.0
    alive = Thresholds(survival=(0.99, 0.99, 0.99))
    assert served(score([True] * 8), alive, COST, 3, "stopping").seconds == 2 * (3 + 13)


def test_gaps_are_confidence_less_acceptance_where_chains_reach() -> None:
    found = served(score([True, False, True], [0.95, 0.95, 0.15]), Thresholds(), COST, 2, "threshold")
    assert found.num_reached == 3
    assert found.gaps[9] == pytest.approx(2 * 0.95 - 1) and found.gaps[1] == pytest.approx(0.15 - 1)


def test_a_release_that_tells_no_survival_is_served_by_what_others_show() -> None:
    """Two requests of a fold of their own: what they show themselves is not known to them."""
    good = [score([True] * 40, name=f"g{i}") for i in range(FOLDS)]
    bad = [replace(row, agrees=(False,) * 40) for row in good]
    settings = DecoderSettings(policy="stopping", max_chain_length=3)

    def nothing(_: int) -> dict[str, Thresholds]:
        return {}

    odd = [bad[0], *good[1:]]
    first = serve(odd, nothing, COST, settings)[0]
    assert first.seconds > 40 * 10.0  # it drafts, for the others' sake, in vain
    assert serve(bad, nothing, COST, settings)[0].seconds == 40 * 10.0


def test_thresholds_are_learnt_from_other_folds() -> None:
    scores = [score([True] * 10, name=str(i), domain=("a", "b")[i % 2]) for i in range(10)]
    asked: list[int] = []

    def learn(fold: int) -> dict[str, Thresholds]:
        asked.append(fold)
        return {POOLED: Thresholds(max_chain_length=fold, stop_below=0.0, survival=(1.0,))}

    found = serve(scores, learn, COST, THRESHOLD)
    assert asked == list(range(FOLDS))
    by_fold = [served(scores[0], learn(fold)[POOLED], COST, 3, "threshold").seconds for fold in range(FOLDS)]
    assert [row.seconds for row in found] == [by_fold[i % FOLDS] for i in range(10)]


def test_without_fold_leaves_whole_requests_out() -> None:
    num = 12
    seen = Observations(
        position=np.zeros(num, np.int64),
        confidence=np.full(num, 0.5),
        overlap=np.zeros(num),
        accepted=np.zeros(num, np.bool_),
        request_index=np.arange(num),
        explored=np.ones(num, np.bool_),
        request_temperature=np.zeros(num),
    )
    (left,) = without_fold({"code": seen, "gone": seen.only(seen.request_index == 1)}, 1).items()
    assert left[0] == "code" and sorted(set(left[1].request_index % FOLDS)) == [0, 2, 3]
