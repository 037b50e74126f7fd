"""Scores against a slow replay, on single traces, without batches."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from adaptive_spec.learning.batches import completion_length, make_batch, plan
from adaptive_spec.learning.evaluate import acceptance_length, score
from tests.learning.toy import tiny_draft, toy_traces


def test_scores_equal_a_loop_over_positions() -> None:
    draft, traces = tiny_draft(), toy_traces(7, seed=1)
    for trace, row in zip(traces, score(draft, traces, batch_tokens=60), strict=True):
        with torch.no_grad():
            probs = draft(torch.tensor([trace.tokens])).logits[0].softmax(-1)
        agrees, shared = [], []
        for i in range(len(trace.top_ids)):
            ours = probs[trace.prompt_tokens + i - 1]
            agrees.append(int(ours.argmax()) == trace.top_ids[i][0])
            ids, theirs = torch.tensor(trace.top_ids[i]).long(), torch.tensor(trace.top_log_probs[i]).exp()
            top = torch.minimum(ours[ids], theirs).sum()
            shared.append(float(top + min(1 - ours[ids].sum(), torch.tensor(trace.tail_mass[i]))))
        assert row.request_id == trace.request_id and row.domain == "code"
        assert row.agreement == pytest.approx(sum(agrees) / len(agrees))
        assert row.overlap == pytest.approx(sum(shared) / len(shared), abs=1e-4)
        assert row.acceptance_length == pytest.approx(acceptance_length(agrees, 4))


@pytest.mark.parametrize(
    ("agrees", "expected"),
    [([True] * 5, 5.0), ([False] * 3, 1.0), ([True, False] * 3, 2.0), ([], 0.0), ([True] * 6, 3.0)],
)
def test_acceptance_length_of_known_texts(agrees: list[bool], expected: float) -> None:
    assert acceptance_length(agrees, 4) == expected


@given(st.lists(st.booleans(), min_size=1), st.integers(0, 6))
def test_acceptance_length_is_bounded(agrees: list[bool], chain_length: int) -> None:
    assert 1 <= acceptance_length(agrees, chain_length) <= chain_length + 1


@given(st.integers(1, 120), st.integers(0, 3) | st.none())
def test_a_plan_holds_every_trace_once_and_keeps_the_budget(budget: int, seed: int | None) -> None:
    traces = toy_traces(12, seed=3)
    groups = plan(traces, budget, seed)
    assert sorted(t.request_id for group in groups for t in group) == sorted(t.request_id for t in traces)
    for group in groups:
        assert len(group) == 1 or len(group) * max(len(t.tokens) for t in group) <= budget


def test_only_completion_positions_are_judged() -> None:
    traces = toy_traces(3, seed=4)
    batch = make_batch(traces, torch.device("cpu"))
    for row, trace in enumerate(traces):
        judged = batch.judged[row].nonzero().flatten().tolist()
        assert judged == list(range(trace.prompt_tokens - 1, len(trace.tokens) - 1))
        assert batch.lengths[row] == completion_length(trace) == len(trace.top_ids)
    served = [trace.tokens[i] for trace in traces for i in range(trace.prompt_tokens, len(trace.tokens))]
    assert batch.target_argmax.tolist() == served
    torch.testing.assert_close(batch.target_log_probs.exp().sum(-1), torch.ones(batch.num_tokens))
