"""``adaptive-spec ablate``: what each choice of a training run is worth, on recorded traces.

One setting at a time is changed from the settings in force; every variation is trained with every seed from the
untouched draft and judged on the same held-out traces.  Each finished training is appended to a file of JSON lines, so
that a long ablation can be interrupted and continued: what the file holds is not trained again.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from transformers import PreTrainedModel

from adaptive_spec.bench.kept import append, read_kept, rewrite
from adaptive_spec.core import POOLED, Trace
from adaptive_spec.errors import NotEnoughDataError, SettingsError
from adaptive_spec.learning.distil import distil
from adaptive_spec.learning.evaluate import TraceScore, score
from adaptive_spec.learning.selection import split
from adaptive_spec.learning.teacher import Teacher
from adaptive_spec.models.loading import load_pair
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import LearningSettings, Settings

BASE = "base"
TOP_K, DOMAIN = "top_k", "domain"  # no settings of a run: of how many tokens it sees log-probs, on whose traces alone
FULL = "full"  # all tokens
Tell = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Variation:
    """One change from the settings in force; ``BASE`` is none.

    top_k: tokens of the target's distribution, or ``FULL``; None: as recorded.  domain: the only one trained on.
    """

    name: str
    learning: LearningSettings
    top_k: int | str | None = None
    domain: str | None = None


def variations(base: LearningSettings, vary: Sequence[str]) -> list[Variation]:
    """Read ``setting=value,value`` into variations, the base first.

    Raises:
        SettingsError: an unknown setting or a value that it does not take.
    """
    found = [Variation(BASE, base)]
    for entry in vary:
        name, _, values = entry.partition("=")
        for value in filter(None, values.split(",")):
            found.append(_variation(base, name.strip(), value.strip()))
    return found


def _variation(base: LearningSettings, name: str, value: str) -> Variation:
    if name == TOP_K and (value == FULL or (value.isdecimal() and int(value) > 0)):
        return Variation(f"{TOP_K}={value}", base, top_k=FULL if value == FULL else int(value))
    if name == DOMAIN:
        return Variation(f"{DOMAIN}={value}", base, domain=value)
    if name not in LearningSettings.model_fields:
        known = ", ".join(sorted({*LearningSettings.model_fields, TOP_K, DOMAIN}))
        raise SettingsError(f"{name!r} cannot be varied; choose of: {known}, as in loss=kl,tv.")
    try:
        return Variation(f"{name}={value}", LearningSettings.model_validate({**base.model_dump(), name: value}))
    except ValidationError as error:
        raise SettingsError(f"{name} does not take {value!r}: {error.errors()[0]['msg']}.") from error


def ablate(
    settings: Settings,
    database: Database,
    chosen: Sequence[Variation],
    seeds: int,
    out: Path,
    *,
    chain_length: int = 4,
    traces_per_domain: int | None = None,
    held_out_per_domain: int | None = None,
    tell: Tell = lambda title, text: None,
) -> list[dict[str, Any]]:
    """Train on a database's traces what ``out`` does not hold yet; see ``train_all``.

    Args:
        traces_per_domain, held_out_per_domain: train and judge on so many of each domain, the newest; None: all.

    Raises:
        NotEnoughDataError: no traces to train on, to stop by, or held out.
    """
    store = TraceStore(database, settings.records.folder, settings.records.held_out_share)
    traces = store.load(held_out=False, limit_per_domain=traces_per_domain)
    held_out = store.load(held_out=True, limit_per_domain=held_out_per_domain)
    needed = settings.learning.min_traces
    if len(traces) < needed or not held_out:
        raise NotEnoughDataError(
            f"{len(traces)} traces and {len(held_out)} held-out ones are on record, {needed} and 1 needed. Serve more "
            "requests."
        )
    pair = load_pair(settings.model)
    return train_all(pair.draft, traces, held_out, chosen, seeds, out, chain_length, tell, pair.target)


def train_all(
    draft: PreTrainedModel,
    traces: Sequence[Trace],
    held_out: Sequence[Trace],
    chosen: Sequence[Variation],
    seeds: int,
    out: Path,
    chain_length: int = 4,
    tell: Tell = lambda title, text: None,
    target: PreTrainedModel | None = None,
) -> list[dict[str, Any]]:
    """Train what ``out`` does not hold yet, all variations once before any twice, and return the records in order.

    target: for variations of ``top_k`` that want more than was recorded.
    """
    _check(traces, chosen, target)
    before = score(draft, held_out, chain_length)
    kept = read_kept(out)
    rewrite(out, kept)  # without a line cut short
    done = {(row["variation"], row["seed"]): row for row in kept}
    wanted = [(one, seed) for seed in range(seeds) for one in chosen]
    for number, (one, seed) in enumerate(wanted, start=1):
        if (one.name, seed) not in done:
            told = partial(_told, tell, f"{number} of {len(wanted)}: {one.name}, seed {seed}")
            row = _trained(draft, traces, held_out, one, seed, chain_length, before, told, target)
            append(out, row)
            done[one.name, seed] = row
    return [done[one.name, seed] for one, seed in wanted]


def _trained(
    draft: PreTrainedModel,
    traces: Sequence[Trace],
    held_out: Sequence[Trace],
    one: Variation,
    seed: int,
    chain_length: int,
    before: Sequence[TraceScore],
    told: Callable[[dict[str, Any]], None],
    target: PreTrainedModel | None,
) -> dict[str, Any]:
    fitted, selection = split([trace for trace in traces if one.domain in (None, trace.domain)])
    teacher = _teacher(one, fitted, target)
    seen = fitted if teacher or one.top_k is None else [cut(trace, int(one.top_k)) for trace in fitted]
    learning = one.learning.model_copy(update={"seed": seed})
    model, report = distil(copy.deepcopy(draft), seen, selection, learning, told, teacher=teacher)
    return {
        "variation": one.name,
        "seed": seed,
        "num_traces": len(fitted),
        "num_held_out": len(held_out),
        "chain_length": chain_length,
        "seconds": report.seconds,
        "steps": report.steps,
        "best_epoch": report.best_epoch,
        "stopped": report.stopped,
        "domains": _by_domain(before, score(model, held_out, chain_length)),
    }


def _teacher(one: Variation, traces: Sequence[Trace], target: PreTrainedModel | None) -> Teacher | None:
    """The target, where a variation wants to see more of it than the traces hold."""
    if target is None or one.top_k is None:
        return None
    if one.top_k == FULL:
        return Teacher(target)
    recorded = min(trace.top_ids.shape[1] for trace in traces)
    return Teacher(target, int(one.top_k)) if int(one.top_k) > recorded else None


def _check(traces: Sequence[Trace], chosen: Sequence[Variation], target: PreTrainedModel | None) -> None:
    known = sorted({trace.domain for trace in traces})
    for one in chosen:
        if one.top_k == FULL and target is None:
            raise ValueError(f"{one.name} needs the target")
        if one.domain is not None and one.domain not in known:
            raise NotEnoughDataError(f"No traces of domain {one.domain!r}; there are some of: {', '.join(known)}.")


def _told(tell: Tell, title: str, progress: dict[str, Any]) -> None:
    tell(title, f"step {progress.get('step', 0)} of {progress.get('steps', 0)}")


def cut(trace: Trace, top_k: int) -> Trace:
    """The trace as it would be had only ``top_k`` of the target's tokens been kept; the rest is tail."""
    if top_k >= trace.top_ids.shape[1]:
        return trace
    order = np.argsort(-np.asarray(trace.top_log_probs, np.float32), axis=-1, kind="stable")
    ids, log_probs = (np.take_along_axis(np.asarray(of), order, -1) for of in (trace.top_ids, trace.top_log_probs))
    lost = np.exp(log_probs[:, top_k:].astype(np.float32)).sum(-1)
    tail = np.asarray(trace.tail_mass, np.float32) + lost
    return replace(trace, top_ids=ids[:, :top_k], top_log_probs=log_probs[:, :top_k], tail_mass=tail)


def _by_domain(before: Sequence[TraceScore], after: Sequence[TraceScore]) -> dict[str, dict[str, float]]:
    """Means over requests, per domain and pooled."""
    domains = {POOLED, *(row.domain for row in before)}
    names = ("acceptance_length", "agreement", "overlap")
    return {
        domain: {
            f"{name}_{when}": float(np.mean([getattr(row, name) for row in rows if domain in (row.domain, POOLED)]))
            for when, rows in (("before", before), ("after", after))
            for name in names
        }
        for domain in sorted(domains)
    }
