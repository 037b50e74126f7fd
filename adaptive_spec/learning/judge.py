"""Judge a candidate on held-out traces: scores for the gate, observations for the calibration.

Runs in the child process of a training run and writes one JSON file; the pipeline reads it.  A greedy replay shows
exactly the positions that serving would have reached, so its outcomes are conditioned on reach like live ones.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaptive_spec.learning.evaluate import JudgedTrace, TraceScore, replay
from adaptive_spec.learning.heat import HeatFit
from adaptive_spec.records.observations import Observations

JUDGEMENT_NAME = "judgement.json"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The live release and the candidate on the same held-out traces, and what the candidate would show.

    heats: the candidate's sampling temperatures, by domain and pooled.
    """

    before: list[TraceScore]
    after: list[TraceScore]
    observations: dict[str, Observations]
    heats: Mapping[str, HeatFit]


def replay_observations(judged: Sequence[JudgedTrace], chain_length: int) -> dict[str, Observations]:
    """Return by domain what full-length chains of the judged draft would have shown on recorded text."""
    reached: dict[str, list[tuple[int, float, bool, int]]] = {}
    for request_index, row in enumerate(judged):
        rows = reached.setdefault(row.trace.domain, [])
        for start, accepted in replay(row.agrees, chain_length):
            end = min(start + accepted + 1, start + chain_length, len(row.agrees))
            rows.extend((at - start, row.confidence[at], row.agrees[at], request_index) for at in range(start, end))
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
        "heats": {domain: asdict(fit) for domain, fit in judgement.heats.items()},
    }
    (folder / JUDGEMENT_NAME).write_text(json.dumps(described), encoding="utf-8")


def read_judgement(folder: Path) -> Judgement:
    """Read what ``write_judgement`` wrote."""
    described = json.loads((folder / JUDGEMENT_NAME).read_text(encoding="utf-8"))
    kinds = {"position": np.int64, "request_index": np.int64, "accepted": np.bool_, "explored": np.bool_}
    return Judgement(
        [_score(values) for values in described["before"]],
        [_score(values) for values in described["after"]],
        {
            domain: Observations(
                **{name: np.asarray(values, dtype=kinds.get(name, np.float64)) for name, values in columns.items()}
            )
            for domain, columns in described["observations"].items()
        },
        {domain: HeatFit(**fit) for domain, fit in described["heats"].items()},
    )


def _score(values: dict[str, Any]) -> TraceScore:
    return TraceScore(**{**values, "agrees": tuple(values["agrees"]), "confidence": tuple(values["confidence"])})


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
        request_temperature=np.zeros(len(accepted)),
    )
