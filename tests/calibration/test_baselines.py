"""Policies on completed chains: ours equals the plain loop, others reproduce what was worked out by hand."""

import itertools
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from adaptive_spec.calibration.baselines import (
    FIRST_THRESHOLD,
    by_floors,
    oracle,
    roc_threshold,
    seconds_by_length,
    transformers_rule,
)
from adaptive_spec.core import Scaling, StepCost, Thresholds
from adaptive_spec.drafting.policy import NEVER, threshold_floors
from tests.calibration.planted import chains, drafted


@pytest.mark.parametrize("stop_below", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("length", [0, 1, 4, 6])
def test_floors_draft_what_the_plain_loop_drafts(stop_below: float, length: int) -> None:
    known = chains(200, 6, 0.2, 1.0)
    thresholds = Thresholds(stop_below=stop_below, max_chain_length=length)
    choice = by_floors(known.confidence, Scaling(), threshold_floors(thresholds.lengths_at(1), 6))
    assert choice.drafted.tolist() == [drafted(row, thresholds) for row in known.confidence]
    assert not choice.cut.any()


def test_floors_beyond_the_chain_are_cut_and_said() -> None:
    confidence = np.array([[0.9, 0.9], [0.9, 0.1], [0.1, 0.9]])
    choice = by_floors(confidence, Scaling(), (0.0, 0.5, 0.5))
    assert choice.drafted.tolist() == [2, 2, 1]
    assert choice.cut.tolist() == [True, False, False]
    assert by_floors(confidence, Scaling(), (NEVER, 0.0)).drafted.tolist() == [0, 0, 0]


def test_the_oracle_by_hand() -> None:
    # Nothing accepted: 1 token in 2 s.  Two accepted: 3 tokens in 2 + 2 x 1 s, more than 2 in 3 s.
    assert oracle(np.array([0, 2]), StepCost(1.0, (2.0, 2.0, 2.0), "")).drafted.tolist() == [0, 2]
    # At 3 s a token even certain acceptance does not pay: 3 tokens in 8 s.
    assert oracle(np.array([0, 2]), StepCost(3.0, (2.0, 2.0, 2.0), "")).drafted.tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_the_oracle_is_the_best_of_all_choices(seed: int) -> None:
    random = np.random.default_rng(seed)
    acceptable = random.integers(0, 4, 5)
    cost = StepCost(random.uniform(0.05, 0.6), tuple(1 + np.cumsum(random.uniform(0, 0.6, 4))), "")
    seconds = seconds_by_length(cost)
    every = itertools.product(range(4), repeat=5)
    best = max(
        sum(1 + min(n, a) for n, a in zip(lengths, acceptable, strict=True)) / seconds[list(lengths)].sum()
        for lengths in every
    )
    chosen = oracle(acceptable, cost).drafted
    assert (1 + chosen).sum() / seconds[chosen].sum() == pytest.approx(best)


def test_the_roc_threshold_by_hand() -> None:
    # FPR + 3 FNR at .9: 0 + 2, .8: 0 + 1, .7: 1/3 + 1, .6: 1/3 + 0, .5: 2/3, .4: 1.
    seen, kept = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [True, True, False, True, False, False]
    assert roc_threshold(seen, kept, 0.4) == 0.6
    assert roc_threshold(seen[:5], kept[:5], 0.4) == 0.4
    assert roc_threshold(seen, [True] * 6, 0.4) == 0.4


def test_the_rule_by_hand() -> None:
    confidence = np.array(
        [
            [0.9, 0.5, 0.3],  # the third is below .4: three drafted, two kept
            [0.6, 0.2, 0.9],  # two drafted, one kept
            [0.35, 0.9, 0.9],  # one drafted and kept: of six tokens seen kept ones are >= .35, refused ones below
            [0.36, 0.36, 0.1],  # threshold .35: three drafted
            [0.36, 0.36, 0.1],  # the next request begins at .4: one drafted
        ]
    )
    accepted = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]], np.bool_)
    choice = transformers_rule(confidence, accepted, np.array([0, 0, 0, 0, 1]))
    assert choice.drafted.tolist() == [3, 2, 1, 3, 1]


@pytest.mark.parametrize("seed", range(4))
def test_the_rule_is_that_of_transformers(seed: int) -> None:
    known = chains(60, 6, 0.05, 1.0, seed)
    theirs = _their_generator()
    expected = []
    for confidence, accepted in zip(known.confidence, known.accepted, strict=True):
        below = np.flatnonzero(confidence < theirs.assistant_generation_config.assistant_confidence_threshold)
        length = int(below[0]) + 1 if len(below) else 6
        theirs.probs.extend(confidence[:length].tolist())
        theirs.update_candidate_strategy(None, None, min(length, int(np.cumprod(accepted).sum())))
        expected.append(length)
    choice = transformers_rule(known.confidence, known.accepted, np.zeros(60, np.int64))
    assert choice.drafted.tolist() == expected
    assert len(set(expected)) > 2


def _their_generator() -> Any:
    """transformers' own, without the models that its constructor asks for."""
    generator: Any = AssistedCandidateGenerator.__new__(AssistedCandidateGenerator)
    defaults = GenerationConfig._get_default_generation_params()
    assert defaults["assistant_confidence_threshold"] == FIRST_THRESHOLD
    generator.assistant_generation_config = GenerationConfig(
        num_assistant_tokens_schedule="constant", assistant_confidence_threshold=FIRST_THRESHOLD
    )
    generator.generation_config = GenerationConfig()
    generator.probs, generator.matches = [], []
    return generator
