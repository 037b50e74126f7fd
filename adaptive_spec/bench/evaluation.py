"""Drafts on held-out traces: the untouched one, the live release and candidates, without live traffic.

The traces hold what the target said, so it is not run again.  Called by ``evaluate``; publishes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from adaptive_spec.core import Release, Trace
from adaptive_spec.errors import NotEnoughDataError, SettingsError
from adaptive_spec.learning.acceptance import RequestSums, check_same_requests, sums_of
from adaptive_spec.learning.batches import completion_length
from adaptive_spec.learning.contest import Verdict, contest
from adaptive_spec.learning.counterfactual import judged_under
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.models.weights import DraftWeights
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.releases.bundle import bundle_name, read_bundle
from adaptive_spec.releases.registry import live_release
from adaptive_spec.settings import Settings

BASE, LIVE = "base", "live"
Tell = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Every draft on the same held-out requests, base first, then the live release, then the candidates.

    drafts: the sums of each.  reference: what candidates have to beat, the live release where there is one.
    live_version: None where there is none beside the base.  verdicts: per domain the best; empty without candidates.
    """

    drafts: Mapping[str, RequestSums]
    reference: str
    live_version: int | None
    chain_length: int
    verdicts: Mapping[str, Verdict]
    seed: int


def evaluate(
    settings: Settings,
    *,
    adapters: Sequence[Path] = (),
    releases: Sequence[str] = (),
    with_live: bool = True,
    domain: str | None = None,
    chain_length: int = 4,
    seed: int = 0,
    tell: Tell = lambda title, text: None,
) -> Evaluation:
    """Judge the base draft, the live release and the candidates on the held-out traces of the settings' database.

    Args:
        adapters: folders of adapters.
        releases: versions in ``releases.folder``, or folders of bundles.
        with_live: whether the live release is judged.
        domain: only its traces.
        chain_length: tokens of each chain, of greedy decoding and of sampling.

    Raises:
        NotEnoughDataError: no trace is held out.
        ModelError, RecordsError, ReleaseError: what is asked for cannot be used, or does not fit the draft.
    """
    torch.set_num_threads(settings.model.threads or torch.get_num_threads())
    database = Database(settings.records.url)
    try:
        database.check()
        store = TraceStore(database, settings.records.folder, settings.records.held_out_share)
        traces = held_out(store, domain)
        tell("evaluate", "loading the models")
        pair = load_pair(settings.model)
        worn = {BASE: Release()}
        if with_live:
            live = live_release(database, settings.releases.folder, draft=pair.draft, hashes=pair.hashes)
            worn |= {LIVE: live} if live.version else {}
    finally:
        database.close()
    worn |= candidates(settings, pair, adapters, releases, taken=worn)
    return compare(pair, worn, traces, settings, chain_length, seed, tell)


def held_out(store: TraceStore, domain: str | None = None) -> list[Trace]:
    """Return the held-out traces that have something to judge.

    Raises:
        NotEnoughDataError: there are none.
    """
    found = store.load(held_out=True, domains=None if domain is None else [domain])
    traces = [trace for trace in found if completion_length(trace) > 0]
    if not traces:
        whose = "" if domain is None else f" of domain {domain!r}"
        raise NotEnoughDataError(f"No trace{whose} is held out yet. Serve more requests, or name other --traces.")
    return traces


def candidates(
    settings: Settings, pair: ModelPair, adapters: Sequence[Path], releases: Sequence[str], taken: Mapping[str, Release]
) -> dict[str, Release]:
    """Return what is asked for by the name it is shown under; an adapter alone is a release with nothing else.

    Raises:
        ReleaseError: a release that is not sound or was made for other models.
        SettingsError: one was named twice.
    """
    paths = [adapter.resolve() for adapter in adapters]
    if len(set(paths)) < len(paths) or len(set(releases)) < len(releases):
        raise SettingsError("A candidate was named twice; name each --adapter and --release once.")
    found: dict[str, Release] = {}
    for version in releases:
        folder = settings.releases.folder / bundle_name(int(version)) if version.isdigit() else Path(version)
        release = read_bundle(folder, draft=pair.draft, hashes=pair.hashes)
        found[f"release {release.version}"] = release
    for path in paths:
        found[str(path) if path.name in found or path.name in taken else path.name] = Release(adapter=str(path))
    return found


def compare(
    pair: ModelPair,
    worn: Mapping[str, Release],
    traces: Sequence[Trace],
    settings: Settings,
    chain_length: int,
    seed: int,
    tell: Tell = lambda title, text: None,
) -> Evaluation:
    """Judge releases on the same traces.  ``worn`` has ``BASE`` at least."""
    weights = DraftWeights(pair.draft)
    judged = {}
    for name, release in worn.items():
        tell("evaluate", f"{name} on {len(traces)} held-out requests")
        judged[name] = judged_under(weights, release, traces)
    reference = LIVE if LIVE in worn else BASE
    others = {name: rows for name, rows in judged.items() if name not in (BASE, LIVE)}
    drafts = {name: sums_of(rows, chain_length) for name, rows in judged.items()}
    check_same_requests(drafts)
    verdicts = contest(judged[reference], others, settings.learning, chain_length, seed) if others else {}
    live_version = worn[LIVE].version if LIVE in worn else None
    return Evaluation(drafts, reference, live_version, chain_length, verdicts, seed)
