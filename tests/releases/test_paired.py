"""Paired gains on made-up scores: coverage, pairing, few requests."""

from dataclasses import replace

import numpy as np
import pytest

from adaptive_spec.releases.paired import TraceScore, change_of_ratio, paired_gain


def scores(gain: float, count: int, noise: float) -> tuple[list[TraceScore], list[TraceScore]]:
    generator = np.random.default_rng(0)
    before = [TraceScore("code", f"{i}", 0.5, 0.6, float(2 + generator.normal(0, 1))) for i in range(count)]
    return before, [
        replace(row, acceptance_length=row.acceptance_length + gain + float(generator.normal(0, noise)))
        for row in before
    ]


def test_the_interval_covers_and_pairs() -> None:
    before, after = scores(0.3, count=200, noise=0.5)
    row = paired_gain(before, after, 1)["code"]
    assert row.low < 0.3 < row.high and row.high - row.low < 0.2 and row.n == 200
    assert paired_gain(before, after, 1) == paired_gain(before, after, 1)
    for bad in (after[1:], [*after, after[0]]):
        with pytest.raises(ValueError, match="same requests"):
            paired_gain(before, bad)


def test_a_change_by_hand() -> None:
    change = change_of_ratio(np.asarray([2.0, 4.0]), np.asarray([1.0, 4.0]))
    assert change.share == pytest.approx(0.2)
    # without the first 4 / 4, without the second 2 / 1: sqrt(1 / 2 * (0.25 + 0.25))
    assert change.standard_error == pytest.approx(0.5)
    assert not change_of_ratio(np.asarray([1.0]), np.asarray([1.0])).low(0.9) <= 0  # NaN


@pytest.mark.parametrize(("num", "most"), [(5, 0.1), (30, 0.07)])
def test_the_bounds_keep_their_level_on_few_skewed_requests(num: int, most: float) -> None:
    """Requests differ much in length; the release gains nothing.  Each bound says that it is wrong in 5 % of cases."""
    random, wrong = np.random.default_rng(num), np.zeros(2)
    for _ in range(1000):
        size = random.lognormal(3, 0.7, num)
        before, after = size * random.lognormal(0, 0.1, num), size * random.lognormal(0, 0.1, num)
        change = change_of_ratio(before, after)
        wrong += (change.low(0.95) > 0, change.high(0.95) < 0)
    assert (wrong / 1000 < most).all(), wrong / 1000
