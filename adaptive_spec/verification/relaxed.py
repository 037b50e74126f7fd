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
        case "ngram":
            return ngram_passes(chain, evidence.target_tokens[rows], lengths, rule.ngram_size, rule.min_overlap)
        case "logits":
            return evidence.similarity(rows, rule.similarity) >= rule.min_similarity
        case "hybrid":
            return hybrid_passes(
                chain,
                evidence.target_tokens[rows],
                lengths,
                rule.ngram_size,
                rule.min_overlap,
                lambda some: evidence.similarity([rows[index] for index in some], rule.similarity),
                rule.min_similarity,
            )
        case "typical":
            return typical_passes(evidence.target_log_probs(rows), chain, rule.typical_epsilon, rule.typical_delta)
        case "topk_relaxed":
            return topk_passes(evidence.target_log_probs(rows), chain, rule.relaxed_top_k, rule.relaxed_delta)
    raise ValueError(f"{rule.verifier!r} is no relaxed verifier")
