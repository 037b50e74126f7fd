"""Cut a draft and heal it, at once or later.  Called by ``models cut-draft``, ``models heal`` and ``make draft``.

The corpus the target wrote is kept beside the draft, so that a run that was interrupted trains without writing again.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.core import Trace
from adaptive_spec.healing.corpus import load_corpus, save_corpus, write_corpus
from adaptive_spec.healing.recipe import Recipe
from adaptive_spec.learning.batches import backward_in_slices, completion_length, judged_hidden, make_batch, plan
from adaptive_spec.learning.evaluate import means_over_tokens
from adaptive_spec.learning.losses import bucketed_log_probs, distillation_loss
from adaptive_spec.models.draft import CutDraft, cut_draft, load_cut_draft, read_description, save_draft
from adaptive_spec.models.loading import ModelPair, load_target, pair_of

Progress = Callable[[dict[str, Any]], None]
_EVALUATE_EVERY = 50  # steps
_HELD_OUT_EVERY = 20  # conversations


def cut(target: str, layers: list[int], out: Path) -> None:
    """Write a draft of ``layers`` of ``target`` into ``out`` as it is; ``heal`` makes it useful.

    Raises:
        ModelError: a target that does not load or has no such layers.
    """
    model, _ = load_target(target)
    save_draft(cut_draft(model, layers), out, _described(target, layers, model))


def cut_and_heal(target: str, layers: list[int], out: Path, recipe: Recipe, progress: Progress) -> None:
    """Write a healed draft of ``layers`` of ``target`` into ``out``; checkpoints replace it as training goes on.

    Raises:
        ModelError: a target that does not load, has no such layers or writes nothing that can be kept.
    """
    model, tokenizer = load_target(target)
    pair = pair_of(model, cut_draft(model, layers), tokenizer, target)
    _heal(pair, _described(target, layers, model), out, recipe, progress)


def heal(folder: Path, recipe: Recipe, progress: Progress, target: str | None = None) -> None:
    """Heal the cut draft in ``folder``, in place; one that was healed before, or in part, is healed further.

    Args:
        target: what it was cut from, where its description names a place that is no more.

    Raises:
        ModelError: no readable draft, or as of ``cut_and_heal``.
    """
    description = read_description(folder)
    description = replace(description, target=target or description.target)
    model, tokenizer = load_target(description.target)
    pair = pair_of(model, load_cut_draft(folder, model), tokenizer, description.target)
    _heal(pair, description, folder, recipe, progress)


def _described(target: str, layers: list[int], model: PreTrainedModel) -> CutDraft:
    return CutDraft(target, layers, model.config.vocab_size, model.config.hidden_size)


def _heal(pair: ModelPair, description: CutDraft, out: Path, recipe: Recipe, progress: Progress) -> None:
    """Write a corpus if there is none, train, and note the recipe; an earlier one is kept under ``continues``."""
    out.mkdir(parents=True, exist_ok=True)
    corpus_path = out / "corpus.safetensors"
    if not corpus_path.exists():
        corpus = write_corpus(pair, recipe, progress)
        partial = corpus_path.with_suffix(".partial")
        save_corpus(corpus, partial)
        partial.rename(corpus_path)
    corpus = load_corpus(corpus_path)
    noted = asdict(recipe) | ({"continues": description.recipe} if description.recipe else {})
    description = replace(description, recipe=noted)
    history = train(pair.draft, corpus, recipe, progress, lambda: save_draft(pair.draft, out, description))
    written = sum(map(completion_length, corpus))
    figures = {"num_turns": len(corpus), "num_tokens_written": written, "history": history}
    save_draft(pair.draft, out, replace(description, recipe={**noted, **figures}))


def train(
    draft: PreTrainedModel,
    corpus: Sequence[Trace],
    recipe: Recipe,
    progress: Progress,
    checkpoint: Callable[[], None],
) -> list[dict[str, float]]:
    """Distil ``corpus`` into the draft's own layers; embeddings and head stay the target's.

    Every twentieth conversation is held out.  Returns one record per evaluation: step, seconds and means over tokens.
    """
    torch.manual_seed(recipe.seed)
    trained = [p for name, p in draft.named_parameters() if not name.startswith(("model.embed_tokens", "lm_head"))]
    for parameter in draft.parameters():
        parameter.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(trained, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=recipe.steps + 1, pct_start=0.05
    )
    held_out = [trace for index, trace in enumerate(corpus) if index // 2 % _HELD_OUT_EVERY == 0]
    groups = _endless([trace for index, trace in enumerate(corpus) if index // 2 % _HELD_OUT_EVERY], recipe)
    started = time.monotonic()
    history: list[dict[str, float]] = [{"step": 0, "seconds": 0.0, **means_over_tokens(draft, held_out)}]
    for step in range(1, recipe.steps + 1):
        draft.train()
        _backward(draft, next(groups), recipe.loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        if step % _EVALUATE_EVERY == 0 or step == recipe.steps:
            history.append({"step": step, "seconds": time.monotonic() - started, **means_over_tokens(draft, held_out)})
            checkpoint()
            progress({"phase": "train", "of": recipe.steps, **history[-1]})
    draft.eval()
    return history


def _endless(traces: Sequence[Trace], recipe: Recipe) -> Iterator[list[Trace]]:
    for epoch in itertools.count():
        yield from plan(traces, recipe.batch_tokens, recipe.seed + epoch)


def _backward(draft: PreTrainedModel, group: Sequence[Trace], loss_name: str) -> None:
    batch = make_batch(group, draft.device)

    def loss_of_slice(logits: Tensor, part: slice) -> Tensor:
        ours = bucketed_log_probs(logits, batch.top_ids[part])
        return distillation_loss(loss_name, batch.target_log_probs[part], ours)

    backward_in_slices(draft, judged_hidden(draft, batch), loss_of_slice)
