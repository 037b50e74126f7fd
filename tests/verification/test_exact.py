"""Exact verification against worked examples, a plain-loop reference, and by distribution."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from adaptive_spec.core import LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY, SamplingParams
from adaptive_spec.verification.distribution import Processing, penalised_logits, processed_probs, sample
from adaptive_spec.verification.exact import accepts_greedy, accepts_sampled, kept, next_greedy, next_sampled
from tests.verification.chains import FAULTS, run

VOCAB = 5


def random_probs(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)).mul(1.5).softmax(-1)


def p_value(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    return float(chisquare(counts.numpy(), (probs.double() * len(tokens)).numpy(), sum_check=False).pvalue)


LIMIT = 1e-3 / (20 * 3)  # seeds and positions


def smallest_p_value(seed: int, fault: str = "") -> float:
    """Over the positions of a step: recovered and bonus tokens are among them."""
    target, draft = random_probs(seed, 3), random_probs(seed + 100, 2)
    return min(p_value(tokens, probs) for tokens, probs in zip(run(target, draft, fault, seed), target, strict=True))


def test_emitted_tokens_have_the_targets_distribution_over_twenty_seeds() -> None:
    assert all(smallest_p_value(seed) > LIMIT for seed in range(20))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_variant_is_caught_by_the_same_test(fault: str) -> None:
    assert sum(smallest_p_value(seed, fault) > LIMIT for seed in range(20)) <= 2


def test_greedy_keeps_the_longest_matching_prefix() -> None:
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [9, 9, 9, 9]])
    chain = torch.tensor([[1, 2, 3], [1, 0, 3], [1, 2, 3], [0, 0, 0]])
    accepted = kept(accepts_greedy(target, chain), torch.tensor([3, 3, 1, 0]))
    assert accepted.tolist() == [3, 1, 1, 0]
    assert next_greedy(target, accepted).tolist() == [4, 2, 2, 9]


def test_rejection_by_hand() -> None:
    """target .2/.8, draft .6/.4: token 0 is kept with probability 1/3; the residual is all token 1."""
    target = torch.tensor([[[0.2, 0.8], [0.5, 0.5]]])
    draft = torch.tensor([[[0.6, 0.4]]])
    for uniform, accepted, following in ((0.3, 1, 0), (0.34, 0, 1)):
        passes = accepts_sampled(target, draft, torch.tensor([[0]]), torch.tensor([[uniform]]))
        num_kept = kept(passes, torch.tensor([1]))
        after = next_sampled(target, draft, torch.tensor([1]), num_kept, torch.tensor([0.1]))
        assert (num_kept.tolist(), after.tolist()) == ([accepted], [following])


def test_a_zero_length_chain_draws_from_the_target() -> None:
    target = torch.tensor([[[0.0, 1.0, 0.0]]])
    none = torch.zeros(1, dtype=torch.long)
    assert next_sampled(target, torch.zeros(1, 0, 3), none, none, torch.tensor([0.5])).tolist() == [1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=12),
    st.floats(0.1, 3),
    st.integers(0, 12),
    st.floats(0.05, 1),
    st.one_of(st.just(0.0), st.floats(0.01, 1)),
)
def test_processing_matches_a_plain_loop(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = torch.tensor(logits)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = processed_probs(row.view(1, 1, -1), Processing.of([params]))[0, 0]
    probs = (row / temperature).softmax(-1).tolist()
    assume(all(abs(p - min_p * max(probs)) > 1e-6 for p in probs) or min_p == 1.0 == max(probs))
    probs = [p if p >= min_p * max(probs) else 0.0 for p in probs]
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = order[:top_k] if top_k else order
    total, mass, chosen = sum(probs[i] for i in kept), 0.0, []
    for index in kept:
        if top_p < 1 and mass / total >= top_p - 1e-6:
            break
        chosen.append(index)
        mass += probs[index]
    if abs(mass / total - top_p) > 1e-4:  # away from a rounding edge of the nucleus
        wanted = torch.tensor([probs[i] / mass if i in chosen else 0.0 for i in range(len(probs))])
        assert torch.allclose(ours, wanted, atol=1e-5)
    assert abs(float(ours.sum()) - 1) < 1e-5


def test_penalties_by_hand() -> None:
    """Token 0 in the prompt, token 1 in prompt and output, token 2 twice in the output, token 3 nowhere."""
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    found = penalised_logits(logits, [0, 1], [1, 2, 2], 2.0, 0.25, 0.5)
    assert found.tolist() == pytest.approx([1.0, -4.0 - 0.75, 0.5 - 1.25, 0.5])
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5]
    assert penalised_logits(logits, [0], [], 1.0, 0.25, 0.5).tolist() == logits.tolist()


def test_greedy_processing_is_one_hot_and_sampling_never_draws_the_impossible() -> None:
    probs = processed_probs(torch.tensor([[[0.1, 3.0, -float("inf")]]]), Processing.of([SamplingParams()]))
    assert probs.tolist() == [[[0.0, 1.0, 0.0]]]
    assert sample(torch.tensor([[0.0, 1.0, 0.0]] * 2), torch.tensor([0.0, 0.9999999])).tolist() == [1, 1]


@pytest.mark.parametrize(
    "params",
    [
        [SamplingParams(temperature=1.0, top_k=40), SamplingParams(temperature=1.0, top_k=7, top_p=0.6)],
        [SamplingParams(temperature=0.7, top_p=0.5), SamplingParams(temperature=1.0)],
        [SamplingParams(temperature=30.0, top_p=0.95), SamplingParams(temperature=1.0, top_k=3000)],
        [SamplingParams(temperature=1.0, top_k=2**63), SamplingParams(temperature=1.0, top_p=1e-46)],
    ],
)
def test_truncating_a_large_vocabulary_needs_no_full_sort_and_gives_the_same(params: list[SamplingParams]) -> None:
    logits = torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(0)) * 3
    ours = processed_probs(logits, Processing.of(params))
    for row, p in enumerate(params):
        for position in range(3):
            probs = (logits[row, position] / p.temperature).double().softmax(-1)
            order = probs.argsort(descending=True)
            kept = order[: p.top_k] if p.top_k else order
            mass = (probs[kept] / probs[kept].sum()).cumsum(0)
            count = len(kept) if p.top_p == 1 else max(1, int((mass < p.top_p).sum()) + 1)
            wanted = torch.zeros_like(probs).index_put((kept[:count],), probs[kept[:count]])
            assert torch.allclose(ours[row, position].double(), wanted / wanted.sum(), atol=1e-6)


def test_temperatures_next_to_zero_are_greedy() -> None:
    params = SamplingParams(temperature=1e-40)
    assert params.greedy
    probs = processed_probs(torch.tensor([[[1.0, 2.0]]]), Processing.of([params]))
    assert probs.tolist() == [[[0.0, 1.0]]]


@settings(max_examples=300, deadline=None)
@given(
    repetition=st.sampled_from([LEAST_REPETITION_PENALTY, 1.0, MOST_REPETITION_PENALTY]),
    others=st.tuples(*(st.sampled_from([-2.0, 0.0, 2.0]),) * 2),
    temperature=st.sampled_from([0.0, 5e-324, 1e-5, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 5e-324, 0.5, 1.0]),
    top_p=st.sampled_from([5e-324, 1e-9, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 2**63]),
    size=st.sampled_from([0.0, 1e-30, 1.0, 1e4]),
    seed=st.integers(0, 5),
)
def test_whatever_may_be_asked_for_makes_a_distribution(
    repetition: float,
    others: tuple[float, float],
    temperature: float,
    min_p: float,
    top_p: float,
    top_k: int,
    size: float,
    seed: int,
) -> None:
    """Logits as large as models make them, and larger, at every end of what ``check_request`` lets through."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * size
    penalised = penalised_logits(logits, range(10), list(range(5, 25)), repetition, *others)
    params = SamplingParams(temperature=temperature, min_p=min_p, top_p=top_p, top_k=top_k)
    probs = processed_probs(penalised.view(1, 1, -1), Processing.of([params]))
    assert bool((probs >= 0).all()) and float(probs.sum()) == pytest.approx(1, abs=1e-5)
