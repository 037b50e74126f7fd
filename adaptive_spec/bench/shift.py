"""``adaptive-spec bench-shift``: traffic of some domains, then of another: how soon a draft follows, what it forgets.

Exact verification keeps the target's output, so what a request leaves on record does not hang on the draft that served
it.  Recorded traces are therefore logged once more, in this order, into a database of its own, and the pipeline makes
releases of them as it does for a service: in its own process, from its own data, past the gate.  Each release is
judged on the held-out requests of all domains.  The bar is an oracle, trained offline on all of the new domain at once.

This takes hours, and can be interrupted and continued: what the records hold is not done again.
"""

import copy
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adaptive_spec.bench.kept import append, read_kept, rewrite
from adaptive_spec.bench.ours import measured_cost
from adaptive_spec.core import Release, Trace
from adaptive_spec.errors import GateRefused, NotEnoughDataError, SettingsError
from adaptive_spec.learning.acceptance import RequestSums, drawn, ratio, sums_of
from adaptive_spec.learning.batches import completion_length
from adaptive_spec.learning.counterfactual import judged_under
from adaptive_spec.learning.distil import distil
from adaptive_spec.learning.evaluate import JudgedTrace, judge
from adaptive_spec.learning.selection import split
from adaptive_spec.learning.triggers import VOLUME
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.models.weights import DraftWeights
from adaptive_spec.pipeline import Pipeline
from adaptive_spec.records.database import Database
from adaptive_spec.records.releases import get_release
from adaptive_spec.records.runs import fail_orphans, get_run
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.releases.bundle import read_bundle
from adaptive_spec.releases.registry import live_release
from adaptive_spec.settings import Settings

BEFORE, AFTER, ORACLE = "before", "after", "oracle"
ALL = "all"  # of what is stored, old and new alike: ``learning.replay_share`` is not set
RECORDS_NAME = "shift.jsonl"
PLAN_NAME = "plan.json"  # what the records are of: none but the same is continued
Tell = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Shift:
    """What is served.

    first: the domains before the shift.  then: the one after it.  before, after: requests logged of each first domain
    and of the new one, at most, held-out ones included; None: all.  held_out: requests judged of each domain, at most.
    every: requests between two runs.  oracle_epochs: of the oracle's training, which ends early where runs do.
    replays: a side for each, ``ALL`` or a share.  chain_length: of the chains at which drafts are judged.
    """

    first: tuple[str, ...]
    then: str
    before: int | None = None
    after: int | None = None
    held_out: int | None = None
    every: int = 100
    oracle_epochs: int = 8
    replays: tuple[str, ...] = (ALL, "0")
    chain_length: int = 4
    seed: int = 0


def run_shift(
    settings: Settings,
    out: Path,
    shift: Shift,
    tell: Tell = lambda title, text: None,
) -> list[dict[str, Any]]:
    """Log, learn and judge what ``out`` does not hold yet; return the records, which also lie there.

    A record says what one draft reaches on one domain: side (a replay, or ``ORACLE``), phase (``BEFORE`` the shift,
    ``AFTER`` it), logged (requests of the new domain), release, verdict (of the gate), domain, num_requests,
    acceptance_length with its interval, candidate_acceptance_length (of one that the gate refused: what it would have
    been), seconds (of training).

    Args:
        out: a folder that is not there yet, is empty, or holds what an interrupted call with the same options left.

    Raises:
        SettingsError: the folder holds something else, or the shift is none.
        NotEnoughDataError: a domain has too few traces.
    """
    if shift.then in shift.first or not shift.first:
        raise SettingsError("Name domains to serve first, and another one to serve then.")
    plan = _plan(settings, shift)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and _kept_plan(out) != plan)):
        raise SettingsError(f"{out} holds something already, made with other options. Name a new folder.")
    torch.set_num_threads(settings.model.threads or torch.get_num_threads())
    logged, held_out = _recorded(settings, shift)
    tell("shift", "loading the models, measuring what a step costs")
    pair = load_pair(settings.model)
    out.mkdir(parents=True, exist_ok=True)
    (out / PLAN_NAME).write_text(json.dumps(plan, indent=1), encoding="utf-8")
    bench = _Bench(settings, pair, out, shift, held_out, tell)
    bench.point(lambda: bench.judge(_Learnt(Release()), ALL, BEFORE, 0))
    bench.point(lambda: bench.first([trace for domain in shift.first for trace in logged[domain]]))
    for side in shift.replays:
        bench.side(side, logged[shift.then])
    bench.point(lambda: bench.oracle(logged[shift.then]))
    return bench.records


def _plan(settings: Settings, shift: Shift) -> dict[str, Any]:
    """What decides about records: the shift, how is learned, and whose traces."""
    how = {"shift": asdict(shift), "learning": settings.learning.model_dump(), "traces": str(settings.records.folder)}
    plan: dict[str, Any] = json.loads(json.dumps(how, default=str))
    return plan


def _kept_plan(out: Path) -> dict[str, Any] | None:
    try:
        plan: dict[str, Any] = json.loads((out / PLAN_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return plan


def _recorded(settings: Settings, shift: Shift) -> tuple[dict[str, list[Trace]], list[Trace]]:
    """What is there to log, by domain and in an order of chance, and what is there to judge."""
    database = Database(settings.records.url)
    try:
        database.check()
        store = TraceStore(database, settings.records.folder, settings.records.held_out_share)
        domains = [*shift.first, shift.then]
        everything = store.load(domains=domains)
        held_out = store.load(held_out=True, domains=domains, limit_per_domain=shift.held_out)
    finally:
        database.close()
    chance = random.Random(shift.seed)
    logged = {}
    for domain in domains:
        its = [trace for trace in everything if trace.domain == domain and completion_length(trace) > 0]
        logged[domain] = chance.sample(its, len(its))[: shift.after if domain == shift.then else shift.before]
        if len(its) < settings.learning.min_traces or not any(trace.domain == domain for trace in held_out):
            raise NotEnoughDataError(
                f"{len(its)} traces of domain {domain!r} are on record; {settings.learning.min_traces}, and one held "
                "out, are needed. Serve more requests, or `adaptive-spec traces import` some."
            )
    return logged, [trace for trace in held_out if completion_length(trace) > 0]


class _Bench:
    """The models, and the records as they grow."""

    def __init__(
        self, settings: Settings, pair: ModelPair, out: Path, shift: Shift, held_out: Sequence[Trace], tell: Tell
    ) -> None:
        self.settings, self.pair, self.out, self.shift, self.tell = settings, pair, out, shift, tell
        self.held_out, self.domains = held_out, (*shift.first, shift.then)
        self.weights = DraftWeights(pair.draft)
        self.cost = measured_cost(pair, settings, 1, None)
        kept = read_kept(out / RECORDS_NAME)
        self.num_kept = len(kept) // len(self.domains)  # points: records of all domains
        self.num_points = 0
        self.records = kept[: self.num_kept * len(self.domains)]
        rewrite(out / RECORDS_NAME, self.records)

    def point(self, make: Callable[[], None]) -> None:
        """Make the next point of the records, unless the interrupted call has."""
        self.num_points += 1
        if self.num_points > self.num_kept:
            make()

    def first(self, traces: Sequence[Trace]) -> None:
        """Serve the first domains and learn them; every side goes on from there."""
        service = _Service(self, self.out / BEFORE, self.settings)
        service.log(traces)
        self.judge(service.learn(), ALL, BEFORE, 0)
        service.close()

    def side(self, side: str, traces: Sequence[Trace]) -> None:
        """Serve the new domain alone, learning whenever ``every`` more requests are on record."""
        folder = self.out / f"replay-{side}"
        if not folder.exists():
            shutil.copytree(self.out / BEFORE, self.out / "copying", dirs_exist_ok=True)
            (self.out / "copying").rename(folder)
        share = None if side == ALL else float(side)
        learning = self.settings.learning.model_copy(update={"replay_share": share})
        service = _Service(self, folder, self.settings.model_copy(update={"learning": learning}))
        for start in range(0, len(traces), self.shift.every):
            some = traces[start : start + self.shift.every]
            self.point(partial(self._follow, service, some, side, start + len(some)))
        service.close()

    def _follow(self, service: "_Service", traces: Sequence[Trace], side: str, logged: int) -> None:
        service.log(traces)
        self.judge(service.learn(), side, AFTER, logged)

    def oracle(self, traces: Sequence[Trace]) -> None:
        """Train offline on all of the new domain but what is held out, from the untouched draft."""
        unseen = {trace.request_id for trace in self.held_out}
        fitted, selection = split([trace for trace in traces if trace.request_id not in unseen])
        learning = self.settings.learning.model_copy(update={"max_epochs": self.shift.oracle_epochs})
        model, report = distil(copy.deepcopy(self.pair.draft), fitted, selection, learning, self._told(ORACLE))
        judged = judge(model, self.held_out, heats=(1.0,))
        self._record(judged, None, _Learnt(None, seconds=report.seconds), ORACLE, AFTER, len(traces))

    def judge(self, learnt: "_Learnt", side: str, phase: str, logged: int) -> None:
        """Judge the live release, and the candidate that the gate refused, if one was."""
        assert learnt.live is not None
        refused = None if learnt.refused is None else self._judged(learnt.refused)
        self._record(self._judged(learnt.live), refused, learnt, side, phase, logged)

    def _judged(self, release: Release) -> list[JudgedTrace]:
        self.tell("shift", f"judging release {release.version} on {len(self.held_out)} held-out requests")
        return judged_under(self.weights, release, self.held_out)

    def _record(
        self,
        judged: Sequence[JudgedTrace],
        refused: Sequence[JudgedTrace] | None,
        learnt: "_Learnt",
        side: str,
        phase: str,
        logged: int,
    ) -> None:
        sums = sums_of(judged, self.shift.chain_length)
        candidate = None if refused is None else sums_of(refused, self.shift.chain_length)
        for domain in self.domains:
            its = sums.only(domain)
            draws = drawn(len(its.num_tokens), self.shift.seed)
            found = ratio(*its.of("acceptance_length"), draws)
            row = {
                "side": side,
                "phase": phase,
                "logged": logged,
                "release": None if learnt.live is None else learnt.live.version,
                "verdict": learnt.verdict,
                "domain": domain,
                "is_new": domain == self.shift.then,
                "num_requests": len(its.num_tokens),
                "acceptance_length": found.value,
                "acceptance_length_low": found.low,
                "acceptance_length_high": found.high,
                "candidate_acceptance_length": None if candidate is None else _length(candidate.only(domain)),
                "seconds": learnt.seconds,
            }
            self.records.append(row)
            append(self.out / RECORDS_NAME, row)

    def _told(self, title: str) -> Callable[[dict[str, Any]], None]:
        def tell(progress: dict[str, Any]) -> None:
            self.tell("shift", f"{title}: step {progress.get('step', 0)} of {progress.get('steps', 0)}")

        return tell


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What came of a run.  live: the release that then serves, None for the oracle.  refused: by the gate."""

    live: Release | None
    verdict: str = ""
    refused: Release | None = None
    seconds: float = 0.0


class _Service:
    """What a service is to learning: a database, traces, releases and the pipeline."""

    def __init__(self, bench: _Bench, folder: Path, settings: Settings) -> None:
        folder.mkdir(exist_ok=True)
        records = settings.records.model_copy(
            update={"url": f"sqlite:///{(folder / 'service.db').resolve()}", "folder": folder / "traces"}
        )
        releases = settings.releases.model_copy(update={"folder": folder / "releases"})
        self.settings = settings.model_copy(update={"records": records, "releases": releases})
        self.database = Database(records.url)
        self.database.upgrade()
        self.store = TraceStore(self.database, records.folder, records.held_out_share)
        self.pipeline = Pipeline(self.database, self.settings, bench.cost, bench.pair.hashes)
        self.tell = bench.tell

    def log(self, traces: Sequence[Trace]) -> None:
        """Record what requests have left, as of now."""
        now = datetime.now(UTC)
        self.store.add([replace(trace, at=now) for trace in traces])

    def learn(self) -> _Learnt:
        """Make a run, or go on with one that was interrupted, and say what came of it."""
        fail_orphans(self.database)
        goes_on = self.pipeline.interrupted() is not None
        run_id = self.pipeline.reopen_run() if goes_on else self.pipeline.open_run(VOLUME)
        self.tell("shift", f"run {run_id} of {self.database.url}")
        began = datetime.now(UTC)
        verdict, refused = "passed", None
        try:
            self.pipeline.retrain(run_id)
        except GateRefused:
            verdict, refused = "refused", self._candidate(run_id)
        seconds = (datetime.now(UTC) - began).total_seconds()
        return _Learnt(live_release(self.database, self.pipeline.store), verdict, refused, seconds)

    def _candidate(self, run_id: int) -> Release | None:
        """The release that a run made, if its bundle was sound."""
        version = get_run(self.database, run_id).release
        folder = None if version is None else get_release(self.database, version).folder
        return None if folder is None else read_bundle(self.pipeline.store.folder / folder)

    def close(self) -> None:
        self.database.close()


def _length(sums: RequestSums) -> float:
    tokens, steps = sums.of("acceptance_length")
    return float(tokens.sum() / steps.sum())
