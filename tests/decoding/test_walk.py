"""The walk along the chains gives the verdict that judging everything at once gives, whatever the rules and chains."""

import random
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_spec.core import SIMILARITIES, VERIFIERS, Request, Rule, SamplingParams
from adaptive_spec.decoding.propose import Chains
from adaptive_spec.decoding.rules import Relaxation
from adaptive_spec.decoding.sampling import Sampling, penalised, sampling_of
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.decoding.text import TextStream
from adaptive_spec.decoding.verdict import Verdict, judge
from adaptive_spec.decoding.walk import walk
from adaptive_spec.drafting.ngram import NOTHING
from adaptive_spec.verification.distribution import processed_probs, sample

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=4, min_p=0.01),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=1.0, presence_penalty=0.5),
)


def step(
    seed: int, params: list[SamplingParams], width: int, vocab: int, noise: float
) -> tuple[list[Slot], torch.Tensor, Chains, Sampling | None]:
    """What a decoder hands over: chains of random lengths, drawn from a target with noise."""
    generator = torch.Generator().manual_seed(seed)
    slots = [
        Slot(Request(str(row), (1, 2), its), [1, 2, 0], TextStream(None, ()), print, random.Random(seed + row), 0.0,
             datetime.now(UTC))
        for row, its in enumerate(params)
    ]  # fmt: skip
    logits = torch.randn(len(params), width + 1, vocab, generator=generator) * 3
    lengths = torch.randint(0, width + 1, (len(params),), generator=generator)
    raw = logits[:, :-1] + noise * torch.randn(len(params), width, vocab, generator=generator)
    sampling = sampling_of(slots, width, torch.device("cpu"))
    compared, probs = raw.log_softmax(-1), None
    ids = penalised(slots, raw, raw.argmax(-1), 0).argmax(-1) if width else torch.zeros(len(params), 0).long()
    if sampling is not None:
        probs = processed_probs(raw, sampling.processing)
        greedy = sampling.processing.greedy[:, None, None]
        compared = torch.where(greedy, compared, probs.log())
        ids = sample(probs, sampling.draft)
    none = [False] * len(params)
    chains = Chains(ids, lengths, ids.float(), probs, compared, none, none, [NOTHING] * len(params), 0.0)
    return slots, logits, chains, sampling


def same(fast: Verdict, plain: Verdict) -> None:
    """Tokens to the last, what is measured to rounding; what is never emitted may differ."""
    for name in ("chains", "lengths", "confidences", "num_accepted", "next_tokens"):
        assert getattr(fast, name) == getattr(plain, name), name
    for row, (length, accepted) in enumerate(zip(plain.lengths, plain.num_accepted, strict=True)):
        reached = min(accepted + 1, length)
        assert fast.overlaps[row][:reached] == pytest.approx(plain.overlaps[row][:reached], abs=1e-5)
        for emitted in (accepted, accepted + 1):
            ours, theirs = fast.gave_up(row, emitted), plain.gave_up(row, emitted)
            assert (ours.num_divergent, ours.wanted_more) == (theirs.num_divergent, theirs.wanted_more)
            assert ours.total_variation == pytest.approx(theirs.total_variation, abs=1e-5)
            assert ours.given_up_nats == pytest.approx(theirs.given_up_nats, abs=1e-4)


rules = st.builds(
    Rule,
    verifier=st.sampled_from([name for name in VERIFIERS if name != "exact"]),
    ngram_size=st.integers(1, 3),
    min_overlap=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    similarity=st.sampled_from(SIMILARITIES),
    min_similarity=st.floats(0, 1),
    typical_epsilon=st.floats(0, 0.5),
    relaxed_top_k=st.integers(1, 6),
)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.sampled_from(PARAMS), min_size=1, max_size=5),
    st.integers(0, 6),
    st.sampled_from([7, 60]),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.lists(st.tuples(st.one_of(st.none(), rules), st.integers(0, 4)), min_size=5, max_size=5),
)
def test_walking_is_judging(
    seed: int,
    params: list[SamplingParams],
    width: int,
    vocab: int,
    noise: float,
    relaxed: list[tuple[Rule | None, int]],
) -> None:
    groups: dict[Rule, list[int]] = {}
    for row, (rule, allowed) in enumerate(relaxed[: len(params)]):
        if rule is not None and allowed:
            groups.setdefault(rule, []).append(row)
    allowance = [allowed if rule else 0 for rule, allowed in relaxed[: len(params)]]
    relaxation = Relaxation(tuple(groups.items()), allowance) if groups else None
    slots, logits, chains, sampling = step(seed, params, width, vocab, noise)
    for given_rules in (None, relaxation):
        fast = walk(slots, logits, chains, sampling, given_rules)
        same(fast, judge(slots, logits, chains, sampling, given_rules))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("params", [PARAMS[0], PARAMS[1], PARAMS[2]])
def test_walking_is_judging_at_real_vocabularies(params: SamplingParams, dtype: torch.dtype) -> None:
    slots, logits, chains, sampling = step(3, [params] * 3, 5, 49_152, 0.5)
    logits = logits.to(dtype)
    relaxation = Relaxation(((Rule("logits", min_similarity=0.2), [0, 2]),), [9, 0, 1])
    for given_rules in (None, relaxation):
        fast = walk(slots, logits, chains, sampling, given_rules)
        same(fast, judge(slots, logits, chains, sampling, given_rules))


def test_a_walk_that_looked_at_other_numbers_would_be_caught() -> None:
    """The comparison can fail: other uniforms give another verdict."""
    slots, logits, chains, sampling = step(0, [PARAMS[1]] * 4, 6, 60, 3.0)
    assert sampling is not None
    other = replace(sampling, accept=1 - sampling.accept, after=1 - sampling.after)
    with pytest.raises(AssertionError):
        same(walk(slots, logits, chains, other), judge(slots, logits, chains, sampling))
