"""What the requests of a batch make of logits: penalties, processing, and the uniforms they draw with."""

import torch
from torch import Tensor

from adaptive_spec.decoding.slot import Slot
from adaptive_spec.verification.distribution import penalised_logits
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


def uniforms(slots: list[Slot], device: torch.device, count: int | None = None) -> Tensor:
    """One uniform of each request's own stream, [rows], or ``count`` of them, [rows, count]."""
    if count is None:
        return on_device([slot.random.random() for slot in slots], device)
    drawn = [[slot.random.random() for _ in range(count)] for slot in slots]
    return on_device(drawn, device, torch.float32).view(len(slots), count)
