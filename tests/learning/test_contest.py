"""Who serves a domain: noise never wins, a planted winner does, with little to go by the shared adapter stays."""

import pytest

from adaptive_spec.learning.contest import COLD_START, NO_MARGIN, SHARED, WON, contest
from adaptive_spec.settings import LearningSettings
from tests.learning.judged import domain_of

SETTINGS = LearningSettings()
NO_MARGIN_ASKED = LearningSettings(own_margin_share=0.0)


@pytest.mark.parametrize(("num_contenders", "num_requests"), [(1, 20), (3, 30)])
def test_equal_adapters_hardly_ever_win(num_contenders: int, num_requests: int) -> None:
    """Even when no margin is asked for; 2.5 % of 60 contests would be 1.5."""
    won = 0
    for seed in range(60):
        shared, *others = domain_of([0.5] * (1 + num_contenders), num_requests, seed)
        verdict = contest(shared, {f"a{i}": rows for i, rows in enumerate(others)}, NO_MARGIN_ASKED)["code"]
        won += verdict.winner != SHARED
    assert won <= 5, "three standard deviations more than the stated error"


def test_a_planted_winner_is_found_in_its_domain_alone() -> None:
    code, legal = domain_of([0.5, 0.75, 0.45], 40, 1, "code"), domain_of([0.5, 0.4, 0.5], 40, 2, "legal")
    shared, expert, other = (one + two for one, two in zip(code, legal, strict=True))
    found = contest(shared, {"expert": expert, "other": other}, SETTINGS)
    assert (found["code"].winner, found["code"].reason) == ("expert", WON)
    assert (found["legal"].winner, found["legal"].reason) == (SHARED, NO_MARGIN)
    best = found["code"].contenders[0]
    assert best.name == "expert" and best.gain_share_low is not None
    assert SETTINGS.own_margin_share < best.gain_share_low < best.gain_share
    length = found["code"].shared_acceptance_length
    assert best.acceptance_length == pytest.approx(length * (1 + best.gain_share))


def test_the_larger_of_two_winners_wins() -> None:
    shared, good, better = domain_of([0.4, 0.65, 0.8], 40, 3)
    assert contest(shared, {"better": better, "good": good}, SETTINGS)["code"].winner == "better"
    assert contest(shared, {"good": good, "better": better}, SETTINGS)["code"].winner == "better"


def test_a_gain_within_the_margin_does_not_win() -> None:
    shared, own = domain_of([0.5, 0.6], 200, 4)
    gain = contest(shared, {"own": own}, NO_MARGIN_ASKED)["code"]
    assert gain.winner == "own"
    asked = LearningSettings(own_margin_share=gain.contenders[0].gain_share)
    verdict = contest(shared, {"own": own}, asked)["code"]
    assert (verdict.winner, verdict.reason) == (SHARED, NO_MARGIN)


def test_too_few_requests_leave_the_shared_one() -> None:
    shared, own = domain_of([0.1, 0.9], 19, 5)
    verdict = contest(shared, {"own": own}, SETTINGS)["code"]
    assert (verdict.winner, verdict.reason, verdict.num_requests) == (SHARED, COLD_START, 19)
    assert verdict.contenders[0].gain_share > 1 and verdict.contenders[0].gain_share_low is None


def test_unpaired_and_misnamed_contenders_are_errors() -> None:
    shared, own = domain_of([0.5, 0.5], 20, 6)
    with pytest.raises(ValueError, match="same requests"):
        contest(shared, {"own": own[1:]}, SETTINGS)
    with pytest.raises(ValueError, match="called"):
        contest(shared, {SHARED: own}, SETTINGS)


def test_no_contender_leaves_the_shared_one_everywhere() -> None:
    (shared,) = domain_of([0.5], 30, 7)
    assert contest(shared, {}, SETTINGS)["code"].winner == SHARED
