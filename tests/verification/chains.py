"""Runs of one step of exact verification over and over, also with a fault built in."""

import torch
from torch import Tensor

from adaptive_spec.verification.distribution import sample
from adaptive_spec.verification.exact import accepts_sampled, kept, next_sampled

# What a decoder may get wrong: the chain is drawn at another temperature than it is verified at; the recovered token
# comes from the target instead of the residual; the bonus token comes from the draft.
FAULTS = ("temperature", "residual", "bonus")
RUNS = 20_000


def run(target: Tensor, draft: Tensor, fault: str = "", seed: int = 0) -> list[Tensor]:
    """The tokens that many steps emit, by position; fewer at later ones.

    target: [chain + 1, vocab], of every prefix alike.  draft: [chain, vocab].
    """
    generator = torch.Generator().manual_seed(seed)
    length = draft.shape[0]
    drawn_from = (draft.log() / 1.5).softmax(-1) if fault == "temperature" else draft
    chain = sample(drawn_from.expand(RUNS, -1, -1), torch.rand(RUNS, length, generator=generator))
    targets, drafts = target.expand(RUNS, -1, -1), draft.expand(RUNS, -1, -1)
    lengths = torch.full((RUNS,), length)
    passes = accepts_sampled(targets, drafts, chain, torch.rand(RUNS, length, generator=generator))
    num_kept, uniforms = kept(passes, lengths), torch.rand(RUNS, generator=generator)
    following = next_sampled(targets, drafts, lengths, num_kept, uniforms)
    if fault == "residual":
        following = sample(targets[torch.arange(RUNS), num_kept], uniforms)
    if fault == "bonus":
        following = torch.where(num_kept == length, sample(drafts[:, -1], uniforms), following)
    emitted = torch.cat([chain, torch.zeros(RUNS, 1, dtype=torch.long)], dim=1)
    emitted[torch.arange(RUNS), num_kept] = following
    return [emitted[num_kept >= position, position] for position in range(length + 1)]
