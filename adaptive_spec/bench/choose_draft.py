"""Which draft to pair with a target: candidates by what a drafted token of theirs costs here, and how they would fare.

Cost is measured on this machine, acceptance on held-out traces; neither needs live traffic.  Called by
``models choose-draft``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from adaptive_spec.bench.draft_choice import MeasuredDraft
from adaptive_spec.bench.evaluation import held_out
from adaptive_spec.bench.ours import start_engine
from adaptive_spec.calibration.cost import cost_key, measure_cost
from adaptive_spec.core import Release, StepCost, Trace
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.errors import SettingsError
from adaptive_spec.learning.acceptance import sums_of
from adaptive_spec.learning.evaluate import judge
from adaptive_spec.learning.vocabulary import choose_vocabulary
from adaptive_spec.models.draft import cut_draft
from adaptive_spec.models.loading import ModelPair, load_draft, load_target, pair_of
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import Settings

_ROUNDS = 9
_CONTEXT_TOKENS = 256
Tell = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft to be measured: a model, how many of its layers, and the tokens that it may propose, None for all."""

    name: str
    reference: str
    draft: PreTrainedModel
    vocabulary: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class DraftComparison:
    """Every candidate as measured, and the target's seconds for chains of 0, 1, 2 … tokens in so many rows."""

    drafts: tuple[MeasuredDraft, ...]
    verify_seconds: tuple[float, ...]
    rows: int
    key: str


def choose_draft(
    settings: Settings,
    references: Sequence[str],
    *,
    depths: Sequence[int] = (),
    vocabularies: Sequence[int] = (),
    domain: str | None = None,
    max_chain_length: int = 6,
    rows: int = 1,
    tell: Tell = lambda title, text: None,
) -> DraftComparison:
    """Measure candidates on this machine and judge them on the held-out traces of the settings' database.

    Args:
        references: drafts as in ``model.draft``; none: that one.
        depths: beside every draft also its first so many layers, where it has more.
        vocabularies: sizes to trim each draft's head to, by the tokens that the traces to train on use; 0: all.
        domain: only its held-out traces.
        rows: of a step.

    Raises:
        ModelError: a draft does not load or does not fit the target.
        NotEnoughDataError: no trace is held out.
        SettingsError: a candidate was named twice.
    """
    torch.set_num_threads(settings.model.threads or torch.get_num_threads())
    database = Database(settings.records.url)
    try:
        database.check()
        store = TraceStore(database, settings.records.folder, settings.records.held_out_share)
        traces, seen = held_out(store, domain), store.load(held_out=False)
    finally:
        database.close()
    tell("choose-draft", "loading the models")
    target, tokenizer = load_target(settings.model.target, settings.model)
    found = candidates(settings, target, tokenizer, references or [settings.model.draft], depths, vocabularies, seen)
    pairs = {name: pair_of(target, its.draft, tokenizer, settings.model.target) for name, its in found.items()}
    tell("choose-draft", f"measuring {len(found)} candidates")
    cost, samples = measure(pairs, found, settings, max_chain_length, rows)
    measured = []
    for number, (name, its) in enumerate(found.items(), start=1):
        tell("choose-draft", f"judging {number} of {len(found)}: {name}, on {len(traces)} held-out requests")
        judged = judge(its.draft, traces, vocabulary=its.vocabulary, heats=(1.0,))
        measured.append(
            MeasuredDraft(
                name,
                its.reference,
                _num_layers(its.draft),
                len(its.vocabulary or ()),
                tuple(sums_of(judged, length) for length in range(max_chain_length + 1)),
                median(samples[name]),
                tuple(samples[name]),
            )
        )
    return DraftComparison(tuple(measured), cost.verify_seconds, rows, cost.key)


def candidates(
    settings: Settings,
    target: PreTrainedModel,
    tokenizer: Any,
    references: Sequence[str],
    depths: Sequence[int],
    vocabularies: Sequence[int],
    seen: Sequence[Trace],
) -> dict[str, Candidate]:
    """Load what is to be compared, by name: every draft, at every depth that it has, with every vocabulary.

    Raises:
        ModelError: a draft does not load or does not fit the target.
        SettingsError: a draft was named twice, or no draft is as deep as asked.
    """
    if len(set(references)) < len(references):
        raise SettingsError("A candidate was named twice; name each draft once.")
    drafts = {reference: load_draft(reference, target, tokenizer, settings.model) for reference in references}
    deepest = max(map(_num_layers, drafts.values()))
    if wrong := [depth for depth in depths if depth >= deepest]:
        raise SettingsError(f"No candidate has more than {wrong[0]} layers; the most is {deepest}. Lower --depth.")
    found: dict[str, Candidate] = {}
    size = int(target.config.vocab_size)
    trimmed = {tokens: choose_vocabulary(seen, tokens, size) for tokens in vocabularies or (0,)}
    for reference, draft in drafts.items():
        fitting = [depth for depth in depths if depth < _num_layers(draft)]
        for depth, shallower in [(0, draft), *((depth, cut_draft(draft, list(range(depth)))) for depth in fitting)]:
            for vocabulary in trimmed.values():
                name = reference + (f", first {depth} of {_num_layers(draft)} layers" if depth else "")
                name += f", {len(vocabulary)} tokens" if vocabulary else ""
                found[name] = Candidate(name, reference, shallower, tuple(vocabulary) if vocabulary else None)
    return found


def measure(
    pairs: dict[str, ModelPair], found: dict[str, Candidate], settings: Settings, max_chain_length: int, rows: int
) -> tuple[StepCost, dict[str, list[float]]]:
    """Time a drafted token of every candidate and the target's verification, all in turn, as an engine runs them.

    Returns the target's cost, and by candidate the seconds of one drafted token in so many rows, a number per round.
    """
    changes = {"slots": rows, "max_context_tokens": _CONTEXT_TOKENS, "max_chain_length": max_chain_length}
    engines: dict[str, Engine] = {}
    try:
        for name, candidate in found.items():
            engines[name] = start_engine(pairs[name], settings.decoder, changes)
            engines[name].swap(LoadedRelease(Release(vocabulary=candidate.vocabulary))).result()
        first = next(iter(engines.values()))
        samples: dict[str, list[float]] = {name: [] for name in engines}

        def time_draft(batch: int, context: int) -> float:
            for name, engine in engines.items():
                seconds: float = engine.call(partial(engine.decoder.time_draft, batch, context)).result()
                if batch == rows:
                    samples[name].append(seconds)
            return seconds

        def time_verify(batch: int, length: int, context: int) -> float:
            seconds: float = first.call(partial(first.decoder.time_verify, batch, length, context)).result()
            return seconds

        key = cost_key(
            target=settings.model.target,
            draft="candidates",
            dtype=settings.model.dtype,
            device=settings.model.device,
            threads=torch.get_num_threads(),
            batch_size=1,
        )
        contexts = first.decoder.cost_contexts[:1]
        cost = measure_cost(time_draft, time_verify, max_chain_length, key, rows, _ROUNDS, contexts).measured[rows]
    finally:
        for engine in engines.values():
            engine.stop()
    return cost, {name: seconds[1:] for name, seconds in samples.items()}  # the first round warms up


def _num_layers(draft: PreTrainedModel) -> int:
    return int(getattr(draft.config, "num_hidden_layers", 0))
