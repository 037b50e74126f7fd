"""The child process of a training run.

``python -m adaptive_spec.learning.run --run-id N --settings FILE.json --out FOLDER``

Started by the pipeline, so that training can neither block nor kill the service.  It reads traces, writes the adapter,
``distil.json`` and ``judgement.json`` into the folder, and tells its progress to the row of the run.  It publishes
nothing.  It may be killed at any moment: started again with the same folder, it goes on from the last checkpoint.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from sqlalchemy.exc import InterfaceError, OperationalError

from adaptive_spec.core import POOLED, Release, Trace
from adaptive_spec.errors import NotEnoughDataError, RunError
from adaptive_spec.learning.batches import completion_length
from adaptive_spec.learning.counterfactual import judged_under
from adaptive_spec.learning.distil import distil
from adaptive_spec.learning.evaluate import TraceScore, paired_gain, score_of
from adaptive_spec.learning.heat import HEATS, choose_heats
from adaptive_spec.learning.judge import Judgement, replay_observations, write_judgement
from adaptive_spec.learning.memory import limit_memory, told
from adaptive_spec.learning.own import (
    ADAPTER_NAME,
    adapters_of,
    candidate_domains,
    hold_contests,
    report_of,
    shared_time,
    train_candidates,
)
from adaptive_spec.learning.pinned import pinned
from adaptive_spec.learning.replay import divide
from adaptive_spec.learning.selection import split
from adaptive_spec.learning.vocabulary import choose_vocabulary
from adaptive_spec.models.loading import load_pair
from adaptive_spec.models.weights import DraftWeights
from adaptive_spec.records.database import Database
from adaptive_spec.records.releases import same_draft
from adaptive_spec.records.runs import RunGain, last_begun, learned_until, update_run
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.releases.paired import MIN_REQUESTS
from adaptive_spec.releases.registry import live_release
from adaptive_spec.settings import Settings

logger = logging.getLogger(__name__)

REPORT_NAME = "distil.json"
PAUSE_NAME = "pause"  # while this file is there, the run waits between two steps
_PROGRESS_SECONDS = 1.0
_PAUSE_POLL_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once.  Returns the exit status; a failure is written to the run's row."""
    parser = argparse.ArgumentParser(prog="adaptive_spec.learning.run")
    parser.add_argument("--run-id", type=int, required=True)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    settings = Settings.model_validate_json(given.settings.read_text(encoding="utf-8"))
    os.nice(settings.learning.nice)
    torch.set_num_threads(settings.learning.threads)
    database = Database(settings.records.url)
    try:
        update_run(database, given.run_id, state="running", pid=os.getpid())
        limit_memory(settings.learning.memory_limit_bytes)
        train(database, settings, given.run_id, given.out)
    except Exception as error:
        reason, service = told(error, settings.learning.memory_limit_bytes), os.getppid()
        database.outlast(
            lambda: update_run(database, given.run_id, state="failed", error=reason),
            lambda: os.getppid() != service,
        )
        raise
    finally:
        database.close()
    return 0


def train(database: Database, settings: Settings, run_id: int, out: Path) -> None:
    """Distil the stored traces; leave adapters, their report and the judgement on held-out traces in ``out``.

    The shared adapter first, then those of domains that may win one of their own.  Both releases are judged as they
    serve: domains under their own adapters.

    Raises:
        AdaptiveSpecError: too few traces, a model or a live release that cannot be used, or a diverging run.
    """
    tell = RunTeller(database, run_id, out / PAUSE_NAME)
    tell({"phase": "load"}, now=True)
    store = TraceStore(database, settings.records.folder, settings.records.held_out_share)
    traces = store.load(held_out=False)
    if len(traces) < settings.learning.min_traces:
        raise NotEnoughDataError(
            f"{len(traces)} traces, {settings.learning.min_traces} needed. Serve more requests or lower "
            "learning.min_traces."
        )
    pair = load_pair(settings.model)
    draft, hashes = pair.draft, pair.hashes
    del pair  # the target's own layers are not needed
    parent = live_release(database, settings.releases.folder, hashes=hashes)
    out.mkdir(parents=True, exist_ok=True)
    alike = same_draft(database, parent.version)
    traces, held_out = pinned(out, parent.version, alike, traces, store.load(held_out=True))
    held_out = [trace for trace in held_out if completion_length(trace) > 0]
    weights, learning = DraftWeights(draft), settings.learning
    before = judged_under(weights, parent, held_out)
    fitted, selection = split(traces)
    domains = candidate_domains(fitted, selection, learning)
    parent_adapter = Path(parent.adapter) if parent.adapter else None
    learned_at = last_begun(database, ("passed", "refused"))
    fresh, older = divide(fitted, learned_until(database, alike), learning.replay_share)
    model, report = distil(draft, fresh, selection, shared_time(learning, domains), tell, parent_adapter, out, older)
    adapter = out / ADAPTER_NAME
    model.save_pretrained(str(adapter), safe_serialization=True, save_embedding_layers=False)
    model.unload()
    candidates = train_candidates(draft, adapter, domains, fitted, selection, learning, report.seconds, tell, out)
    tell({"phase": "judge"}, now=True)
    vocabulary = choose_vocabulary(traces, learning.vocabulary_tokens, draft.config.vocab_size)
    shared = Release(adapter=str(adapter), vocabulary=None if vocabulary is None else tuple(vocabulary))
    verdicts = hold_contests(weights, shared, candidates, parent, selection, learning)
    own = adapters_of(verdicts, candidates, parent)
    after = judged_under(weights, replace(shared, domain_adapters=own), held_out, HEATS)
    seen = replay_observations(after, settings.decoder.max_chain_length)
    was, would = ([score_of(row) for row in judged] for judged in (before, after))
    write_judgement(Judgement(was, would, seen, choose_heats(after)), out)
    contests = report_of(verdicts, candidates)
    described = {
        "distil": report.to_dict(),
        "vocabulary": vocabulary,
        "domain_adapters": own,
        "provenance": provenance(settings, traces, parent.version, dict(hashes)) | {"own_adapters": contests},
    }
    (out / REPORT_NAME).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    training = {name: value for name, value in report.to_dict().items() if name != "history"}
    gain = gained(was, would, sum(trace.at >= learned_at for trace in traces) if learned_at else len(traces))
    found = {"training": training, "own_adapters": contests, "gain": None if gain is None else asdict(gain)}
    tell.report(found)
    summary = {
        "held_out_agreement": report.agreement_after,
        "held_out_acceptance_length": report.acceptance_length_after,
        "tokens_per_second": report.tokens_per_second,
        "throughput_share": report.throughput_share,
    }
    tell({"phase": "distilled", **summary, "seconds_left": 0.0}, now=True)


def gained(before: Sequence[TraceScore], after: Sequence[TraceScore], num_new_traces: int) -> RunGain | None:
    """Return what the candidate gains over the live release on the same requests; None where they are too few."""
    pooled = paired_gain(before, after).get(POOLED)
    if pooled is None or pooled.n < MIN_REQUESTS:
        return None
    return RunGain(num_new_traces, pooled.gain / pooled.before, pooled.high / pooled.before)


def provenance(settings: Settings, traces: Sequence[Trace], parent: int, hashes: dict[str, str]) -> dict[str, Any]:
    """What an adapter was made from, and with what."""
    return {
        "parent": parent,
        "hashes": hashes,
        "seed": settings.learning.seed,
        "settings": settings.learning.model_dump(mode="json"),
        "packages": {name: version(name) for name in ("torch", "transformers", "peft")},
        "num_traces": len(traces),
        "domains": sorted({trace.domain for trace in traces}),
        "first_trace_at": min(trace.at for trace in traces).isoformat(),
        "last_trace_at": max(trace.at for trace in traces).isoformat(),
    }


class RunTeller:
    """Writes progress to the run's row, at most once a second, pauses, and ends a run whose service was killed."""

    def __init__(self, database: Database, run_id: int, pause: Path) -> None:
        self._database, self._run_id, self._last, self._pause = database, run_id, 0.0, pause
        self._parent = os.getppid()

    def __call__(self, progress: dict[str, Any], now: bool = False) -> float:
        """Tell, and return how many seconds the run was told to pause."""
        self._end_if_alone()
        if now or time.monotonic() - self._last >= _PROGRESS_SECONDS:
            self._tell(progress)
        if not self._pause.exists():
            return 0.0
        began = time.monotonic()
        self._tell({**progress, "phase": "paused"})
        while self._pause.exists():
            time.sleep(_PAUSE_POLL_SECONDS)
            self._end_if_alone()
        return time.monotonic() - began

    def report(self, report: dict[str, Any]) -> None:
        """Add to the row's report, however long the database is away."""
        self._database.outlast(
            lambda: update_run(self._database, self._run_id, report=report), lambda: os.getppid() != self._parent
        )

    def _tell(self, progress: dict[str, Any]) -> None:
        self._last = time.monotonic()
        try:
            update_run(self._database, self._run_id, progress=progress)
        except (OperationalError, InterfaceError) as error:  # the next report comes soon; the work goes on
            logger.warning("progress cannot be told: %s", error)

    def _end_if_alone(self) -> None:
        if os.getppid() != self._parent:
            raise RunError("The service that started this run is gone. Start it again, then retrain.")


if __name__ == "__main__":
    sys.exit(main())
