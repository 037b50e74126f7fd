"""Simulation on planted traffic whose best policy is known, whole and censored."""

import dataclasses
import json

import numpy as np
import pytest

from adaptive_spec.calibration.outcomes import Simulation
from adaptive_spec.calibration.simulate import BEST_FIXED, OFF, ORACLE, simulate, split_by_request
from adaptive_spec.core import POOLED, StepCost, Thresholds
from adaptive_spec.errors import NotEnoughDataError
from adaptive_spec.records.observations import Observations
from adaptive_spec.settings import CalibrationSettings
from tests.calibration import planted
from tests.calibration.planted import Chains, chains, linear_cost, record

SETTINGS = CalibrationSettings()
EVERYTHING = Thresholds(stop_below=0.0, max_chain_length=6)
COST = linear_cost(0.1, 1.0)  # a second to verify whatever the length, a tenth to draft a token


def alike(num_steps: int, confidence: float, accepted: bool) -> Observations:
    shape = (num_steps, 6)
    return record(Chains(np.full(shape, confidence), np.full(shape, accepted)), EVERYTHING, 1.0)


def judged(observations: dict[str, Observations], cost: StepCost = COST, **options: object) -> Simulation:
    now = options.pop("now", {POOLED: Thresholds()})
    return simulate(observations, cost, now, SETTINGS, **options)  # type: ignore[arg-type]


def test_thresholds_per_domain_beat_every_single_length_by_the_margin_worked_out() -> None:
    easy, hard = alike(400, 0.95, True), alike(400, 0.2, False)
    found = judged({"easy": easy, "hard": hard}, traffic={"easy": 1, "hard": 1})
    # Seconds a token: easy (1 + n / 10) / (1 + n), hard 1 + n / 10; half the tokens are of each.
    singles = {n: 1 / (0.5 * (1 + n / 10) / (1 + n) + 0.5 * (1 + n / 10)) for n in (0, 1, 2, 4, 6)}
    for length, expected in singles.items():
        name = f"fixed {length}" if length else OFF
        assert found.mix_outcome(name).goodput == pytest.approx(expected)
    best = 1 / (0.5 * 1.6 / 7 + 0.5)  # 6 in easy, none in hard
    assert best / max(singles.values()) == pytest.approx(1.302, abs=0.001)
    for policy in ("fresh thresholds", "fresh stopping", BEST_FIXED, ORACLE):
        assert found.mix_outcome(policy).goodput == pytest.approx(best)
        assert found.mix_outcome(policy).regret == pytest.approx(0.0)
    assert found.mix_outcome("fixed 2").regret == pytest.approx(1 - singles[2] / best)
    assert found.domain("easy").outcome("fresh thresholds").drafted_tokens == 6
    assert found.domain("hard").outcome("fresh thresholds").drafted_tokens == 0


def test_the_regret_of_the_best_fixed_length_is_nothing_and_the_oracle_bounds_all() -> None:
    observations = {
        "code": record(chains(800, 6, 0.4, 1.0), Thresholds(), 0.2),
        "law": record(chains(800, 6, 0.05, 0.8, seed=1, shared=0.8), Thresholds(), 0.2),
    }
    for rows in (1, 4):
        found = judged(observations, linear_cost(0.01, 0.05, 0.004), rows=rows)
        for outcomes in (found.mix, *(part.outcomes for part in found.domains)):
            named = {outcome.policy: outcome for outcome in outcomes if outcome.goodput is not None}
            assert len(named) >= 11
            best = named[BEST_FIXED]
            assert (best.regret, best.regret_low, best.regret_high) == (0, 0, 0)
            fixed = [named[name].goodput for name in named if name.startswith("fixed") or name == OFF]
            assert max(fixed) <= best.goodput * (1 + 1e-9)
            for outcome in named.values():
                assert outcome.goodput <= named[ORACLE].goodput * (1 + 1e-9)
                assert outcome.low <= outcome.relative * (1 + 1e-9) and outcome.relative <= outcome.high * (1 + 1e-9)
            assert named[OFF].relative == named[OFF].low == named[OFF].high == pytest.approx(1)


@pytest.mark.parametrize("live", [Thresholds(stop_below=0.4, max_chain_length=4), Thresholds(max_chain_length=1)])
def test_censored_records_judge_as_whole_ones_do_and_naive_counts_do_not(live: Thresholds) -> None:
    known, cost = chains(6000, 6, 0.3, 1.0), linear_cost(0.01, 0.05, 0.002)
    whole = judged({"code": record(known, EVERYTHING, 1.0)}, cost).domain("code")
    censored_records = record(known, live, 0.15)
    censored = judged({"code": censored_records}, cost).domain("code")
    assert whole.num_cut_short == 0 and censored.num_cut_short > 300
    assert censored.num_explored_steps == pytest.approx(450, rel=0.15)
    for outcome in whole.outcomes:
        if outcome.goodput is not None:
            assert censored.outcome(outcome.policy).goodput == pytest.approx(outcome.goodput, rel=0.03), outcome.policy
    truth = planted.simulate(known, EVERYTHING, cost)  # fixed 6, by brute force
    replayed = censored.outcome("fixed 6").goodput
    assert replayed == pytest.approx(truth, rel=0.03)
    steps = int((censored_records.position == 0).sum())
    seconds = 6 * cost.draft_seconds + cost.verify_seconds[6]
    as_refused = (1 + censored_records.accepted.sum() / steps) / seconds  # what was not drafted counts as refused
    print(f"fixed 6: brute force {truth:.2f}, replayed {replayed:.2f}, naive {as_refused:.2f} tokens/s")
    assert as_refused < 0.9 * truth


def test_naive_survival_of_a_policy_that_stops_on_confidence_is_too_high() -> None:
    known, cost = chains(6000, 6, 0.1, 1.0, shared=0.9), linear_cost(0.01, 0.05, 0.002)
    observed = record(known, Thresholds(stop_below=0.6, max_chain_length=6), 0.15)
    truth = planted.simulate(known, Thresholds(stop_below=0.0, max_chain_length=3), cost)
    survival = [observed.accepted[observed.position == place].mean() for place in range(3)]
    naive = (1 + np.cumprod(survival).sum()) / (3 * cost.draft_seconds + cost.verify_seconds[3])
    longest_3 = StepCost(cost.draft_seconds, cost.verify_seconds[:4], cost.key)
    found = judged({"code": observed}, longest_3).domain("code")
    every = planted.simulate(known, EVERYTHING, cost)
    replayed = judged({"code": observed}, cost).domain("code").outcome("fixed 6").goodput
    print(f"always 3: brute force {truth:.2f}, naive {naive:.2f}; always 6: brute force {every:.2f}, {replayed:.2f}")
    assert naive > 1.05 * truth
    assert replayed == pytest.approx(every, rel=0.03)
    assert found.longest_chain == 3 and found.outcome("fixed 6").reason == "longer than settings and cost allow"


def test_policies_learn_on_earlier_requests_only() -> None:
    random = np.random.default_rng(0)
    confidence = np.full((1000, 6), 0.9)
    accepted = random.random((1000, 6)) < np.where(np.arange(1000) < 500, 0.98, 0.55)[:, None]
    found = judged({"code": record(Chains(confidence, accepted), EVERYTHING, 1.0)}).domain("code")
    assert found.num_earlier_steps == found.num_steps == 500
    # What held before would have drafted six tokens, which later traffic no longer pays for.
    assert found.outcome("fresh thresholds").goodput == found.outcome("fixed 6").goodput
    assert found.outcome("fresh thresholds").regret > 0.05


def test_the_split_is_one_moment_for_all_domains() -> None:
    one = alike(400, 0.9, True)  # requests 0 … 39
    later = dataclasses.replace(one, request_index=one.request_index + 40)
    early, late = split_by_request({"old": one, "new": later}, 0.75)
    assert set(early["old"].request_index) == set(range(40)) and "old" not in late
    assert set(early["new"].request_index) == set(range(40, 60))
    assert set(late["new"].request_index) == set(range(60, 80))


def test_a_batch_pays_for_its_longest_chain() -> None:
    observed = {"code": record(chains(1000, 6, 0.2, 1.0, shared=0.8), EVERYTHING, 1.0)}
    now = {"code": Thresholds(stop_below=0.4, max_chain_length=6)}
    one, eight = (judged(observed, now=now, rows=rows).domain("code") for rows in (1, 8))
    for length in (1, 2, 4, 6):  # all rows alike: nobody waits
        alone = one.outcome(f"fixed {length}").goodput
        assert eight.outcome(f"fixed {length}").goodput == pytest.approx(8 * alone)
    assert eight.outcome("live thresholds").goodput < 0.95 * 8 * one.outcome("live thresholds").goodput


def test_chains_beyond_the_records_are_not_judged_and_cut_ones_are_counted() -> None:
    short = record(chains(600, 6, 0.7, 1.0), Thresholds(stop_below=0.0, max_chain_length=2), 0.0)
    part = judged({"code": short}, now={"code": Thresholds(stop_below=0.1, max_chain_length=4)}).domain("code")
    assert (part.longest_chain, part.longest_allowed) == (2, 6)
    assert part.outcome("fixed 4").goodput is None
    assert part.outcome("fixed 4").reason == "chains so long are not on record"
    assert part.outcome("live thresholds").cut_share == 1
    assert part.outcome("fixed 2").cut_share == 0


def test_too_little_is_said_and_never_guessed() -> None:
    with pytest.raises(NotEnoughDataError, match="serve more traffic"):
        judged({})
    with pytest.raises(NotEnoughDataError, match=r"code: 20 steps of 2 later requests"):
        judged({"code": alike(40, 0.9, True)})
    found = judged({"code": alike(400, 0.9, True), "tiny": alike(30, 0.9, True)})
    assert [(part.domain, part.reason) for part in found.too_small] == [("tiny", "0 steps of 0 later requests")]
    assert [part.domain for part in found.domains] == ["code"]
    unlearnt = judged({"code": alike(400, 0.9, True)}, split=0.0).domain("code")
    assert unlearnt.num_earlier_steps == 0
    for policy in ("fresh thresholds", "fresh stopping", "pooled thresholds", "logistic"):
        assert unlearnt.outcome(policy).reason == "too few earlier steps to fit"
    assert unlearnt.outcome("live stopping").reason == "the release has no survival curve of this domain"


def test_the_same_seed_judges_the_same_in_json_types() -> None:
    observed = {"code": record(chains(400, 6, 0.2, 1.0), Thresholds(), 0.2)}
    first, second = (judged(observed, seed=3) for _ in range(2))
    assert first == second != judged(observed, seed=4)
    plain = json.loads(json.dumps(first.to_dict()))
    assert plain["domains"][0]["domain"] == "code"
    assert {outcome["policy"] for outcome in plain["mix"]} >= {OFF, BEST_FIXED, ORACLE, "transformers", "logistic"}
