"""Thresholds are certified as often as is promised, and nothing is certified from too little."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom

from adaptive_spec.bench.risk import resample
from adaptive_spec.calibration.risk import Replayed, backtest, choose, path, replay, requests_needed, share_of
from adaptive_spec.core import Rule
from adaptive_spec.verification.divergence import within_allowance
from tests.calibration.evidence import one_chain, planted

LOGITS = path("logits", Rule())
CONFIDENCE = 0.9


def judged(rule: Rule, **chain: object) -> tuple[int, int]:
    """Emitted and diverging tokens of the one chain."""
    replayed = replay([rule], one_chain(**chain))  # type: ignore[arg-type]
    return int(replayed.num_emitted[0, 0]), int(replayed.num_divergent[0, 0])


@pytest.mark.parametrize(
    ("rule", "emitted", "divergent"),
    [
        (Rule("exact"), 2, 0),
        (Rule("ngram", min_overlap=0.33), 5, 1),  # of 12 23 34 the target's 19 93 34 hold one
        (Rule("ngram", min_overlap=0.4), 2, 0),
        (Rule("ngram", ngram_size=1, min_overlap=0.75), 5, 1),  # of 1 2 3 4 three
        (Rule("ngram", ngram_size=1, min_overlap=0.8), 2, 0),
        (Rule("logits", min_similarity=0.5), 5, 1),
        (Rule("logits", min_similarity=0.6), 2, 0),
        (Rule("hybrid", min_overlap=0.33, min_similarity=0.5), 5, 1),
        (Rule("hybrid", min_overlap=0.33, min_similarity=0.6), 2, 0),
        (Rule("hybrid", min_overlap=0.4, min_similarity=0.5), 2, 0),
    ],
)
def test_a_chain_by_hand(rule: Rule, emitted: int, divergent: int) -> None:
    """Exact keeps 1 and says 9 itself; who lets the 2 pass keeps all four and adds a bonus token."""
    assert judged(rule) == (emitted, divergent)


def test_nothing_counts_beyond_the_end_of_an_answer() -> None:
    loose = Rule("logits", min_similarity=0.0)
    assert judged(loose, most_emitted=2) == (2, 1)  # the 2 ends it, and no bonus token follows
    assert judged(loose, most_emitted=1) == (1, 0)
    assert judged(Rule("exact"), most_emitted=2) == (2, 0)  # 1, and the target's 9


def test_an_empty_chain_emits_one_token() -> None:
    nothing = replace(one_chain(strict=(False,) * 4, most_emitted=1), lengths=np.array([0]))
    for rule in (Rule("exact"), Rule("ngram", min_overlap=0.0), Rule("logits", min_similarity=0.0), Rule("hybrid")):
        replayed = replay([rule], nothing)
        assert (replayed.num_emitted.tolist(), replayed.num_divergent.tolist()) == ([[1]], [[0]])


@pytest.mark.parametrize("verifier", ["ngram", "logits", "hybrid"])
def test_a_path_loosens_step_by_step(verifier: str) -> None:
    """It begins at exact and ends where everything passes, each rule keeping all that the one before keeps."""
    rules = path(verifier, Rule(ngram_size=3, similarity="js", relaxed_top_k=7))
    assert rules[0].verifier == "exact" and {rule.verifier for rule in rules[1:]} == {verifier}
    assert {(rule.ngram_size, rule.similarity, rule.relaxed_top_k) for rule in rules} == {(3, "js", 7)}
    replayed = replay(rules, planted(50))
    assert (np.diff(replayed.num_emitted, axis=0) >= 0).all() and (np.diff(replayed.num_divergent, axis=0) >= 0).all()
    assert (replayed.num_emitted[-1] == 2 * replayed.num_steps).all()
    with pytest.raises(ValueError, match="typical"):
        path("typical", Rule())


def test_the_replay_is_the_verifier_without_an_account() -> None:
    chains = planted(30, seed=3)
    strict = torch.from_numpy(chains.strict)
    passes = torch.from_numpy(chains.similarities) >= 0.4
    whole = within_allowance(strict, passes, torch.full((len(chains),), 1)).sum()
    [emitted] = replay([Rule("logits", min_similarity=0.4)], chains).num_emitted
    assert emitted.sum() == int(whole) + len(chains)


def made(shares: list[float], num_requests: int, tokens: list[int]) -> Replayed:
    """Every request alike: so many emitted tokens of 1000 steps, and a share of them diverging."""
    emitted = np.repeat(np.array(tokens)[:, None], num_requests, axis=1)
    divergent = np.round(emitted * np.array(shares)[:, None]).astype(int)
    rules = (Rule(), *(Rule("logits", min_similarity=1 - place / 10) for place in range(1, len(shares))))
    return Replayed(rules, divergent, emitted, np.full(num_requests, 1000))


def test_too_little_is_exact_and_says_how_much_is_needed() -> None:
    needed = requests_needed(0.02, 0.9)
    assert needed == math.ceil(math.log(0.1) / math.log(0.98)) == 114
    few = choose([made([0, 0], needed - 1, [2000, 3000])], 0.02, 0.9)
    assert (few.rule.verifier, few.reason, few.requests_needed) == ("exact", "not_enough", 114)
    assert (few.num_requests, few.divergence_share, few.tokens_per_step) == (113, 0, 2)
    enough = choose([made([0, 0], needed, [2000, 3000])], 0.02, 0.9)
    assert (enough.rule.verifier, enough.reason, enough.tokens_per_step) == ("logits", "certified", 3)
    assert 0 < enough.p_value <= 0.1
    two = choose([made([0, 0], needed, [2000, 3000])] * 2, 0.02, 0.9)  # two verifiers divide the chance to err
    assert (two.reason, two.requests_needed) == ("not_enough", math.ceil(math.log(0.05) / math.log(0.98)))


def test_what_is_known_of_every_reason() -> None:
    fits = choose([made([0, 0.01, 0.02, 0.2, 0.0], 2000, [2000, 2500, 3000, 4000, 5000])], 0.03, 0.9)
    assert (fits.reason, fits.rule.min_similarity, fits.divergence_share) == ("certified", 0.8, pytest.approx(0.02))
    nothing = choose([made([0, 0.04], 2000, [2000, 3000])], 0.03, 0.9)
    assert (nothing.reason, nothing.rule.verifier) == ("nothing_fits", "exact") and nothing.p_value > 0.1
    assert choose([made([0, 0, 0.2], 2000, [2000, 2000, 3000])], 0.03, 0.9).reason == "nothing_fits"
    idle = choose([made([0, 0, 0], 2000, [2000, 2000, 2000])], 0.03, 0.9)
    assert (idle.reason, idle.rule.verifier) == ("nothing_gained", "exact")
    anything = choose([made([0, 0.9], 1, [2000, 3000])], 1.0, 0.9)
    assert (anything.reason, anything.rule.verifier, anything.requests_needed) == ("certified", "logits", 1)


def test_of_equally_fast_rules_the_strictest_is_taken() -> None:
    chosen = choose([made([0, 0.0, 0.01, 0.01], 2000, [2000, 3000, 4000, 4000])], 0.03, 0.9)
    assert chosen.rule.min_similarity == 0.8


def test_a_backtest_sees_traffic_that_turned() -> None:
    calm, wild = made([0, 0.0], 600, [2000, 3000]), made([0, 0.5], 300, [2000, 3000])
    turned = Replayed(
        calm.rules,
        np.concatenate([calm.num_divergent, wild.num_divergent], axis=1),
        np.concatenate([calm.num_emitted, wild.num_emitted], axis=1),
        np.concatenate([calm.num_steps, wild.num_steps]),
    )
    found = backtest([turned], 0.02, 0.9)
    assert found is not None
    assert (found.rule.verifier, found.num_requests, found.divergence_share) == ("logits", 300, pytest.approx(0.5))
    assert choose([turned], 0.02, 0.9).reason == "nothing_fits"  # all requests together know better
    assert backtest([turned.take(slice(1))], 0.02, 0.9) is None


# ---- the promise, on planted traffic


@functools.cache
def population() -> Replayed:
    return replay(LOGITS, planted(20_000, seed=1))


@functools.cache
def budget() -> float:
    """About .05; who guesses takes that rule."""
    return 0.99 * share_of(Rule("logits", min_similarity=0.6), [population()])


def test_planted_traffic_has_the_shares_that_can_be_computed() -> None:
    """The share of a request of many chains, at its own refusal probability, is what the planting says."""
    for rule, share in zip(LOGITS[1:], replay(LOGITS[1:], planted(3000, chains=40)).shares.mean(-1), strict=True):
        refused = (np.arange(1000) + 0.5) / 2000
        expected = refused * (1 - rule.min_similarity) / (2 - refused * rule.min_similarity)
        assert share == pytest.approx(expected.mean(), abs=0.007)


def optimistic(replayed: Replayed) -> Rule:
    """The loosest rule whose share on record is within the budget, without any test."""
    fitting = np.flatnonzero(replayed.shares.mean(-1) <= budget())
    return replayed.rules[fitting[-1]]


@pytest.mark.parametrize("num_requests", [60, 300])
def test_in_200_resamplings_the_budget_is_exceeded_no_more_often_than_stated(num_requests: int) -> None:
    """Against the expected share, which the population's mean is; and a chooser without a test must fail this."""
    random, exceeded, reckless, relaxed = np.random.default_rng(0), 0, 0, 0
    for _ in range(200):
        drawn = population().take(random.integers(0, population().num_requests, num_requests))
        chosen = choose([drawn], budget(), CONFIDENCE).rule
        exceeded += share_of(chosen, [population()]) > budget()
        reckless += share_of(optimistic(drawn), [population()]) > budget()
        relaxed += chosen.verifier != "exact"
    allowed = binom.ppf(0.999, 200, 1 - CONFIDENCE)  # an honest chooser is above it once in a thousand runs
    assert exceeded <= allowed < reckless
    assert relaxed > 100  # it is not safe by never choosing


def test_two_verifiers_keep_the_promise_together() -> None:
    paths = [replay(path(name, Rule()), planted(5000, seed=2)) for name in ("logits", "hybrid", "ngram")]
    samples = resample([its.take(slice(600)) for its in paths], budget(), CONFIDENCE, 200, seed=1)
    assert sum(sample.expected_share > budget() for sample in samples) <= binom.ppf(0.999, 200, 1 - CONFIDENCE)
    assert any(sample.relaxed for sample in samples)
