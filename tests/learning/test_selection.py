"""Who is fitted and who chooses: by prompt, and in every run the same."""

from dataclasses import replace

import pytest

from adaptive_spec.learning.selection import split, split_selection
from tests.learning.toy import toy_traces


def prompts(traces: list) -> set[tuple[int, ...]]:
    return {trace.tokens[: trace.prompt_tokens] for trace in traces}


def test_prompts_stay_together_in_all_three_parts() -> None:
    traces = toy_traces(600, seed=1, states=128)
    fitted, selection = split(traces)
    epoch, contest = split_selection(selection)
    assert len(fitted) + len(epoch) + len(contest) == 600
    assert not prompts(fitted) & prompts(selection) and not prompts(epoch) & prompts(contest)
    assert 0.08 < len(selection) / 600 < 0.25 and 0 < len(epoch) < len(contest)


def test_what_chose_in_one_run_is_not_fitted_in_the_next() -> None:
    early, late = toy_traces(200, seed=1, states=128), toy_traces(400, seed=2, states=128)
    _, chose = split(early)
    fitted, _ = split([*late, *early])
    assert len(prompts(chose)) > 5 and not prompts(fitted) & prompts(chose)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_neither_side_is_empty_however_prompts_fall(count: int) -> None:
    for start in range(0, 128, 4):
        trace = toy_traces(1, seed=1, states=128)[0]
        traces = [replace(trace, tokens=(start + i, *trace.tokens), prompt_tokens=1) for i in range(count)]
        assert all(split(traces))
