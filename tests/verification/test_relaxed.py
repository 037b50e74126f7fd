"""The relaxed rules: worked by hand, against plain loops, and where numbers are extreme."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaptive_spec.core import SIMILARITIES, VERIFIERS, Rule
from adaptive_spec.verification.exact import accepts_greedy, kept
from adaptive_spec.verification.ngram import ngram_overlap, ngram_passes
from adaptive_spec.verification.relaxed import Evidence, rule_passes
from adaptive_spec.verification.similarity import similarity
from adaptive_spec.verification.typical import topk_passes, typical_passes
from tests.verification import reference

RELAXED = [name for name in VERIFIERS if name != "exact"]
INF = float("inf")


def log_probs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).log()


def evidence(chain: list[int], target: Tensor, draft: Tensor) -> Evidence:
    """Of one row.  target, draft: [chain, vocab] log-probs."""
    return Evidence(
        torch.tensor([chain]),
        target.argmax(-1)[None],
        torch.tensor([len(chain)]),
        lambda rows: target[None][rows],
        lambda rows: draft[None][rows],
    )


def verdicts(rule: Rule, found: Evidence) -> tuple[int, int]:
    """How many tokens the rule keeps, and how many greedy exact verification keeps."""
    passes = rule_passes(rule, [0], found)
    padded = torch.cat([found.target_tokens, torch.tensor([[0]])], dim=1)
    strict = accepts_greedy(padded, found.chain)
    return int(kept(passes, found.chain_lengths)), int(kept(strict, found.chain_lengths))


# ---- by hand: each rule keeps what exact refuses, and refuses what exact keeps
#
# A vocabulary of three.  The target's best token is 0 at every position below.

SURE = [0.90, 0.06, 0.04]
TORN = [0.40, 0.35, 0.25]
LIKE_TORN = [0.35, 0.40, 0.25]  # TV to TORN .05; KL(TORN || LIKE_TORN) = .4 ln(8/7) + .35 ln(7/8) = .0067
FAR = [0.98, 0.01, 0.01]  # the same best token as TORN, TV .58


def test_ngram_keeps_a_chain_that_mostly_agrees_and_refuses_one_that_mostly_does_not() -> None:
    # Chain 0 1 0 0 0 against 0 0 0 0 0: of the bigrams 01 10 00 00 two are the target's: 2/4.
    found = evidence([0, 1, 0, 0, 0], log_probs(*[SURE] * 5), log_probs(*[SURE] * 5))
    assert float(ngram_overlap(found.chain, found.target_tokens, found.chain_lengths, 2)) == 0.5
    assert verdicts(Rule("ngram", ngram_size=2, min_overlap=0.5), found) == (5, 1)
    # Chain 0 1 1: bigrams 01 11, none is the target's; exact keeps the first token.
    found = evidence([0, 1, 1], log_probs(*[SURE] * 3), log_probs(*[SURE] * 3))
    assert verdicts(Rule("ngram", ngram_size=2, min_overlap=0.5), found) == (0, 1)


def test_logits_keeps_where_distributions_are_alike_and_refuses_where_they_are_not() -> None:
    rule = Rule("logits", similarity="tv", min_similarity=0.9)
    found = evidence([1], log_probs(TORN), log_probs(LIKE_TORN))  # 1 - TV = .95; the target would say 0
    assert verdicts(rule, found) == (1, 0)
    found = evidence([0], log_probs(TORN), log_probs(FAR))  # 1 - TV = .40 + .01 + .01 = .42; both would say 0
    assert verdicts(rule, found) == (0, 1)
    # Part of a chain: the first position is alike, the second is not.
    found = evidence([1, 0], log_probs(TORN, TORN), log_probs(LIKE_TORN, FAR))
    assert verdicts(rule, found) == (1, 0)


def test_hybrid_needs_both() -> None:
    rule = Rule("hybrid", ngram_size=1, min_overlap=0.5, similarity="tv", min_similarity=0.9)
    alike, target = log_probs(LIKE_TORN, LIKE_TORN), log_probs(TORN, TORN)
    assert verdicts(rule, evidence([1, 0], target, alike)) == (2, 0)  # 1 of 2 unigrams, both positions alike
    assert verdicts(rule, evidence([1, 1], target, alike)) == (0, 0)  # no unigram: the screen refuses
    assert verdicts(rule, evidence([0, 0], target, log_probs(FAR, FAR))) == (0, 2)  # screened, but not alike


def test_hybrid_compares_distributions_of_screened_rows_only() -> None:
    asked: list[list[int]] = []
    target = log_probs(SURE, SURE).expand(3, 2, 3)

    def draft(rows: list[int]) -> Tensor:
        asked.append(rows)
        return target[rows]

    chain = torch.tensor([[0, 0], [1, 1], [0, 0]])
    found = Evidence(chain, target.argmax(-1), torch.tensor([2, 2, 0]), lambda rows: target[rows], draft)
    passes = rule_passes(Rule("hybrid", min_overlap=1.0, min_similarity=0.9), [0, 1, 2], found)
    assert asked == [[0]]  # not the row that the screen refused, nor the empty one
    assert passes.tolist() == [[True, True], [False, False], [False, False]]
    asked.clear()
    rule_passes(Rule("hybrid", min_overlap=1.0), [1], found)
    assert asked == []


def test_typical_by_hand() -> None:
    """H(TORN) = 1.0805, so the bound is min(.09, .3 e^-1.0805 = .1018) = .09; H(SURE) = .3926 gives min(.09, .2026)."""
    rule = Rule("typical", typical_epsilon=0.09, typical_delta=0.3)
    assert verdicts(rule, evidence([2], log_probs(TORN), log_probs(TORN))) == (1, 0)  # .25 > .09
    assert verdicts(rule, evidence([1], log_probs(SURE), log_probs(SURE))) == (0, 0)  # .06 < .09
    # The best of many equally probable tokens may be untypical: 1/20 < min(.09, .3 x 1/20 = .015) is false, so it is
    # kept; with delta 2 the bound is .09 and even the target's own token is refused.
    flat = torch.full((1, 20), 1 / 20).log()
    assert verdicts(rule, evidence([0], flat, flat)) == (1, 1)
    assert verdicts(Rule("typical", typical_epsilon=0.09, typical_delta=2.0), evidence([0], flat, flat)) == (0, 1)


def test_topk_by_hand() -> None:
    """The target's own token always passes, so this rule never refuses what exact keeps."""
    rule = Rule("topk_relaxed", relaxed_top_k=2, relaxed_delta=0.1)
    assert verdicts(rule, evidence([1], log_probs(TORN), log_probs(TORN))) == (1, 0)  # second, .05 behind
    assert verdicts(rule, evidence([2], log_probs(TORN), log_probs(TORN))) == (0, 0)  # third
    assert verdicts(rule, evidence([1], log_probs(SURE), log_probs(SURE))) == (0, 0)  # second, .84 behind
    assert verdicts(rule, evidence([0], log_probs(SURE), log_probs(SURE))) == (1, 1)


# ---- n-grams


def test_repeats_are_not_counted_twice_and_order_matters() -> None:
    def of(chain: list[int], target: list[int], size: int) -> float:
        return float(ngram_overlap(torch.tensor([chain]), torch.tensor([target]), torch.tensor([len(chain)]), size))

    assert of([7, 7, 7, 7], [7, 1, 2, 3], 1) == 0.25  # one 7 in the target pays for one in the chain
    assert of([7, 1, 2, 3], [7, 7, 7, 7], 1) == 0.25
    assert of([1, 2, 3, 4], [4, 3, 2, 1], 1) == 1.0
    assert of([1, 2, 3, 4], [4, 3, 2, 1], 2) == 0.0  # the same words the other way round


def test_chains_shorter_than_an_ngram_are_compared_whole() -> None:
    chain = torch.tensor([[1, 2, 0, 0], [1, 3, 0, 0], [9, 9, 9, 9]])
    target = torch.tensor([[1, 2, 5, 5], [1, 2, 5, 5], [0, 0, 0, 0]])
    assert ngram_overlap(chain, target, torch.tensor([2, 2, 0]), 3).tolist() == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="at least one"):
        ngram_overlap(chain, target, torch.tensor([2, 2, 0]), 0)
    assert ngram_passes(chain[:, :0], target[:, :0], torch.tensor([0, 0, 0]), 2, 0.5).shape == (3, 0)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.integers(0, 7))
def test_overlap_matches_the_plain_loop(data: st.DataObject, size: int, rows: int, width: int) -> None:
    tokens = st.lists(st.integers(0, 2), min_size=width, max_size=width)
    chains = [data.draw(tokens) for _ in range(rows)]
    targets = [data.draw(tokens) for _ in range(rows)]
    lengths = [data.draw(st.integers(0, width)) for _ in range(rows)]
    found = ngram_overlap(
        torch.tensor(chains, dtype=torch.long).view(rows, width),
        torch.tensor(targets, dtype=torch.long).view(rows, width),
        torch.tensor(lengths),
        size,
    )
    wanted = [
        reference.overlap(chain[:length], target[:length], size)
        for chain, target, length in zip(chains, targets, lengths, strict=True)
    ]
    assert found.tolist() == pytest.approx(wanted)


# ---- distributions


def distribution(size: int) -> st.SearchStrategy[list[float]]:
    """Weights with zeros among them, as top-k leaves them."""
    weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1.0)), min_size=size, max_size=size)
    return weights.filter(lambda found: sum(found) > 0).map(lambda found: [w / sum(found) for w in found])


@settings(max_examples=200, deadline=None)
@given(distribution(6), distribution(6), st.sampled_from(SIMILARITIES))
def test_similarity_matches_the_plain_loop(target: list[float], draft: list[float], measure: str) -> None:
    found = float(similarity(log_probs(target), log_probs(draft), measure))
    assert found == pytest.approx(reference.similarity(target, draft, measure), abs=2e-4)


@settings(max_examples=200, deadline=None)
@given(distribution(6), st.integers(0, 5), st.floats(0, 1), st.floats(0, 2), st.integers(1, 6))
def test_rules_of_the_target_alone_match_the_plain_loops(
    target: list[float], token: int, epsilon: float, delta: float, top_k: int
) -> None:
    chain, found = torch.tensor([[token]]), log_probs(target)[None]
    entropy = -sum(p * math.log(p) for p in target if p > 0)
    assume(abs(target[token] - min(epsilon, delta * math.exp(-entropy))) > 1e-5)
    assert bool(typical_passes(found, chain, epsilon, delta)) == reference.typical(target, token, epsilon, delta)
    assume(abs(target[token] - (max(target) - delta)) > 1e-5)
    assume(all(p == target[token] or abs(p - target[token]) > 1e-6 for p in target))
    assert bool(topk_passes(found, chain, top_k, delta)) == reference.topk(target, token, top_k, delta)


@pytest.mark.parametrize("measure", SIMILARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_similarity_of_extreme_distributions(measure: str, dtype: torch.dtype) -> None:
    """Vocabulary of 151,936: equal, uniform, one-hot, disjoint and truncated ones; never nan, never out of range."""
    vocab = 151_936
    uniform = torch.zeros(vocab, dtype=dtype)
    peak, other = uniform.clone(), uniform.clone()
    peak[3], other[5] = 300.0, 300.0
    truncated = torch.full((vocab,), -INF, dtype=dtype)
    truncated[:40] = torch.linspace(0, 4, 40, dtype=dtype)
    rest = torch.full((vocab,), -INF, dtype=dtype)
    rest[40:] = 0.0
    rows = [row.float().log_softmax(-1) for row in (uniform, peak, other, truncated, rest)]
    for row in rows:
        assert float(similarity(row, row, measure)) == pytest.approx(1.0, abs=1e-3)
    for first in rows:
        for second in rows:
            assert 0 <= float(similarity(first, second, measure)) <= 1
    for first, second in ((rows[1], rows[2]), (rows[3], rows[4])):
        assert float(similarity(first, second, measure)) == pytest.approx(0.0, abs=1e-3)


def test_tokens_that_underflow_are_no_excluded_tokens() -> None:
    """The draft gives a token e^-120, which float32 cannot hold; KL is finite all the same: .001 x (-6.9 + 120)."""
    target = torch.tensor([0.999, 0.001]).log()
    draft = torch.tensor([0.0, -120.0]).log_softmax(-1)
    wanted = math.exp(-(0.999 * math.log(0.999) + 0.001 * (math.log(0.001) + 120)))
    assert float(similarity(target, draft, "kl")) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("verifier", RELAXED)
def test_padding_and_empty_chains_change_nothing(verifier: str) -> None:
    generator = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(3, 4, 9, generator=generator).log_softmax(-1) for _ in range(2))
    chain = torch.randint(0, 9, (3, 4), generator=generator)
    lengths = torch.tensor([4, 2, 0])
    rule = Rule(verifier, min_overlap=0.3, min_similarity=0.3)

    def kept_with(chain: Tensor, target: Tensor, draft: Tensor) -> list[int]:
        found = Evidence(chain, target.argmax(-1), lengths, lambda rows: target[rows], lambda rows: draft[rows])
        return kept(rule_passes(rule, [0, 1, 2], found), lengths).tolist()  # type: ignore[no-any-return]

    other_padding, other_target, other_draft = chain.clone(), target.clone(), draft.clone()
    other_padding[1, 2:] = 0
    other_target[1, 2:] = torch.zeros(9).log_softmax(-1)
    other_draft[1, 2:] = -INF
    other_draft[1, 2:, 0] = 0.0
    once = kept_with(chain, target, draft)
    assert once[2] == 0 and once == kept_with(other_padding, other_target, other_draft)


def test_an_unknown_rule_is_refused() -> None:
    found = evidence([0], log_probs(SURE), log_probs(SURE))
    with pytest.raises(ValueError, match="no relaxed verifier"):
        rule_passes(Rule("exact"), [0], found)
    with pytest.raises(ValueError, match="unknown measure"):
        rule_passes(Rule("logits", similarity="hellinger"), [0], found)
