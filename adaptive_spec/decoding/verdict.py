"""The verify phase of a step: what the target's logits make of the chains, and the step's one read.

This is how it runs on a device.  Where the host may look, ``walk.py`` gives the same verdict and touches less.

Nothing here waits for the device but the read at the end, which brings everything that the host must know, and the
screen of the hybrid rule.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from adaptive_spec.decoding.propose import Chains
from adaptive_spec.decoding.rules import Relaxation
from adaptive_spec.decoding.sampling import Sampling, penalised
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.verification.distribution import best_tokens, processed_probs
from adaptive_spec.verification.divergence import diverging_tokens, given_up_nats, within_allowance
from adaptive_spec.verification.exact import accepts_greedy, accepts_sampled, kept, next_greedy, next_sampled
from adaptive_spec.verification.relaxed import Evidence, rule_passes
from adaptive_spec.verification.transfer import on_device, read


@dataclass(slots=True)
class Divergence:
    """What relaxed rules kept against the strict verdict, on the host.

    tokens, total_variation, given_up_nats: [rows][chain]; the latter two are 0 where nothing diverges.
    wanted_more: [rows], a token was refused only because the domain had no budget left for it.
    """

    tokens: list[list[bool]]
    total_variation: list[list[float]]
    given_up_nats: list[list[float]]
    wanted_more: list[bool]


@dataclass(frozen=True, slots=True)
class GaveUp:
    """What the emitted tokens of a row gave up: sums over those that diverge."""

    num_divergent: int = 0
    total_variation: float = 0.0
    given_up_nats: float = 0.0
    wanted_more: bool = False


@dataclass(slots=True)
class Verdict:
    """What a step showed, on the host.  logits stay on the device: [rows, chain + 1, vocab], before penalties."""

    logits: Tensor
    chains: list[list[int]]
    lengths: list[int]
    confidences: list[list[float]]
    num_accepted: list[int]
    next_tokens: list[int]
    overlaps: list[list[float]]
    divergence: Divergence | None = None  # None: every row was verified exactly

    def gave_up(self, row: int, num_emitted: int) -> GaveUp:
        """Of a row of whose tokens so many were emitted; a stop may have cut the rest."""
        found = self.divergence
        if found is None:
            return GaveUp()
        count = min(num_emitted, self.num_accepted[row])
        return GaveUp(
            sum(found.tokens[row][:count]),
            sum(found.total_variation[row][:count]),
            sum(found.given_up_nats[row][:count]),
            found.wanted_more[row],
        )


@dataclass(frozen=True, slots=True)
class Look:
    """What the target's forward says of chains before any relaxed rule is asked.

    adjusted: [rows, chain + 1, vocab], logits after penalties.  own: [rows, chain + 1], their argmax.
    probs: [rows, chain + 1, vocab], what rows sample from; None when every row is greedy.
    strict: [rows, chain] bool, exact verification's verdict on each position.
    """

    adjusted: Tensor
    own: Tensor
    probs: Tensor | None
    strict: Tensor


def look(slots: list[Slot], logits: Tensor, chains: Chains, sampling: Sampling | None) -> Look:
    """See how exact verification finds every position of every chain.  Arguments are those of ``judge``."""
    ids, width = chains.ids, chains.ids.shape[1]
    adjusted = penalised(slots, logits, ids, 0)
    own = best_tokens(adjusted)
    if sampling is None:
        return Look(adjusted, own, None, accepts_greedy(own, ids))
    assert chains.probs is not None
    probs = processed_probs(adjusted, sampling.processing)
    return Look(adjusted, own, probs, accepts_sampled(probs, chains.probs, ids, sampling.accept[:, :width]))


def judge(
    slots: list[Slot], logits: Tensor, chains: Chains, sampling: Sampling | None, relaxation: Relaxation | None = None
) -> Verdict:
    """Decide how much of each chain is kept and what comes after it.

    Args:
        logits: [rows, chain + 1, vocab], the target's, after the last token and after each of the chain.
        sampling: None when every row is greedy.
        relaxation: None when every row is verified exactly.
    """
    ids, lengths, width = chains.ids, chains.lengths, chains.ids.shape[1]
    seen = look(slots, logits, chains, sampling)
    adjusted, probs, strict = seen.adjusted, seen.probs, seen.strict
    accepted, passes, evidence = strict, strict, None
    if relaxation is not None and width:
        evidence = evidence_of(seen, chains, sampling)
        passes = _relaxed_passes(strict, relaxation, evidence)
        accepted = within_allowance(strict, passes, on_device(relaxation.allowance, logits.device))
    num_accepted = kept(accepted, lengths)
    if probs is None:
        next_tokens = next_greedy(seen.own, num_accepted)
        overlaps = (torch.arange(width, device=logits.device) < num_accepted[:, None]).float()
    else:
        assert chains.probs is not None and sampling is not None
        next_tokens = next_sampled(probs, chains.probs, lengths, num_accepted, sampling.after)
        overlaps = torch.minimum(probs[:, :-1], chains.probs).sum(-1)
    found = [ids, lengths, chains.confidences, num_accepted, next_tokens, overlaps]
    if relaxation is not None and evidence is not None:
        found += _divergence(adjusted, strict, passes, num_accepted, relaxation, evidence)
    shown = [values.tolist() for values in read(*found)]
    verdict = Verdict(logits, *shown[:6])
    if shown[6:]:
        verdict.divergence = Divergence(*shown[6:])
    return verdict


def evidence_of(seen: Look, chains: Chains, sampling: Sampling | None) -> Evidence:
    """What relaxed rules may ask for; the chains must have been drafted with ``compares``."""

    def target(rows: list[int]) -> Tensor:
        greedy = seen.adjusted[rows, :-1].float().log_softmax(-1)
        if seen.probs is None or sampling is None:
            return greedy
        return torch.where(sampling.processing.greedy[rows][:, None, None], greedy, seen.probs[rows, :-1].log())

    def draft(rows: list[int]) -> Tensor:
        assert chains.log_probs is not None
        return chains.log_probs[rows]

    return Evidence(chains.ids, seen.own[:, :-1], chains.lengths, target, draft)


def _relaxed_passes(strict: Tensor, relaxation: Relaxation, evidence: Evidence) -> Tensor:
    passes = torch.zeros_like(strict)
    for rule, rows in relaxation.groups:
        passes[rows] = rule_passes(rule, rows, evidence)
    return passes


def _divergence(
    adjusted: Tensor,
    strict: Tensor,
    passes: Tensor,
    num_accepted: Tensor,
    relaxation: Relaxation,
    evidence: Evidence,
) -> list[Tensor]:
    """The columns of ``Divergence``.  On a CPU only rows with a diverging token are measured; looking there is free."""
    tokens = diverging_tokens(strict, num_accepted)
    rows = relaxation.rows
    if tokens.device.type == "cpu":
        rows = tokens.any(-1).nonzero().flatten().tolist()
    apart, given_up = torch.zeros_like(strict, dtype=torch.float32), torch.zeros_like(strict, dtype=torch.float32)
    if rows:
        apart[rows] = 1 - evidence.similarity(rows, "tv")
        given_up[rows] = given_up_nats(adjusted[rows, :-1], evidence.chain[rows])
    width = strict.shape[1]
    at_stop = num_accepted.clamp_max(width - 1)[:, None]
    refused = (num_accepted < evidence.chain_lengths)[:, None] & passes.gather(1, at_stop) & ~strict.gather(1, at_stop)
    return [tokens, apart * tokens, given_up * tokens, refused.squeeze(1)]
