"""One entry to the relaxed rules: what a rule says of some rows, from evidence that is made only when asked for."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from adaptive_spec.core import Rule
from adaptive_spec.verification.hybrid import hybrid_passes
from adaptive_spec.verification.ngram import ngram_passes
from adaptive_spec.verification.similarity import similarity
from adaptive_spec.verification.typical import topk_passes, typical_passes


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one forward of the target showed of a batch of chains.

    chain, target_tokens: [rows, chain], the target's argmax at the same positions.  chain_lengths: [rows].
    target_log_probs, draft_log_probs: called with rows, return [some rows, chain, vocab] float32.
    """

    chain: Tensor
    target_tokens: Tensor
    chain_lengths: Tensor
    target_log_probs: Callable[[list[int]], Tensor]
    draft_log_probs: Callable[[list[int]], Tensor]

    def similarity(self, rows: list[int], measure: str) -> Tensor:
        """[some rows, chain]"""
        return similarity(self.target_log_probs(rows), self.draft_log_probs(rows), measure)


def rule_passes(rule: Rule, rows: list[int], evidence: Evidence) -> Tensor:
    """Which tokens of some rows pass a relaxed rule: [some rows, chain] bool."""
    chain, lengths = evidence.chain[rows], evidence.chain_lengths[rows]
    match rule.verifier:
        case "ngram" | "logits" | "hybrid":
            return comparing_passes(
                rule,
                chain,
                evidence.target_tokens[rows],
                lengths,
                lambda some: evidence.similarity([rows[index] for index in some], rule.similarity),
            )
        case "typical":
            return typical_passes(evidence.target_log_probs(rows), chain, rule.typical_epsilon, rule.typical_delta)
        case "topk_relaxed":
            return topk_passes(evidence.target_log_probs(rows), chain, rule.relaxed_top_k, rule.relaxed_delta)
    raise ValueError(f"{rule.verifier!r} is no relaxed verifier")


def comparing_passes(
    rule: Rule,
    chain: Tensor,
    target_tokens: Tensor,
    chain_lengths: Tensor,
    similarity_of: Callable[[list[int]], Tensor],
) -> Tensor:
    """The same of rules that compare tokens or similarities alone, so that chains on record can be judged by them too.

    Args:
        chain, target_tokens: [rows, chain]; chain_lengths: [rows].
        similarity_of: called with rows at most once, under the rule's measure: [some rows, chain].

    Returns:
        [rows, chain] bool.
    """
    match rule.verifier:
        case "ngram":
            return ngram_passes(chain, target_tokens, chain_lengths, rule.ngram_size, rule.min_overlap)
        case "logits":
            return similarity_of(list(range(len(chain)))) >= rule.min_similarity
        case "hybrid":
            return hybrid_passes(
                chain,
                target_tokens,
                chain_lengths,
                rule.ngram_size,
                rule.min_overlap,
                similarity_of,
                rule.min_similarity,
            )
    raise ValueError(f"{rule.verifier!r} compares neither tokens nor similarities")
