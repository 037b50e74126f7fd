"""The divergence budget: an account that cannot be overdrawn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_spec.decoding.budget import Budget


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 1.0]),
    st.integers(1, 400),
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 7)), max_size=400),
)
def test_it_is_never_overdrawn_whatever_the_traffic(share: float, window: int, steps: list[tuple[int, int]]) -> None:
    budget = Budget(share, window)
    history: list[tuple[int, int]] = []
    for num_emitted, wanted in steps:
        spent = min(wanted, budget.allowance, num_emitted)
        budget.count(num_emitted, spent, wanted > spent and spent > 0)
        history.append((num_emitted, spent))
        assert budget.num_divergent <= share * budget.num_emitted + 1e-6
    saved = max(1.0, share * window)
    for start in range(0, len(history), 7):  # any stretch: its own share and what was saved before it
        emitted, spent = (sum(column) for column in zip(*history[start:], strict=True))
        assert spent <= share * emitted + saved + 1e-6


def test_by_hand() -> None:
    """A share of 10 % in windows of 20 tokens: at most 2 saved; a fallback lasts 10 tokens, then 20, then 40."""
    budget = Budget(0.1, 20)
    assert budget.count(9, 0, False) is None and budget.allowance == 0
    assert budget.count(1, 0, False) is None and budget.allowance == 1
    assert budget.count(100, 0, False) is None and budget.allowance == 2
    assert budget.count(5, 2, False) is None and budget.allowance == 0  # spent, but nothing more was wanted
    assert budget.count(5, 0, False) is None and budget.allowance == 1
    assert budget.count(1, 1, True) == "spent"
    assert (budget.fallen_back, budget.waits_for, budget.allowance) == (True, 10, 0)
    assert budget.count(9, 0, False) is None and budget.fallen_back
    assert budget.count(1, 0, False) == "restored"
    assert budget.allowance == 1  # ten tokens earned it
    assert budget.count(1, 1, True) == "spent" and budget.waits_for == 20  # soon again: twice as long
    assert budget.count(20, 0, False) == "restored" and budget.allowance == 2
    for _ in range(10):
        assert budget.count(10, 1, False) is None  # within budget for five windows
    assert budget.count(1, 2, True) == "spent" and budget.waits_for == 10  # forgiven
    assert budget.num_fallbacks == 3


def test_a_wait_has_an_end() -> None:
    budget, waits = Budget(0.5, 10), []
    for _ in range(2000):
        spent = budget.allowance
        if budget.count(2, spent, spent > 0) == "spent":
            waits.append(budget.waits_for)
    assert waits[:8] == [5, 10, 20, 40, 80, 160, 320, 320]


def test_a_budget_of_zero_allows_nothing() -> None:
    budget = Budget(0.0, 1000)
    budget.count(1_000_000, 0, False)
    assert budget.allowance == 0 and not budget.fallen_back
    whole = Budget(1.0, 1000)
    assert whole.allowance > 1000 and whole.count(4, 4, True) is None and whole.allowance > 1000
    assert pytest.approx(0.0) == Budget(0.02, 10).allowance
