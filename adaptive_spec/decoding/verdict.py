"""The verify phase of a step: what the target's logits make of the chains, and the step's one read.

Nothing here waits for the device but the read at the end, which brings everything that the host must know.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from adaptive_spec.decoding.propose import Chains
from adaptive_spec.decoding.sampling import Sampling, penalised
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.verification.distribution import processed_probs
from adaptive_spec.verification.exact import verify_greedy, verify_sampled
from adaptive_spec.verification.transfer import read


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


def judge(slots: list[Slot], logits: Tensor, chains: Chains, sampling: Sampling | None) -> Verdict:
    """Decide how much of each chain is kept and what comes after it.

    Args:
        logits: [rows, chain + 1, vocab], the target's, after the last token and after each of the chain.
        sampling: None when every row is greedy.
    """
    width, device = chains.ids.shape[1], logits.device
    adjusted = penalised(slots, logits, chains.ids, 0)
    if sampling is None:
        num_accepted, next_tokens = verify_greedy(adjusted.argmax(-1), chains.ids, chains.lengths)
        overlaps = (torch.arange(width, device=device) < num_accepted[:, None]).float()
    else:
        assert chains.probs is not None
        target = processed_probs(adjusted, sampling.processing)
        num_accepted, next_tokens = verify_sampled(
            target, chains.probs, chains.ids, chains.lengths, sampling.accept[:, :width], sampling.after
        )
        overlaps = torch.minimum(target[:, :-1], chains.probs).sum(-1)
    found = read(chains.ids, chains.lengths, chains.confidences, num_accepted, next_tokens, overlaps)
    return Verdict(logits, *(values.tolist() for values in found))
