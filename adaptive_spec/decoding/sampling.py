"""What the requests of a batch make of logits: penalties, processing, and the uniforms they draw with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from adaptive_spec.decoding.slot import Slot
from adaptive_spec.verification.distribution import Processing, penalised_logits
from adaptive_spec.verification.transfer import on_device


def penalised(slots: list[Slot], logits: Tensor, chain: Tensor, first: int) -> Tensor:
    """Apply each row's penalties.

    Args:
        logits: [rows, positions, vocab], of chain positions ``first`` ….
        chain: [rows, …], the tokens drafted so far.

    Returns:
        The same tensor when no row penalises, else a new one.
    """
    concerned = [row for row, slot in enumerate(slots) if slot.request.params.penalises]
    if not concerned:
        return logits
    logits = logits.float().clone()
    for row in concerned:
        slot, drafted = slots[row], chain[row].tolist()
        params = slot.request.params
        prompt, output = slot.tokens[: slot.prompt_tokens], slot.tokens[slot.prompt_tokens :]
        for position in range(logits.shape[1]):
            logits[row, position] = penalised_logits(
                logits[row, position],
                prompt,
                output + drafted[: first + position],
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
    return logits


@dataclass(slots=True)
class Sampling:
    """How the rows of one step sample, and the uniforms they do it with.

    Every request draws the same number of them in a step, from its own stream, whatever its neighbours do.

    draft: [rows, longest], to draw the chain; accept: [rows, longest], to verify it; after: [rows], for the token that
    comes after it.
    """

    processing: Processing
    draft: Tensor
    accept: Tensor
    after: Tensor


def sampling_of(slots: list[Slot], longest: int, device: torch.device) -> Sampling | None:
    """Draw for chains of up to ``longest`` tokens; None when every row is greedy."""
    params = [slot.request.params for slot in slots]
    if all(p.greedy for p in params):
        return None
    drawn = [[slot.random.random() for _ in range(2 * longest + 1)] for slot in slots]
    table = on_device(drawn, device, torch.float32)
    return Sampling(
        Processing.of(params, device), table[:, :longest], table[:, longest : 2 * longest], table[:, 2 * longest]
    )
