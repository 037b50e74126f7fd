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
from adaptive_spec.learning.checkpoint import (
    Checkpoint,
    Position,
    optimiser_tensors,
    read_checkpoint,
    restore_optimiser,
    write_checkpoint,
)
from adaptive_spec.learning.emphasis import is_even, token_weights
from adaptive_spec.learning.evaluate import means_over_tokens
from adaptive_spec.learning.losses import bucketed_log_probs, distillation_loss, overlap
from adaptive_spec.learning.memory import peak_memory_bytes
from adaptive_spec.learning.replay import replayed
from adaptive_spec.learning.teacher import Teacher
from adaptive_spec.learning.throughput import bare_seconds
from adaptive_spec.releases.adapter import load_adapter_delta
from adaptive_spec.settings import LearningSettings

Progress = Callable[[dict[str, Any]], float | None]
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
    acceptance_length_before: float  # of greedy steps on the held-out traces
    acceptance_length_after: float
    tokens_per_second: float  # of training, all its loading, losses and records included, evaluations left out
    bare_tokens_per_second: float  # of forward and backward alone, on one batch at the start of each epoch
    history: tuple[dict[str, float], ...]

    @property
    def throughput_share(self) -> float:
        """Of the bare rate, what training reached; 0 when it made no step."""
        return self.tokens_per_second / self.bare_tokens_per_second if self.bare_tokens_per_second else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return what the database and the API show."""
        return {**asdict(self), "throughput_share": self.throughput_share}


def distil(
    draft: PreTrainedModel,
    traces: Sequence[Trace],
    held_out: Sequence[Trace],
    settings: LearningSettings,
    progress: Progress,
    parent_adapter: Path | None = None,
    folder: Path | None = None,
    older: Sequence[Trace] = (),
    teacher: Teacher | None = None,
) -> tuple[PeftModel, DistilReport]:
    """Train an adapter on ``traces`` and return it at its best epoch on ``held_out``.

    The draft is wrapped in place: use the returned model from here on.  A run that goes on from a checkpoint ends with
    the same adapter as one that nothing interrupted, bit for bit on one machine, unless the time limit ends it.

    Args:
        progress: called after every optimiser step with phase, step, steps, loss, held_out_agreement,
            held_out_acceptance_length, tokens_per_second and seconds_left.  Returns the seconds that it has paused
            the run, if any: they do not count.
        parent_adapter: folder of the adapter to continue from; it may have another rank.
        folder: where checkpoints are left, and where the one that is there is gone on from, with the same traces and
            settings; None: no checkpoints.
        older: traces of which each epoch replays some beside ``traces``: ``learning.replay_share`` of its tokens.
        teacher: computes the target's distributions anew; None: those of the traces.

    Raises:
        NotEnoughDataError: no trace to train on or none to evaluate on.
        ReleaseError: the parent adapter does not fit.
        RunError: the loss is no longer finite.
    """
    run = Distillation(draft, traces, held_out, settings, progress, parent_adapter, folder, older, teacher)
    stopped = run.train()
    return run.model, run.report(stopped)


class Distillation:
    """One run: the model, the optimiser, the position in the plan, the clock and the best weights so far.

    ``distil`` trains it to its end; the benchmark of training takes its steps by itself: ``begin``, ``plan``, ``step``.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        traces: Sequence[Trace],
        held_out: Sequence[Trace],
        settings: LearningSettings,
        progress: Progress,
        parent_adapter: Path | None,
        folder: Path | None,
        older: Sequence[Trace],
        teacher: Teacher | None = None,
    ) -> None:
        self.teacher = teacher
        self.older = [trace for trace in older if completion_length(trace) > 0]
        self.traces = [trace for trace in traces if completion_length(trace) > 0]
        self.held_out = [trace for trace in held_out if completion_length(trace) > 0]
        if not self.traces or not self.held_out:
            raise NotEnoughDataError("No traces to train on or none held out. Serve more requests, then retrain.")
        torch.manual_seed(settings.seed)
        self.draft, self.settings, self.progress, self.folder = draft, settings, progress, folder
        saved = read_checkpoint(folder) if folder is not None else None
        self.model = _wrap(draft, settings, parent_adapter if saved is None else None)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimiser = torch.optim.AdamW(
            self.trained, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.steps = settings.max_epochs * len(self.plan(1))
        self.at, self.best_weights = Position(), _weights(self.model)
        if saved is not None:
            self._restore(saved)
        self.saved = self.ticked = time.monotonic()

    def train(self) -> str:
        """Train until a stop rule holds, put the best weights back, and say which rule it was."""
        self.begin()
        stopped = self._stop_rule()
        while stopped is None:
            finished = self._epoch()
            stopped = self._stop_rule() if finished else "time_limit"
        set_peft_model_state_dict(self.model, self.best_weights)
        self.model.eval()
        return stopped

    def begin(self) -> None:
        """Warm up and judge the start, unless the run goes on from a checkpoint."""
        if not self.at.history:
            bare_seconds(self.draft, make_batch(self.plan(1)[0][0], self.draft.device))
            self._evaluate()

    def report(self, stopped: str) -> DistilReport:
        first, best = self.at.history[0], self.at.history[self.at.best_epoch]
        return DistilReport(
            num_traces=len(self.traces),
            num_held_out=len(self.held_out),
            num_tokens=sum(completion_length(trace) for trace in self.traces),
            steps=self.at.step,
            best_epoch=self.at.best_epoch,
            stopped=stopped,
            seconds=self.at.seconds,
            agreement_before=first["agreement"],
            agreement_after=best["agreement"],
            overlap_before=first["overlap"],
            overlap_after=best["overlap"],
            acceptance_length_before=first["acceptance_length"],
            acceptance_length_after=best["acceptance_length"],
            tokens_per_second=self.at.tokens / max(self.at.training_seconds, 1e-9),
            bare_tokens_per_second=self.at.bare_tokens / max(self.at.bare_seconds, 1e-9),
            history=tuple(self.at.history),
        )

    def _stop_rule(self) -> str | None:
        if self.at.epochs - self.at.best_epoch >= _PATIENCE:
            return "early"
        if self.at.epochs >= self.settings.max_epochs:
            return "max_epochs"
        return "time_limit" if self.at.seconds >= self.settings.time_limit_seconds else None

    def _epoch(self) -> bool:
        """Finish the epoch under way and judge it.  Returns False when time ran out before its end."""
        at = self.at
        self.model.train()
        steps = self.plan(at.epochs + 1)
        if not at.steps_of_epoch:
            at.training_seconds += self._tick()
            self._measure_bare(steps[0][0])
        while at.steps_of_epoch < len(steps) and at.seconds < self.settings.time_limit_seconds:
            self.step(steps[at.steps_of_epoch])
        finished = at.steps_of_epoch == len(steps)
        loss = at.loss_sum / at.steps_of_epoch if at.steps_of_epoch else None
        at.epochs, at.steps_of_epoch, at.loss_sum = at.epochs + 1, 0, 0.0
        self._evaluate(loss)
        return finished

    def _measure_bare(self, traces: Sequence[Trace]) -> None:
        """Time the model alone now and then, so that both rates are of the same hours of a machine that others use."""
        batch = make_batch(traces, self.draft.device)
        self.at.bare_seconds += bare_seconds(self.draft, batch)
        self.at.bare_tokens += batch.num_tokens
        self._tick()

    def plan(self, epoch: int) -> list[list[list[Trace]]]:
        """The batches of each optimiser step of an epoch, which hangs on nothing but the seed."""
        seed = self.settings.seed + epoch
        again = replayed(self.older, self.traces, self.settings.replay_share or 0.0, seed)
        batches = plan([*self.traces, *again], self.settings.batch_tokens, seed)
        return [batches[at : at + self.settings.accumulate] for at in range(0, len(batches), self.settings.accumulate)]

    def step(self, batches: Sequence[Sequence[Trace]]) -> None:
        """Take one optimiser step, with everything that belongs to it: batches, losses, clock, progress, checkpoint."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.learning_rate * self._rate()
        num_tokens = sum(completion_length(trace) for traces in batches for trace in traces)
        loss = 0.0
        for traces in batches:
            batch = make_batch(traces, self.draft.device, self.teacher)
            loss += _backward(self.draft, batch, self.settings, num_tokens)
        if not math.isfinite(loss):
            raise RunError("The loss is no longer finite. Lower learning.learning_rate and retrain.")
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        at = self.at
        at.step += 1
        at.steps_of_epoch += 1
        at.loss_sum += loss
        at.tokens += num_tokens
        if time.monotonic() - self.saved >= self.settings.checkpoint_seconds > 0:
            self._save()
        at.training_seconds += self._tick()
        self._tell(loss)

    def _rate(self) -> float:
        """Warm-up, then a cosine to 5 % that ends with the steps or with the time, whichever comes first."""
        done = max(self.at.step / self.steps, self.at.seconds / self.settings.time_limit_seconds)
        return min((self.at.step + 1) / _WARMUP_STEPS, 0.05 + 0.95 * (1 + math.cos(math.pi * min(done, 1))) / 2)

    def _tell(self, loss: float) -> None:
        at = self.at
        left = at.seconds / at.step * (self.steps - at.step)
        paused = self.progress(
            {
                "phase": "distil",
                "step": at.step,
                "steps": self.steps,
                "loss": loss,
                "held_out_agreement": at.history[-1]["agreement"],
                "held_out_acceptance_length": at.history[-1]["acceptance_length"],
                "tokens_per_second": at.tokens / max(at.seconds, 1e-9),
                "seconds_left": max(0.0, min(left, self.settings.time_limit_seconds - at.seconds)),
            }
        )
        self.ticked += paused or 0.0

    def _evaluate(self, loss: float | None = None) -> None:
        """Score the held-out traces, all tokens alike, and keep the weights if no epoch was better."""
        at = self.at
        scores = means_over_tokens(self.draft, self.held_out)
        self._tick()
        row = {"epoch": at.epochs, **scores, "seconds": at.seconds, "peak_memory_bytes": peak_memory_bytes() or 0}
        at.history.append(row if loss is None else {**row, "loss": loss})
        if row["agreement"] > at.history[at.best_epoch]["agreement"]:
            at.best_epoch, self.best_weights = at.epochs, _weights(self.model)
        if self.settings.checkpoint_seconds:
            self._save()

    def _tick(self) -> float:
        """Count the seconds since the last call as work, and return them."""
        now = time.monotonic()
        passed, self.ticked = now - self.ticked, now
        self.at.seconds += passed
        return passed

    def _save(self) -> None:
        if self.folder is None:
            return
        state = optimiser_tensors(self.optimiser)
        write_checkpoint(self.folder, Checkpoint(self.at, _weights(self.model), self.best_weights, state))
        self.saved = time.monotonic()

    def _restore(self, saved: Checkpoint) -> None:
        set_peft_model_state_dict(self.model, dict(saved.adapter))
        restore_optimiser(self.optimiser, saved.optimiser)
        self.at, self.best_weights = saved.position, dict(saved.best)


def _backward(draft: PreTrainedModel, batch: Batch, settings: LearningSettings, num_tokens: int) -> float:
    """Accumulate gradients and return the batch's part of the mean loss over ``num_tokens``.

    Weights see the tokens of one slice of the head: a would-be chain that crosses into the next one ends there.
    """
    even, places, argmax = is_even(settings), batch.places, batch.target_argmax

    def loss_of_slice(logits: Tensor, part: slice) -> Tensor:
        ours = bucketed_log_probs(logits, batch.top_ids[part])
        loss = distillation_loss(settings.loss, batch.target_log_probs[part], ours)
        chosen = ours.gather(-1, batch.argmax_column[part].unsqueeze(-1)).squeeze(-1)
        loss = loss - settings.cross_entropy_weight * chosen
        if even:
            return loss
        with torch.no_grad():
            accepted = overlap(batch.target_log_probs[part], ours)
            agrees = logits.argmax(-1) == argmax[part]
            weights = token_weights(settings, accepted, agrees, chosen.exp(), places[part])
        return loss * weights

    return backward_in_slices(draft, judged_hidden(draft, batch), loss_of_slice, num_tokens)


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
