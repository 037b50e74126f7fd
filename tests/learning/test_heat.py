"""Sampling temperatures: found where planted, left alone where nothing is gained."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from adaptive_spec.core import POOLED, Trace
from adaptive_spec.learning.evaluate import judge
from adaptive_spec.learning.heat import HEATS, choose_heat, choose_heats
from tests.learning.toy import VOCAB, tiny_draft, toy_traces

TOP_K = 64


def traces_of(heat: float, count: int, domain: str = "code") -> list[Trace]:
    """Traces whose target is the draft itself with its logits divided by ``heat``; the tail is left to the top."""
    draft = tiny_draft()
    with torch.no_grad():
        draft.get_output_embeddings().weight.mul_(12.0)  # a random draft is nearly uniform; make it have opinions
    return [_retargeted(draft, trace, heat) for trace in toy_traces(count, seed=1, domain=domain)]


def _retargeted(draft: torch.nn.Module, trace: Trace, heat: float) -> Trace:
    with torch.no_grad():
        logits = draft(torch.tensor([trace.tokens])).logits[0, trace.prompt_tokens - 1 : -1]
    values, ids = (logits / heat).log_softmax(-1).topk(TOP_K)
    tail = (1 - values.exp().sum(-1)).clamp_min(0)
    return replace(trace, top_ids=ids.numpy(), top_log_probs=values.numpy(), tail_mass=tail.numpy())


def judged(traces: list[Trace], heats: tuple[float, ...] = HEATS) -> list:
    draft = tiny_draft()
    with torch.no_grad():
        draft.get_output_embeddings().weight.mul_(12.0)
    return judge(draft, traces, heats=heats)


@pytest.mark.parametrize("planted", [0.6, 1.0, 1.5])
def test_a_planted_temperature_is_found(planted: float) -> None:
    fit = choose_heat(judged(traces_of(planted, 12)))
    assert fit.temperature == planted
    assert fit.overlap_after > (0.75 if planted > 1 else 0.9)  # a flat target has a tail beyond its top tokens
    if planted == 1:
        assert fit.reason == "no_gain" and fit.overlap_after == fit.overlap_before
    else:
        assert fit.reason == "fitted" and fit.overlap_after > fit.overlap_before
        assert fit.gain_low is not None and fit.gain_low > 0


def test_the_overlap_at_one_is_that_of_the_top_tokens() -> None:
    traces = traces_of(0.7, 3)
    draft = tiny_draft()
    with torch.no_grad():
        draft.get_output_embeddings().weight.mul_(12.0)
    for trace, row in zip(traces, judged(traces, (1.0, 0.5)), strict=True):
        with torch.no_grad():
            logits = draft(torch.tensor([trace.tokens])).logits[0, trace.prompt_tokens - 1 : -1]
        for column, heat in enumerate((1.0, 0.5)):
            ours = (logits / heat).softmax(-1).gather(-1, torch.as_tensor(trace.top_ids))
            wanted = torch.minimum(ours, torch.as_tensor(trace.top_log_probs).exp()).sum(-1)
            np.testing.assert_allclose(row.overlap_at[:, column].numpy(), wanted.numpy(), atol=1e-5)
    assert VOCAB > TOP_K


def test_few_requests_decide_nothing_and_all_are_pooled() -> None:
    fits = choose_heats(judged([*traces_of(0.6, 3, "rare"), *traces_of(0.6, 12, "code")]))
    assert (fits["rare"].temperature, fits["rare"].reason) == (1.0, "cold_start")
    assert fits["code"].temperature == fits[POOLED].temperature == 0.6
