"""Judge a candidate on held-out traces: scores for the gate, observations for the calibration.

Runs in the child process of a training run and writes one JSON file; the pipeline reads it.  A greedy replay shows
exactly the positions that serving would have reached, so its outcomes are conditioned on reach like live ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.core import Trace
from adaptive_spec.learning.batches import HEAD_ROWS, head_logits, judged_hidden, make_batch, plan
from adaptive_spec.learning.evaluate import TraceScore
from adaptive_spec.records.observations import Observations

JUDGEMENT_NAME = "judgement.json"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The live release and the candidate on the same held-out traces, and what the candidate would show."""

    before: list[TraceScore]
    after: list[TraceScore]
    observations: dict[str, Observations]


@contextmanager
def merged(draft: PreTrainedModel, deltas: Mapping[str, Tensor]) -> Iterator[None]:
    """Run a block with the draft's weights at base + deltas; the base comes back bit for bit."""
    parameters = dict(draft.named_parameters())
    base = {name: parameters[name].detach().clone() for name in deltas}
    with torch.no_grad():
        for name, delta in deltas.items():
            parameters[name].add_(delta.to(parameters[name]))
        try:
            yield
        finally:
            for name, value in base.items():
                parameters[name].copy_(value)


def replay_observations(
    draft: PreTrainedModel, traces: Sequence[Trace], chain_length: int, batch_tokens: int = 2048
) -> dict[str, Observations]:
    """Return by domain what full-length chains of this draft would have shown on recorded text."""
    training = draft.training
    draft.eval()
    reached: dict[str, list[tuple[int, float, bool, int]]] = {}
    for request_index, (trace, confidences, agrees) in enumerate(_judged(draft, traces, batch_tokens)):
        rows = reached.setdefault(trace.domain, [])
        rows.extend((*row, request_index) for row in _replay(confidences, agrees, chain_length))
    draft.train(training)
    return {domain: _observations(rows) for domain, rows in reached.items()}


def write_judgement(judgement: Judgement, folder: Path) -> None:
    """Write ``judgement.json``."""
    described: dict[str, Any] = {
        "before": [asdict(score) for score in judgement.before],
        "after": [asdict(score) for score in judgement.after],
        "observations": {
            domain: {name: values.tolist() for name, values in asdict(observed).items()}
            for domain, observed in judgement.observations.items()
        },
    }
    (folder / JUDGEMENT_NAME).write_text(json.dumps(described), encoding="utf-8")


def read_judgement(folder: Path) -> Judgement:
    """Read what ``write_judgement`` wrote."""
    described = json.loads((folder / JUDGEMENT_NAME).read_text(encoding="utf-8"))
    kinds = {"position": np.int64, "request_index": np.int64, "accepted": np.bool_, "explored": np.bool_}
    return Judgement(
        [TraceScore(**score) for score in described["before"]],
        [TraceScore(**score) for score in described["after"]],
        {
            domain: Observations(
                **{name: np.asarray(values, dtype=kinds.get(name, np.float64)) for name, values in columns.items()}
            )
            for domain, columns in described["observations"].items()
        },
    )


def _replay(confidences: Sequence[float], agrees: Sequence[bool], chain_length: int) -> list[tuple[int, float, bool]]:
    """(position in chain, confidence, accepted) of every position a greedy decoder would have reached."""
    rows: list[tuple[int, float, bool]] = []
    at = 0
    while at < len(agrees):
        for position in range(chain_length):
            if at + position >= len(agrees):
                break
            rows.append((position, confidences[at + position], agrees[at + position]))
            if not agrees[at + position]:
                break
        accepted = next((i for i in range(chain_length) if at + i >= len(agrees) or not agrees[at + i]), chain_length)
        at += accepted + 1
    return rows


def _observations(rows: list[tuple[int, float, bool, int]]) -> Observations:
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    accepted = np.asarray(columns[2], dtype=np.bool_)
    return Observations(
        position=np.asarray(columns[0], dtype=np.int64),
        confidence=np.asarray(columns[1], dtype=np.float64),
        overlap=accepted.astype(np.float64),
        accepted=accepted,
        request_index=np.asarray(columns[3], dtype=np.int64),
        explored=np.ones(len(accepted), dtype=np.bool_),
    )


@torch.inference_mode()
def _judged(
    draft: PreTrainedModel, traces: Sequence[Trace], batch_tokens: int
) -> list[tuple[Trace, list[float], list[bool]]]:
    judged: list[tuple[Trace, list[float], list[bool]]] = []
    for group in plan(traces, batch_tokens):
        batch = make_batch(group, draft.device)
        hidden = judged_hidden(draft, batch)
        confidences, agrees = [], []
        for start in range(0, len(hidden), HEAD_ROWS):
            part = slice(start, start + HEAD_ROWS)
            logits = head_logits(draft, hidden[part])
            confidences.append((logits.amax(-1).float() - logits.float().logsumexp(-1)).exp())
            agrees.append(logits.argmax(-1) == batch.target_argmax[part])
        parts = zip(
            group, torch.cat(confidences).split(batch.lengths), torch.cat(agrees).split(batch.lengths), strict=True
        )
        judged.extend((trace, sure.tolist(), same.tolist()) for trace, sure, same in parts)
    return judged
