"""Heal a draft that was cut out of its target: distil the target into it on text the target writes by itself.

An instruct model that sees only the opening of a user turn writes a plausible user turn, then answers it (Magpie,
arXiv 2406.08464): no prompts are needed, and the text is what serving will ask of the draft.  Texts that match
``exclude`` are dropped, so that a domain can be kept unseen.  Called by ``models cut-draft`` and ``make draft``.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.errors import ModelError
from adaptive_spec.learning.losses import bucketed_log_probs, distillation_loss, overlap, with_tail

Progress = Callable[[dict[str, Any]], None]
_MOST_FRUITLESS = 20  # batches without a usable text before giving up


@dataclass(frozen=True, slots=True)
class HealSettings:
    """The recipe.  Everything that decides the result is here."""

    num_tokens: int = 200_000
    steps: int = 600
    rows: int = 96
    user_tokens: int = 48
    answer_tokens: int = 160
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    loss: str = "lk_hybrid"
    top_k: int = 64
    exclude: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Self-written texts with the target's sparse distribution of every next token.

    Lists over texts: tokens [length], next_ids and next_log_probs [length, top_k], tail_mass [length].
    """

    tokens: list[Tensor]
    next_ids: list[Tensor]
    next_log_probs: list[Tensor]
    tail_mass: list[Tensor]

    @property
    def num_tokens(self) -> int:
        return sum(len(row) for row in self.tokens)


@torch.inference_mode()
def write_corpus(target: PreTrainedModel, tokenizer: Any, settings: HealSettings, progress: Progress) -> Corpus:
    """Let the target write conversations until ``num_tokens`` are kept.

    Raises:
        ModelError: the target writes nothing that can be kept.
    """
    torch.manual_seed(settings.seed)
    corpus = Corpus([], [], [], [])
    opening, answer = _template_parts(tokenizer)
    excluded = [re.compile(pattern, re.IGNORECASE) for pattern in settings.exclude]
    started, dropped, batch, fruitless = time.monotonic(), 0, 0, 0
    while corpus.num_tokens < settings.num_tokens:
        temperature = settings.temperatures[batch % len(settings.temperatures)]
        texts = _conversations(target, tokenizer, opening, answer, temperature, settings)
        kept = [row for row in texts if not _unwanted(tokenizer.decode(row), excluded)]
        dropped += len(texts) - len(kept)
        fruitless = 0 if kept else fruitless + 1
        if fruitless == _MOST_FRUITLESS:
            raise ModelError(
                f"The target wrote {fruitless} batches without one usable conversation ({dropped} excluded). "
                "Raise user_tokens or relax the exclude patterns."
            )
        _append_targets(target, kept, corpus, settings)
        batch += 1
        progress(
            {
                "phase": "write",
                "tokens": corpus.num_tokens,
                "of": settings.num_tokens,
                "texts": len(corpus.tokens),
                "dropped": dropped,
                "tokens_per_second": corpus.num_tokens / (time.monotonic() - started),
            }
        )
    return corpus


def train(
    draft: PreTrainedModel, corpus: Corpus, settings: HealSettings, progress: Progress, checkpoint: Callable[[], None]
) -> list[dict[str, float]]:
    """Distil ``corpus`` into the draft's own layers; embeddings and head stay the target's.

    Every twentieth text is held out.  Returns one record per evaluation: step, seconds, agreement, overlap, loss.
    """
    torch.manual_seed(settings.seed)
    trained = [p for name, p in draft.named_parameters() if not name.startswith(("model.embed_tokens", "lm_head"))]
    for parameter in draft.parameters():
        parameter.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(trained, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, settings.learning_rate, total_steps=settings.steps + 1, pct_start=0.05
    )
    held_out = list(range(0, len(corpus.tokens), 20))
    batches = _batches(corpus, [i for i in range(len(corpus.tokens)) if i % 20], settings)
    started = time.monotonic()
    history: list[dict[str, float]] = [{"step": 0, "seconds": 0.0, **_evaluate(draft, corpus, held_out)}]
    for step in range(1, settings.steps + 1):
        draft.train()
        _backward(draft, corpus, next(batches), settings.loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == settings.steps:
            history.append({"step": step, "seconds": time.monotonic() - started, **_evaluate(draft, corpus, held_out)})
            checkpoint()
            progress({"phase": "train", "of": settings.steps, **history[-1]})
    draft.eval()
    return history


def _template_parts(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids before the user's words, and between them and the answer, read off the chat template."""
    marker = "\u2402"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], add_generation_prompt=True, tokenize=False
    )
    before, after = text.split(marker)
    return (
        tokenizer.encode(before, add_special_tokens=False),
        tokenizer.encode(after, add_special_tokens=False),
    )


def _conversations(
    target: PreTrainedModel,
    tokenizer: Any,
    opening: list[int],
    answer: list[int],
    temperature: float,
    settings: HealSettings,
) -> list[list[int]]:
    end = tokenizer.eos_token_id
    prompts = torch.tensor([opening] * settings.rows, device=target.device)
    users = _generate(target, prompts, torch.ones_like(prompts), settings.user_tokens, 1.0, end)
    turns: list[list[int]] = [row[: row.index(end)] for row in users.tolist() if end in row]
    questions = [[*opening, *row, *answer] for row in turns if row]
    if not questions:
        return []
    width = max(map(len, questions))
    padded = torch.tensor([[end] * (width - len(row)) + row for row in questions], device=target.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in questions], device=target.device)
    replies = _generate(target, padded, mask, settings.answer_tokens, temperature, end).tolist()
    cut = [row[: row.index(end) + 1] if end in row else row for row in replies]
    return [question + reply for question, reply in zip(questions, cut, strict=True)]


def _generate(
    target: PreTrainedModel, ids: Tensor, mask: Tensor, new_tokens: int, temperature: float, end: int
) -> Tensor:
    sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.98} if temperature else {"do_sample": False}
    output = target.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, eos_token_id=end, pad_token_id=end, **sampling
    )
    return output[:, ids.shape[1] :]


def _unwanted(text: str, excluded: list[re.Pattern[str]]) -> bool:
    words = text.split()
    loops = len(words) > 40 and len(set(words)) < len(words) / 4
    return loops or any(pattern.search(text) for pattern in excluded)


def _append_targets(target: PreTrainedModel, rows: list[list[int]], corpus: Corpus, settings: HealSettings) -> None:
    for start in range(0, len(rows), 8):
        chunk = rows[start : start + 8]
        padded, mask = _pad(chunk)
        hidden = target.model(padded.to(target.device), attention_mask=mask.to(target.device)).last_hidden_state
        for index, row in enumerate(chunk):
            log_probs = target.lm_head(hidden[index, : len(row)]).float().log_softmax(-1)
            top = log_probs.topk(settings.top_k, dim=-1)
            corpus.tokens.append(torch.tensor(row, dtype=torch.int32))
            corpus.next_ids.append(top.indices.to(torch.int32).cpu())
            corpus.next_log_probs.append(top.values.half().cpu())
            corpus.tail_mass.append((1 - top.values.exp().sum(-1)).clamp_min(0).cpu())


def _pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return padded, mask


def _batches(corpus: Corpus, indices: list[int], settings: HealSettings) -> Iterator[list[int]]:
    """Endless shuffled batches of texts of like length, about ``batch_tokens`` each."""
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        order = torch.randperm(len(indices), generator=generator).tolist()
        noisy = sorted(order, key=lambda i: len(corpus.tokens[indices[i]]) // 32)
        batches: list[list[int]] = [[]]
        for i in noisy:
            if sum(len(corpus.tokens[j]) for j in batches[-1]) >= settings.batch_tokens:
                batches.append([])
            batches[-1].append(indices[i])
        for position in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[position]


def _forward(draft: PreTrainedModel, corpus: Corpus, indices: list[int]) -> tuple[Tensor, Tensor]:
    """Bucketed log-probs of target and draft, [tokens, top_k + 1] each, over all tokens of the texts."""
    padded, mask = _pad([corpus.tokens[i].tolist() for i in indices])
    with torch.autocast(draft.device.type, torch.bfloat16):
        hidden = draft.model(padded.to(draft.device), attention_mask=mask.to(draft.device)).last_hidden_state
        logits = draft.lm_head(hidden[mask.bool()])
    ids, target = _targets(corpus, indices, draft.device)
    return target, bucketed_log_probs(logits, ids)


def _backward(draft: PreTrainedModel, corpus: Corpus, indices: list[int], loss_name: str) -> None:
    """Accumulate gradients.  The head runs in slices, so that [tokens, vocab] never exists at once."""
    padded, mask = _pad([corpus.tokens[i].tolist() for i in indices])
    ids, target = _targets(corpus, indices, draft.device)
    with torch.autocast(draft.device.type, torch.bfloat16):
        output = draft.model(padded.to(draft.device), attention_mask=mask.to(draft.device))
    hidden = output.last_hidden_state[mask.bool()]
    leaf = hidden.detach().requires_grad_(True)
    head = draft.lm_head.weight.detach().to(torch.bfloat16)
    for start in range(0, len(leaf), 256):
        part = slice(start, start + 256)
        ours = bucketed_log_probs(leaf[part].to(torch.bfloat16) @ head.T, ids[part])
        (distillation_loss(loss_name, target[part], ours).sum() / len(leaf)).backward()
    hidden.backward(leaf.grad)


def _targets(corpus: Corpus, indices: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.cat([corpus.next_ids[i] for i in indices]).long().to(device)
    log_probs = torch.cat([corpus.next_log_probs[i] for i in indices]).to(device)
    return ids, with_tail(log_probs, torch.cat([corpus.tail_mass[i] for i in indices]).to(device))


@torch.no_grad()
def _evaluate(draft: PreTrainedModel, corpus: Corpus, held_out: list[int]) -> dict[str, float]:
    draft.eval()
    agree, shared, loss, tokens = 0.0, 0.0, 0.0, 0
    for start in range(0, len(held_out), 8):
        indices = held_out[start : start + 8]
        target, ours = _forward(draft, corpus, indices)
        agree += (ours[:, :-1].argmax(-1) == 0).float().sum().item()
        shared += overlap(target, ours).sum().item()
        loss += distillation_loss("kl", target, ours).sum().item()
        tokens += len(target)
    return {"agreement": agree / tokens, "overlap": shared / tokens, "kl_nats": loss / tokens}


def save_corpus(corpus: Corpus, path: Path) -> None:
    """Write the corpus as one safetensors file."""
    lengths = torch.tensor([len(row) for row in corpus.tokens])
    save_file(
        {
            "lengths": lengths,
            "tokens": torch.cat(corpus.tokens),
            "next_ids": torch.cat(corpus.next_ids),
            "next_log_probs": torch.cat(corpus.next_log_probs),
            "tail_mass": torch.cat(corpus.tail_mass),
        },
        path,
    )


def load_corpus(path: Path) -> Corpus:
    """Read what ``save_corpus`` wrote."""
    data = load_file(path)
    lengths = data["lengths"].tolist()
    parts = [list(data[name].split(lengths)) for name in ("tokens", "next_ids", "next_log_probs", "tail_mass")]
    return Corpus(*parts)
