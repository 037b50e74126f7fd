"""Adapters of domains' own: trained on from the shared one, carried by a release where they win the contest.

Called by ``run`` when the shared adapter is there.  The contest's traces fitted none of the adapters and chose no epoch
of a domain's own one, and they are not those of the gate, which judges the release afterwards as it will serve.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from adaptive_spec.core import Release, Trace
from adaptive_spec.learning.batches import completion_length
from adaptive_spec.learning.contest import COLD_START, SHARED, Verdict, contest
from adaptive_spec.learning.counterfactual import judged_under
from adaptive_spec.learning.distil import DistilReport, Progress, distil
from adaptive_spec.learning.selection import split_selection
from adaptive_spec.models.weights import DraftWeights
from adaptive_spec.settings import LearningSettings

ADAPTER_NAME = "adapter"
NEW, LIVE = "new", "live"  # the contenders: of this run, and of the live release
_OWN_NAME = "own"
_SHARED_TIME_SHARE = 0.5  # of a run's time, for the shared adapter, where domains train their own after it


@dataclass(frozen=True, slots=True)
class Candidate:
    """An adapter that was trained for a domain."""

    folder: Path
    report: DistilReport


def candidate_domains(
    fitted: Sequence[Trace], selection: Sequence[Trace], settings: LearningSettings
) -> tuple[str, ...]:
    """Return the domains for which an adapter of their own is worth a try, those with most to learn from first.

    A domain needs ``learning.min_traces`` to train on, one to choose the epoch, and as many as its contest asks for.
    At most ``learning.own_max_domains``; none where all traffic is of one domain, whose adapter the shared one is.
    """
    tokens: Counter[str] = Counter()
    for trace in fitted:
        tokens[trace.domain] += completion_length(trace)
    if len(tokens) < 2:
        return ()
    chooses_epoch, in_contest = (_per_domain(part) for part in split_selection(selection))
    enough = [
        domain
        for domain, num_traces in _per_domain(fitted).items()
        if num_traces >= settings.min_traces
        and chooses_epoch[domain]
        and in_contest[domain] >= settings.own_min_requests
    ]
    enough.sort(key=lambda domain: (-tokens[domain], domain))
    return tuple(enough[: settings.own_max_domains])


def shared_time(settings: LearningSettings, domains: Sequence[str]) -> LearningSettings:
    """The settings of the shared adapter's training, which leaves time to those of ``domains``."""
    if not domains:
        return settings
    return settings.model_copy(update={"time_limit_seconds": settings.time_limit_seconds * _SHARED_TIME_SHARE})


def train_candidates(
    draft: PreTrainedModel,
    shared_adapter: Path,
    domains: Sequence[str],
    fitted: Sequence[Trace],
    selection: Sequence[Trace],
    settings: LearningSettings,
    spent_seconds: float,
    progress: Progress,
    out: Path,
) -> dict[str, Candidate]:
    """Train an adapter for each domain on its traces alone, new and old, going on from the shared one.

    What is left of the run's time is shared evenly among those to come; a domain for which nothing is left has none.
    Each leaves checkpoints in a folder of its own below ``out``, and goes on from there.

    Args:
        draft: without an adapter, as it is again afterwards.
        spent_seconds: of ``learning.time_limit_seconds``, on the shared adapter.
        progress: as of ``distil``; also told the domain.
    """
    found = {}
    epoch, _ = split_selection(selection)
    for number, domain in enumerate(domains):
        left = (settings.time_limit_seconds - spent_seconds) / (len(domains) - number)
        if left <= 0:
            break
        folder = out / _OWN_NAME / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        model, report = distil(
            draft,
            _of(domain, fitted),
            _of(domain, epoch),
            settings.model_copy(update={"time_limit_seconds": left}),
            _of_domain(domain, progress),
            shared_adapter,
            folder,
        )
        model.save_pretrained(str(folder / ADAPTER_NAME), safe_serialization=True, save_embedding_layers=False)
        model.unload()
        spent_seconds += report.seconds
        found[domain] = Candidate(folder / ADAPTER_NAME, report)
    return found


def hold_contests(
    weights: DraftWeights,
    shared: Release,
    candidates: Mapping[str, Candidate],
    live: Release,
    selection: Sequence[Trace],
    settings: LearningSettings,
) -> dict[str, Verdict]:
    """Decide for every domain that has a candidate, or an adapter of its own in the live release.

    With too few requests to tell, a domain keeps what it has: the gate compares with that, and the release would be
    refused for taking away what cannot be judged.

    Args:
        shared: the new shared adapter and vocabulary, without adapters of domains.

    Returns:
        Verdicts whose winner is ``NEW``, ``LIVE`` or ``SHARED``.
    """
    _, decisive = split_selection(selection)
    verdicts = {}
    for domain in sorted(candidates.keys() | live.domain_adapters.keys()):
        contenders = {NEW: str(candidates[domain].folder)} if domain in candidates else {}
        if domain in live.domain_adapters:
            contenders[LIVE] = live.domain_adapters[domain]
        its = _of(domain, decisive)
        verdict = _contest(weights, shared, contenders, its, settings) if its else None
        if verdict is None or verdict.reason == COLD_START:
            verdict = verdict or Verdict(domain, SHARED, COLD_START, 0, None, ())
            verdict = replace(verdict, winner=LIVE if LIVE in contenders else SHARED)
        verdicts[domain] = verdict
    return verdicts


def adapters_of(verdicts: Mapping[str, Verdict], candidates: Mapping[str, Candidate], live: Release) -> dict[str, str]:
    """Return the folders of the adapters that the release carries, by domain."""
    folders = {NEW: {domain: str(its.folder) for domain, its in candidates.items()}, LIVE: live.domain_adapters}
    return {domain: folders[its.winner][domain] for domain, its in verdicts.items() if its.winner != SHARED}


def report_of(verdicts: Mapping[str, Verdict], candidates: Mapping[str, Candidate]) -> list[dict[str, Any]]:
    """Return what the run's report says of each domain: the verdict, and what its training did, if there was one."""
    return [
        {**asdict(verdict), "training": _without_history(candidates[domain].report) if domain in candidates else None}
        for domain, verdict in verdicts.items()
    ]


def _contest(
    weights: DraftWeights,
    shared: Release,
    contenders: Mapping[str, str],
    traces: Sequence[Trace],
    settings: LearningSettings,
) -> Verdict:
    judged = {
        name: judged_under(weights, replace(shared, adapter=adapter), traces)
        for name, adapter in {SHARED: shared.adapter, **contenders}.items()
    }
    (verdict,) = contest(judged.pop(SHARED), judged, settings).values()
    return verdict


def _of_domain(domain: str, progress: Progress) -> Progress:
    return lambda told: progress({**told, "domain": domain})


def _of(domain: str, traces: Sequence[Trace]) -> list[Trace]:
    """The domain's traces that can be judged."""
    return [trace for trace in traces if trace.domain == domain and completion_length(trace) > 0]


def _per_domain(traces: Sequence[Trace]) -> Counter[str]:
    return Counter(trace.domain for trace in traces if completion_length(trace) > 0)


def _without_history(report: DistilReport) -> dict[str, Any]:
    return {name: value for name, value in report.to_dict().items() if name != "history"}
