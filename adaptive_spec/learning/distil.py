"""Distil recorded traces into a LoRA adapter of the draft.

The target is not needed: verification already paid for its distributions.  Called by ``run`` in a process of its own.
Never touches embeddings or head, which a cut draft shares with its target.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from adaptive_spec.core import Trace
from adaptive_spec.errors import NotEnoughDataError, RunError
from adaptive_spec.learning.batches import (
    Batch,
    backward_in_slices,
    completion_length,
    judged_hidden,
    make_batch,
    plan,
)
from adaptive_spec.learning.evaluate import means_over_tokens
from adaptive_spec.learning.losses import bucketed_log_probs, distillation_loss
from adaptive_spec.releases.adapter import load_adapter_delta
from adaptive_spec.settings import LearningSettings

Progress = Callable[[dict[str, Any]], None]
_PATIENCE = 2  # epochs without a better held-out agreement before the run ends
_WARMUP_STEPS = 10


@dataclass(frozen=True, slots=True)
class DistilReport:
    """What a run did.  ``history`` has one row per evaluation, epoch 0 being the model it started from."""

    num_traces: int
    num_held_out: int
    num_tokens: int  # completion tokens of the training traces
    steps: int
    best_epoch: int
    stopped: str  # max_epochs | early | time_limit
    seconds: float
    agreement_before: float
    agreement_after: float
    overlap_before: float
    overlap_after: float
    history: tuple[dict[str, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what the database and the API show."""
        return asdict(self)


def distil(
    draft: PreTrainedModel,
    traces: Sequence[Trace],
    held_out: Sequence[Trace],
    settings: LearningSettings,
    progress: Progress,
    parent_adapter: Path | None = None,
) -> tuple[PeftModel, DistilReport]:
    """Train an adapter on ``traces`` and return it at its best epoch on ``held_out``.

    The draft is wrapped in place: use the returned model from here on.

    Args:
        progress: called after every optimiser step with phase, step, steps, loss, held_out_agreement,
            tokens_per_second and seconds_left.
        parent_adapter: folder of the adapter to continue from; it may have another rank.

    Raises:
        NotEnoughDataError: no trace to train on or none to evaluate on.
        ReleaseError: the parent adapter does not fit.
        RunError: the loss is no longer finite.
    """
    run = _Run(draft, traces, held_out, settings, progress, parent_adapter)
    stopped = run.train()
    return run.model, run.report(stopped)


class _Run:
    """One run's state: the model, the optimiser, the clock and the best weights so far."""

    def __init__(
        self,
        draft: PreTrainedModel,
        traces: Sequence[Trace],
        held_out: Sequence[Trace],
        settings: LearningSettings,
        progress: Progress,
        parent_adapter: Path | None,
    ) -> None:
        self.traces = [trace for trace in traces if completion_length(trace) > 0]
        self.held_out = [trace for trace in held_out if completion_length(trace) > 0]
        if not self.traces or not self.held_out:
            raise NotEnoughDataError("No traces to train on or none held out. Serve more requests, then retrain.")
        torch.manual_seed(settings.seed)
        self.draft, self.settings, self.progress = draft, settings, progress
        self.model = _wrap(draft, settings, parent_adapter)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(
            self.trained, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.steps = settings.max_epochs * len(plan(self.traces, settings.batch_tokens, settings.seed))
        self.step = self.tokens = 0
        self.started = time.monotonic()
        self.history: list[dict[str, float]] = []
        self.best_epoch, self.best_weights = 0, _weights(self.model)

    def train(self) -> str:
        """Train until a stop rule holds, put the best weights back, and say which rule it was."""
        self._evaluate(0, math.nan)
        stopped = "max_epochs"
        for epoch in range(1, self.settings.max_epochs + 1):
            loss, finished = self._epoch(epoch)
            self._evaluate(epoch, loss)
            if not finished:
                stopped = "time_limit"
                break
            if epoch - self.best_epoch >= _PATIENCE:
                stopped = "early"
                break
        set_peft_model_state_dict(self.model, self.best_weights)
        self.model.eval()
        return stopped

    def report(self, stopped: str) -> DistilReport:
        first, best = self.history[0], self.history[self.best_epoch]
        return DistilReport(
            num_traces=len(self.traces),
            num_held_out=len(self.held_out),
            num_tokens=sum(completion_length(trace) for trace in self.traces),
            steps=self.step,
            best_epoch=self.best_epoch,
            stopped=stopped,
            seconds=self._seconds,
            agreement_before=first["agreement"],
            agreement_after=best["agreement"],
            overlap_before=first["overlap"],
            overlap_after=best["overlap"],
            history=tuple(self.history),
        )

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.started

    def _epoch(self, epoch: int) -> tuple[float, bool]:
        """One pass.  Returns the mean loss, and False when time ran out before its end."""
        self.model.train()
        losses: list[float] = []
        for group in plan(self.traces, self.settings.batch_tokens, self.settings.seed + epoch):
            if self._seconds >= self.settings.time_limit_seconds:
                return sum(losses) / len(losses) if losses else math.nan, False
            losses.append(self._step(make_batch(group, self.draft.device)))
        return sum(losses) / len(losses), True

    def _step(self, batch: Batch) -> float:
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.learning_rate * self._rate()
        loss = _backward(self.draft, batch, self.settings)
        if not math.isfinite(loss):
            raise RunError("The loss is no longer finite. Lower learning.learning_rate and retrain.")
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.num_tokens
        self._tell(loss)
        return loss

    def _rate(self) -> float:
        """Warm-up, then a cosine to 5 % that ends with the steps or with the time, whichever comes first."""
        done = max(self.step / self.steps, self._seconds / self.settings.time_limit_seconds)
        return min((self.step + 1) / _WARMUP_STEPS, 0.05 + 0.95 * (1 + math.cos(math.pi * min(done, 1))) / 2)

    def _tell(self, loss: float) -> None:
        left = self._seconds / self.step * (self.steps - self.step)
        self.progress(
            {
                "phase": "distil",
                "step": self.step,
                "steps": self.steps,
                "loss": loss,
                "held_out_agreement": self.history[-1]["agreement"],
                "tokens_per_second": self.tokens / max(self._seconds, 1e-9),
                "seconds_left": max(0.0, min(left, self.settings.time_limit_seconds - self._seconds)),
            }
        )

    def _evaluate(self, epoch: int, loss: float) -> None:
        """Score the held-out traces, all tokens alike, and keep the weights if no epoch was better."""
        row = {"epoch": epoch, **means_over_tokens(self.draft, self.held_out), "seconds": self._seconds}
        self.history.append(row if math.isnan(loss) else {**row, "loss": loss})
        if row["agreement"] > self.history[self.best_epoch]["agreement"]:
            self.best_epoch, self.best_weights = epoch, _weights(self.model)


def _backward(draft: PreTrainedModel, batch: Batch, settings: LearningSettings) -> float:
    """Accumulate gradients and return the mean loss."""

    def loss_of_slice(logits: Tensor, part: slice) -> Tensor:
        ours = bucketed_log_probs(logits, batch.top_ids[part])
        loss = distillation_loss(settings.loss, batch.target_log_probs[part], ours)
        chosen = ours.gather(-1, batch.argmax_column[part].unsqueeze(-1)).squeeze(-1)
        return loss - settings.cross_entropy_weight * chosen

    return backward_in_slices(draft, judged_hidden(draft, batch), loss_of_slice)


def _wrap(draft: PreTrainedModel, settings: LearningSettings, parent_adapter: Path | None) -> PeftModel:
    """Put a LoRA on every linear layer but the head, continuing from the parent's weights if there are any."""
    head = draft.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in draft.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    config = LoraConfig(r=settings.rank, lora_alpha=settings.rank, target_modules=sorted(linear), task_type="CAUSAL_LM")
    deltas = load_adapter_delta(parent_adapter, draft) if parent_adapter is not None else {}
    model = get_peft_model(draft, config)
    assert isinstance(model, PeftModel)
    if deltas:
        set_peft_model_state_dict(model, _factors(_weights(model), deltas))
    return model


def _factors(weights: dict[str, Tensor], deltas: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write each dense delta as the best product of the new rank; unused ranks keep their fresh start.

    ``lora_alpha`` equals the rank, so the scaling is one.
    """
    for parameter, delta in deltas.items():
        stem = "base_model.model." + parameter.removesuffix(".weight")
        down, up = weights[f"{stem}.lora_A.weight"], weights[f"{stem}.lora_B.weight"]
        left, sizes, right = torch.linalg.svd(delta, full_matrices=False)
        used = min(int((sizes > sizes[0] * 1e-6).sum()), len(down))
        root = sizes[:used].sqrt()
        down[:used] = (root[:, None] * right[:used]).to(down)
        up[:, :used] = (left[:, :used] * root).to(up)
    return weights


def _weights(model: PeftModel) -> dict[str, Tensor]:
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().clone() for name, tensor in state.items()}
