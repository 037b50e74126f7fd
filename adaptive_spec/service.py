"""The whole program in one object: models, engine, records, releases, scheduler.  Front ends hold one of these.

Reads like this: ``start`` brings the database up to date, loads the models, puts the live release on and begins to
decode; a watcher notices releases that anyone published and swaps them in, another one drifts in what is recorded;
``retrain`` and ``calibrate`` make releases.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.calibration.answer import DriftAnswers
from adaptive_spec.calibration.cost import CostModel, cost_key
from adaptive_spec.calibration.watch import DriftWatch, StreamState
from adaptive_spec.core import Step
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.errors import AdaptiveSpecError, ReleaseError, RunDeclined, RunError, UnavailableError
from adaptive_spec.learning.triggers import DRIFT, SCHEDULE, Decline, Facts, decline, due
from adaptive_spec.learning.yielding import PaceMeter, Yielding
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.pipeline import Pipeline
from adaptive_spec.records.costs import get_cost, save_cost
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import add_event
from adaptive_spec.records.quota import Quota
from adaptive_spec.records.releases import live_version
from adaptive_spec.records.retention import Forgotten, forget_request
from adaptive_spec.records.runs import active_run, count_traces, fail_orphans, last_begun
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.records.writer import Writer
from adaptive_spec.releases.adapter import load_adapter_delta
from adaptive_spec.releases.registry import live_release, rollback
from adaptive_spec.scheduler import Scheduler
from adaptive_spec.settings import Settings

logger = logging.getLogger(__name__)

RETRAIN_DECLINED = "retrain_declined"
_ENDING_SECONDS = 60


class Service:
    """Start it, submit to ``engine``, stop it."""

    pair: ModelPair
    traces: TraceStore
    writer: Writer
    engine: Engine
    pipeline: Pipeline

    def __init__(self, settings: Settings, pair: ModelPair | None = None) -> None:
        self.settings = settings
        self.ready = False
        self._given_pair = pair
        self.database = Database(settings.records.url)
        self._stopping = threading.Event()
        self._training = threading.Lock()
        self._following = threading.Lock()  # a swap decided on an older reading must not land after a newer one
        self._watchers = [
            threading.Thread(target=self._watch, name="release-watcher", daemon=True),
            threading.Thread(target=self._resume_interrupted, name="run-resumer", daemon=True),
        ]
        self._drift = DriftWatch(self.database, settings.drift)
        self._drift_answers = DriftAnswers(
            self.database, settings.drift, calibrate=self._calibrate_after, retrain=self._retrain_after
        )
        if settings.drift.enabled:
            self._watchers.append(threading.Thread(target=self._watch_drift, name="drift-watcher", daemon=True))
        self._scheduler = Scheduler(
            settings.schedule,
            retrain=self._scheduled_retrain,
            calibrate=self._scheduled_calibrate,
            look=self._look_for_trigger,
        )
        self._pace = PaceMeter()
        self._declined: set[tuple[str, str]] = set()  # what volume and age were told lately
        self._failed_versions: set[int] = set()

    @property
    def tokenizer(self) -> Any:
        return self.pair.tokenizer

    @property
    def drift_states(self) -> tuple[StreamState, ...]:
        """Where each watched stream stands."""
        return self._drift.states

    def start(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Bring everything up.

        Raises:
            AdaptiveSpecError: a model, the database or a setting that does not work, with what to do.
        """
        progress("database")
        self.database.upgrade()
        records = self.settings.records
        self.traces = TraceStore(self.database, records.folder, records.held_out_share, Quota.of(records))
        self.writer = Writer(self.database, self.traces, records)
        progress("models")
        self._threads = self.settings.model.threads or torch.get_num_threads()
        torch.set_num_threads(self._threads)
        self.pair = self._given_pair or load_pair(self.settings.model)
        self.engine = Engine(
            self.pair, self.settings.decoder, self._listeners(), verification=self.settings.verification
        )
        self.engine.start()
        progress("cost of a step")
        cost = self._known_cost() or self._measure_cost()
        self.engine.price(cost)
        yielding = Yielding(self._pace, self.settings.learning.max_slowdown_share, self._share_cores)
        self.pipeline = Pipeline(self.database, self.settings, cost, self.pair.hashes, yielding)
        progress("live release")
        self._follow_live()
        fail_orphans(self.database)
        for watcher in self._watchers:
            watcher.start()
        self._scheduler.start()
        self.ready = True

    def drain(self) -> None:
        """Begin to stop, and return at once: take no more requests, let running ones end as ``Engine.drain`` says."""
        self.ready = False
        if hasattr(self, "engine"):
            self.engine.drain()

    def stop(self) -> None:
        """Drain, write out what was recorded, end every thread and a running training process."""
        self.drain()
        self._stopping.set()
        self._scheduler.stop()
        if hasattr(self, "pipeline"):
            self.pipeline.cancel()
        if hasattr(self, "engine"):
            self.engine.stop()
        for watcher in self._watchers:
            if watcher.ident is not None:
                watcher.join()
        with self._training:  # a run that was cancelled writes its last row before the database closes
            if hasattr(self, "writer"):
                self._keep_cost()
                self.writer.close()
            self.database.close()

    def retrain(self, trigger: str = "person", *, resume: bool = False, force: bool = False) -> int:
        """Start a training run in its own process; return its id.

        Args:
            trigger: one of ``learning.triggers.AUTOMATIC``, of which more is asked, or what a person writes.
            resume: go on with the run that was interrupted last, under its own trigger.
            force: also with too little data.

        Raises:
            RunDeclined: none makes sense now; the event ``retrain_declined`` says so, too.
            RunError: one is running already, or there is none to go on with.
        """
        if not resume:
            self.writer.flush(5.0)
            self._decide(trigger, force)
        if not self._training.acquire(blocking=False):
            raise self._busy()
        try:
            run_id = self.pipeline.reopen_run() if resume else self.pipeline.open_run(trigger)
        except BaseException:
            self._training.release()
            raise
        threading.Thread(target=self._run, args=(run_id,), name=f"run-{run_id}", daemon=True).start()
        return run_id

    def calibrate(self, domain: str | None = None, after_step: int = 0) -> list[dict[str, Any]]:
        """Fit temperatures and thresholds from what the live release showed; publish them when they changed.

        Args:
            domain: only this one.
            after_step: of this domain, only steps recorded after the one with this id.

        Returns per domain what ``GET /api/calibrations`` keeps: domain, release, thresholds and report.
        """
        self.writer.flush(10.0)
        self._keep_cost()
        with self._training:
            calibrations, version = self.pipeline.calibrate_live(self.engine.release, domain, after_step)
        self._follow_live()
        return [
            {"domain": name, "release": version, "thresholds": asdict(c.thresholds), "report": c.report}
            for name, c in calibrations.items()
        ]

    def rollback(self, to: int | None, reason: str) -> int:
        """Put an earlier release live again, here and now; return its version."""
        root = self.settings.releases.folder
        version = rollback(self.database, root, to, reason, draft=self.pair.draft, hashes=self.pair.hashes)
        self.writer.event("rollback", {"to": version, "reason": reason}, release=version)
        self._failed_versions.discard(version)
        self._follow_live()
        return version

    def forget(self, request_id: str) -> Forgotten:
        """Delete what is stored of a request's text: its traces and its measured chains."""
        self.writer.flush(10.0)
        return forget_request(self.traces, request_id)

    def _listeners(self) -> Listeners:
        records, writer = self.settings.records, self.writer
        if not records.enabled:
            return Listeners(self._pace.note, on_event=writer.event)

        def on_step(step: Step) -> None:
            self._pace.note(step)
            writer.on_step(step)

        return Listeners(
            on_step,
            writer.on_finish,
            writer.on_trace,
            writer.event,
            records.trace_top_k,
            records.trace_share,
            writer.on_evidence,
            frozenset(records.untraced_domains),
        )

    def _run(self, run_id: int) -> None:
        try:
            self.writer.flush(10.0)
            self.pipeline.retrain(run_id)
        except AdaptiveSpecError as error:
            logger.warning("run %d: %s", run_id, error)
        except Exception:
            logger.exception("run %d failed", run_id)
        finally:
            self._training.release()
        if not self._stopping.is_set():
            with contextlib.suppress(
                UnavailableError, SQLAlchemyError
            ):  # it stops just now, or the watcher comes to it
                self._follow_live()

    def _resume_interrupted(self) -> None:
        """Go on, once, with the run that the end of an earlier service has cut short."""
        try:
            for _ in range(_ENDING_SECONDS):  # its process notices by itself that its service is gone
                fail_orphans(self.database)
                if active_run(self.database) is None:
                    break
                if self._stopping.wait(1.0):
                    return
            run = self.pipeline.interrupted()
            if run is not None and not run.report.get("num_resumptions"):
                logger.info("run %d goes on from its checkpoint", self.retrain(resume=True))
        except (AdaptiveSpecError, SQLAlchemyError) as error:
            logger.warning("the interrupted run does not go on: %s", error)

    def _share_cores(self, training: bool) -> None:
        """While a run trains, decode on the cores it leaves, unless the operator has fixed the number of threads."""
        if self.settings.model.threads:
            return
        wanted = max(1, self._threads - self.settings.learning.threads) if training else self._threads
        self.engine.call(lambda: torch.set_num_threads(wanted))  # on the engine's thread: the number is kept per thread

    def _watch(self) -> None:
        while not self._stopping.wait(self.settings.releases.poll_seconds):
            try:
                self._follow_live()
            except Exception:
                logger.exception("the live release could not be read; the present one goes on")

    def _watch_drift(self) -> None:
        while not self._stopping.wait(self.settings.drift.poll_seconds if self._drift.caught_up else 0.05):
            try:
                self.look_for_drift()
            except SQLAlchemyError as error:
                self._drift.caught_up = True  # wait as long as between two looks
                logger.warning("drift is looked for again later: %s", error)
            except Exception:
                self._drift.caught_up = True
                logger.exception("drift could not be looked for")

    def look_for_drift(self) -> None:
        """Read what was recorded since the last look, and answer the drifts in it."""
        self._drift_answers.answer(self._drift.poll(self.engine.release))

    def _calibrate_after(self, domain: str, after_step: int) -> str:
        if self._training.locked():
            raise self._busy()
        for found in self.calibrate(domain, after_step):
            source, number = found["report"]["source"], found["report"]["num_observations"]
            return f"thresholds are {source}, from {number} observations after the change: release {found['release']}"
        return "nothing to fit"

    def _retrain_after(self) -> str:
        try:
            return f"run {self.retrain(DRIFT)} started"
        except RunDeclined as declined:
            raise RunError(declined.reason) from declined

    def _busy(self) -> RunError:
        running = active_run(self.database)
        return RunError(f"Run {running.id if running else '?'} is active; wait for it (adaptive-spec runs).")

    def _follow_live(self) -> None:
        """Swap in the live release when it is not the one that runs.  A bad one is refused and the old one goes on."""
        with self._following:
            self._follow(live_version(self.database))

    def _follow(self, version: int) -> None:
        if version == self.engine.release.version or version in self._failed_versions:
            return
        try:
            release = live_release(self.database, self.settings.releases.folder, hashes=self.pair.hashes)
            own = {domain: self._deltas(folder) for domain, folder in release.domain_adapters.items()}
            pause = self.engine.swap(release, self._deltas(release.adapter), own, release.vocabulary).result()
        except (ReleaseError, OSError) as error:
            self._failed_versions.add(version)
            logger.error("release %d refused: %s", version, error)
            self.writer.event("release_refused", {"reason": str(error)}, release=version)
            return
        logger.info("release %d is live after a pause of %.1f ms", release.version, pause * 1e3)
        self.writer.event("release_swapped", {"pause_seconds": pause}, release=release.version)

    def _deltas(self, adapter: str | None) -> dict[str, torch.Tensor]:
        return load_adapter_delta(Path(adapter), self.pair.draft) if adapter else {}

    def _known_cost(self) -> CostModel | None:
        """What an earlier life has measured here, unless it is too old or does not fit the present settings."""
        found = get_cost(self.database, self._cost_key())
        longest = timedelta(hours=self.settings.calibration.cost_hours)
        if found is None or datetime.now(UTC) - found.measured_at > longest:
            return None
        try:
            cost = CostModel.from_dict(found.model, self._cost_key())
        except ValueError as error:
            logger.warning("costs are measured anew: %s", error)
            return None
        decoder = self.settings.decoder
        fits = len(cost.step.verify_seconds) == decoder.max_chain_length + 1 and decoder.slots in cost.measured
        return cost if fits else None

    def _measure_cost(self) -> CostModel:
        cost = self.engine.measure_cost(self._cost_key(), repeats=3)
        save_cost(self.database, self._cost_key(), cost.to_dict())
        return cost

    def _keep_cost(self) -> None:
        """Store what steps have cost lately, and let calibration use it."""
        if (cost := self.engine.cost) is None:
            return
        self.pipeline.cost = cost
        try:
            save_cost(self.database, self._cost_key(), cost.to_dict())
        except SQLAlchemyError as error:
            logger.warning("what steps cost lately is not kept: %s", error)

    def _cost_key(self) -> str:
        model = self.settings.model
        return cost_key(
            target=model.target,
            draft=self.pair.hashes["draft"][:12],
            dtype=model.dtype,
            device=model.device,
            threads=self._threads,
            batch_size=1,
        )

    def _scheduled_retrain(self) -> None:
        with contextlib.suppress(RunError):
            self.retrain(SCHEDULE)

    def _look_for_trigger(self) -> None:
        """Start the run that volume or age call for.  While it has to wait, that is told once."""
        trigger = due(self._facts(), self.settings.schedule, datetime.now(UTC))
        if trigger is None:
            self._declined.clear()
        elif (reason := self._decline(trigger)) is None:
            self._declined.clear()
            self.retrain(trigger)
        elif (trigger, reason.kind) not in self._declined:
            self._declined.add((trigger, reason.kind))
            self._tell_declined(trigger, reason)

    def _decide(self, trigger: str, force: bool) -> None:
        if (reason := self._decline(trigger, force)) is not None:
            self._tell_declined(trigger, reason)
            raise RunDeclined(reason.reason)

    def _decline(self, trigger: str, force: bool = False) -> Decline | None:
        settings, now = self.settings, datetime.now(UTC)
        return decline(trigger, self._facts(), settings.schedule, settings.learning, now, force)

    def _tell_declined(self, trigger: str, reason: Decline) -> None:
        logger.info("retrain (%s): not now, because %s", trigger, reason.reason)
        detail = {"trigger": trigger, "kind": reason.kind, "reason": f"not now, because {reason.reason}"}
        add_event(self.database, RETRAIN_DECLINED, detail)

    def _facts(self) -> Facts:
        if not self._training.locked():  # a run of ours changes its process between training and publishing
            fail_orphans(self.database)
        active = active_run(self.database)
        learned_at = last_begun(self.database, ("passed", "refused"))
        return Facts(
            active_run=active.id if active else None,
            num_traces=count_traces(self.database),
            num_new_traces=count_traces(self.database, learned_at),
            learned_at=learned_at,
            last_run_at=last_begun(self.database),
        )

    def _scheduled_calibrate(self) -> None:
        self.calibrate()
