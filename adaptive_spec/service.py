"""The whole program in one object: models, engine, records, releases, scheduler.  Front ends hold one of these.

Reads like this: ``start`` brings the database up to date, loads the models, puts the live release on and begins to
decode; a watcher notices releases that anyone published and swaps them in, another one drifts in what is recorded;
``retrain`` and ``calibrate`` make releases.

Of several processes on one database, the one that leads does all but decode, and the others ask it through the records;
``cluster.role`` says whether a process decodes, and whether it may lead.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Self

import torch
from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.calibration.answer import DriftAnswers
from adaptive_spec.calibration.cost import CostModel, cost_key
from adaptive_spec.calibration.override import override_by_hand
from adaptive_spec.calibration.watch import DriftWatch, StreamState
from adaptive_spec.canary import CanaryWatch
from adaptive_spec.cluster.idle import IdleEngine
from adaptive_spec.cluster.leadership import Leadership
from adaptive_spec.cluster.membership import Membership
from adaptive_spec.core import FinishedRequest, Step, ThresholdOverride
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.decoding.overrides import Overrides
from adaptive_spec.errors import (
    AdaptiveSpecError,
    NotLeaderError,
    ReleaseError,
    RunDeclined,
    RunError,
    UnavailableError,
)
from adaptive_spec.learning.triggers import DRIFT, GAIN_MEMORY, SCHEDULE, Decline, Facts, decline, due
from adaptive_spec.learning.yielding import PaceMeter, Yielding
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.pipeline import Pipeline
from adaptive_spec.pruning import prune
from adaptive_spec.records.canaries import ABORTED, PROMOTED, end_canary, running_canary, standing
from adaptive_spec.records.costs import CostRecord, get_cost, list_costs, save_cost
from adaptive_spec.records.database import Database
from adaptive_spec.records.decoders import list_decoders
from adaptive_spec.records.events import add_event
from adaptive_spec.records.jobs import claim_job
from adaptive_spec.records.leadership import leader_lock
from adaptive_spec.records.notify import Listener
from adaptive_spec.records.overrides import OverrideRecord, clear_override, end_expired, standing_overrides
from adaptive_spec.records.quota import Quota
from adaptive_spec.records.retention import Forgotten, forget_request
from adaptive_spec.records.rollups import roll_up
from adaptive_spec.records.runs import (
    ACTIVE,
    active_run,
    cancel_run,
    count_traces,
    fail_orphans,
    get_run,
    last_begun,
    last_gains,
    request_run,
    requested_run,
    update_run,
)
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.records.writer import Writer
from adaptive_spec.releases.adapter import load_release
from adaptive_spec.releases.registry import put_live, rollback, stored_release
from adaptive_spec.scheduler import Scheduler
from adaptive_spec.settings import ServerSettings, Settings
from adaptive_spec.telemetry.logs import about
from adaptive_spec.telemetry.telemetry import Telemetry
from adaptive_spec.version import package_version

logger = logging.getLogger(__name__)

RETRAIN_DECLINED = "retrain_declined"
_ENDING_SECONDS = 60
_KEEP_COST_SECONDS = 300.0
_WAS_AWAY = "The database was away. Start a new run, or go on with this one (--resume)."


class Service:
    """Start it, submit to ``engine``, stop it; or use it as a context manager, which starts and stops it."""

    pair: ModelPair  # only where it decodes
    traces: TraceStore
    writer: Writer
    engine: Engine | IdleEngine
    pipeline: Pipeline

    def __init__(self, settings: Settings, pair: ModelPair | None = None) -> None:
        self.settings = settings
        self.ready = False
        self.decodes = settings.cluster.role != "trainer"
        self.telemetry = Telemetry(settings)
        self._given_pair = pair
        self._canary: CanaryWatch | None = None  # only where it decodes
        self.database = Database(settings.records.url)
        self._stopping = threading.Event()
        self._training = threading.Lock()
        self._following = threading.Lock()  # a swap decided on an older reading must not land after a newer one
        self._look_now = threading.Event()  # there may be another live release, or a run that was asked for
        self._listener = Listener(self.database, self._look_now.set)
        self._leadership = Leadership(
            leader_lock(self.database), settings.cluster.heartbeat_seconds, won=self._take_lead, lost=self._lose_lead
        )
        self._watchers = [threading.Thread(target=self._watch, name="release-watcher", daemon=True)]
        self._drift = DriftWatch(self.database, settings.drift)
        self._drift_answers = DriftAnswers(
            self.database, settings.drift, calibrate=self._calibrate_after, retrain=self._retrain_after
        )
        if settings.drift.enabled:
            self._watchers.append(threading.Thread(target=self._watch_drift, name="drift-watcher", daemon=True))
        self._scheduler = Scheduler(
            settings.schedule,
            claim=partial(claim_job, self.database),
            retrain=self._scheduled_retrain,
            calibrate=self._scheduled_calibrate,
            look=self._look_for_trigger,
            roll_up=self._scheduled_roll_up,
            prune=self._scheduled_prune,
        )
        self._pace = PaceMeter()
        self._declined: set[tuple[str, str]] = set()  # what volume and age were told lately
        self._failed_versions: set[int] = set()
        self._overrides: tuple[tuple[str, ThresholdOverride, datetime], ...] = ()  # that the engine drafts under

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def leads(self) -> bool:
        """Whether this process is the one that trains, calibrates and runs what is due."""
        return self._leadership.leads

    @property
    def last_sign(self) -> float | None:
        """When a sign of life last reached the database, in seconds since the epoch."""
        return self._membership.last_sign if hasattr(self, "_membership") else None

    @property
    def drift_states(self) -> tuple[StreamState, ...]:
        """Where each stream stands that this process watches: all, while it leads."""
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
        cost = self._open_engine(self._given_pair or load_pair(self.settings.model), progress)
        yielding = Yielding(self._pace, self.settings.learning.max_slowdown_share, self._share_cores)
        self.pipeline = Pipeline(self.database, self.settings, cost, self.hashes, yielding)
        self._membership = Membership(
            self.database,
            self.settings.cluster,
            url=_url(self.settings.server),
            version=package_version(),
            hashes=self.hashes,
            release=lambda: self.engine.release.version,
            leads=lambda: self.leads,
        )
        progress("live release")
        self._follow_live()
        self._follow_overrides()
        for watcher in self._watchers:
            watcher.start()
        self._listener.start()
        self._scheduler.start()
        if self.settings.cluster.role != "decoder":
            self._leadership.start()
        self._membership.start()
        self.ready = True

    def _open_engine(self, pair: ModelPair, progress: Callable[[str], None]) -> CostModel:
        """Begin to decode, or only remember of the models what training needs; return what a step costs."""
        self.hashes, self.draft, self._tokenizer = pair.hashes, pair.draft, pair.tokenizer
        progress("cost of a step")
        cost = self._known_cost()
        if not self.decodes and cost is not None:
            self.engine = IdleEngine()
            return cost
        engine = Engine(pair, self.settings.decoder, self._listeners(), verification=self.settings.verification)
        self.engine = engine
        engine.start()
        cost = cost or self._measure_cost(engine)
        if self.decodes:
            self.pair = pair
            engine.price(cost)
            ended = self.telemetry.learning.canary_ended
            self._canary = CanaryWatch(self.database, self.settings, engine, self._loaded, ended)
        else:  # no decoder has measured yet
            engine.stop()
            self.engine = IdleEngine()
        return cost

    def drain(self) -> None:
        """Begin to stop, and return at once: take no more requests, let running ones end as ``Engine.drain`` says."""
        self.ready = False
        if hasattr(self, "engine"):
            self.engine.drain()

    def stop(self) -> None:
        """Drain, write out what was recorded, end every thread and a running training process."""
        self.drain()
        self._stopping.set()
        self._look_now.set()
        self._scheduler.stop()
        self._leadership.stop()
        if hasattr(self, "pipeline"):
            self.pipeline.cancel()
        if hasattr(self, "engine"):
            self.engine.stop()
        for watcher in self._watchers:
            if watcher.ident is not None:
                watcher.join()
        self._listener.stop()
        with self._training:  # a run that was cancelled writes its last row before the database closes
            if hasattr(self, "writer"):
                self._keep_cost()
                self.writer.close()
            self._leadership.release()
            if hasattr(self, "_membership"):
                self._membership.stop()
            self.database.close()
            self.telemetry.spans.close()

    def retrain(self, trigger: str = "person", *, resume: bool = False, force: bool = False) -> int:
        """Start a training run in its own process, or ask the process that leads for one; return its id.

        Args:
            trigger: one of ``learning.triggers.AUTOMATIC``, of which more is asked, or what a person writes.
            resume: go on with the run that was interrupted last, under its own trigger.
            force: also with too little data.

        Raises:
            RunDeclined: none makes sense now; the event ``retrain_declined`` says so, too.
            RunError: one is running already, or there is none to go on with.
        """
        if resume:
            self._refuse_beside_a_trial()
        else:
            self.writer.flush(5.0)
            self._decide(trigger, force)
        if not self.leads:
            return self.pipeline.reopen_run(ask=True) if resume else request_run(self.database, trigger)
        run_id = self._begin(self.pipeline.reopen_run if resume else partial(self.pipeline.open_run, trigger))
        assert run_id is not None
        return run_id

    def cancel_run(self, run_id: int, reason: str) -> str:
        """Have a run ended, also one of another process, and return its state; ``_heed_cancellation`` does it.

        Raises:
            RunError: it is unknown, or has ended.
        """
        state = cancel_run(self.database, run_id, reason)
        self._look_now.set()
        return state

    def _begin(self, ready: Callable[[], int | None]) -> int | None:
        """Start the run that is made ready meanwhile, if there is one; return its id.

        Raises:
            RunError: this process trains or calibrates already, or what ``ready`` raises.
        """
        if not self._training.acquire(blocking=False):
            raise self._busy()
        try:
            run_id = ready()
        except BaseException:
            self._training.release()
            raise
        if run_id is None:
            self._training.release()
        else:
            threading.Thread(target=self._run, args=(run_id,), name=f"run-{run_id}", daemon=True).start()
        return run_id

    def calibrate(self, domain: str | None = None, after_step: int = 0) -> list[dict[str, Any]]:
        """Fit temperatures and thresholds from what the live release showed; publish them when they changed.

        Args:
            domain: only this one.
            after_step: of this domain, only steps recorded after the one with this id.

        Returns per domain what ``GET /api/calibrations`` keeps: domain, release, thresholds and report.

        Raises:
            NotLeaderError: another process leads.
        """
        if not self.leads:
            raise self._not_leading()
        self.writer.flush(10.0)
        self._keep_cost()
        with self._training:
            self._refuse_beside_a_trial()
            calibrations, version = self.pipeline.calibrate_live(self.engine.release, domain, after_step)
        self._follow_live()
        return [
            {"domain": name, "release": version, "thresholds": asdict(c.thresholds), "report": c.report}
            for name, c in calibrations.items()
        ]

    def rollback(self, to: int | None, reason: str) -> int:
        """Put an earlier release live again, here and now; return its version."""
        store = self.pipeline.store
        version = rollback(self.database, store, to, reason, draft=self.draft, hashes=self.hashes)
        self.writer.event("rollback", {"to": version, "reason": reason}, release=version)
        self._failed_versions.discard(version)
        self._follow_live()
        return version

    def end_canary(self, promote: bool, reason: str) -> int:
        """Promote the release that is on trial, or roll it back, here and now; return the live version.

        Raises:
            ReleaseError: none is.
        """
        canary = running_canary(self.database)
        if canary is None:
            raise ReleaseError("No release is on trial. `adaptive-spec releases canary` shows past trials.")
        end_canary(self.database, canary.id, PROMOTED if promote else ABORTED, reason, {})
        self._follow_live()
        return self.engine.release.version

    def publish(self, version: int, reason: str, *, force: bool = False) -> int:
        """Put a release live that a person named, here and now; ``force``: also over the gate's refusal.

        Raises:
            ReleaseError: as ``releases.registry.put_live``.
        """
        store = self.pipeline.store
        put_live(self.database, store, version, reason, force=force, draft=self.draft, hashes=self.hashes)
        self._failed_versions.discard(version)
        self._follow_live()
        return version

    def override_thresholds(
        self, domain: str, override: ThresholdOverride, reason: str, hours: float | None = None
    ) -> OverrideRecord:
        """Set thresholds of a domain by hand, on every decoder of the database, until they expire.

        Raises:
            RequestError: as ``calibration.override.override_by_hand``.
        """
        record = override_by_hand(self.database, self.settings, domain, override, reason, hours)
        self._follow_overrides()
        return record

    def clear_override(self, domain: str, reason: str) -> bool:
        """Give a domain its release's thresholds back; False when no override of it is in force."""
        cleared = clear_override(self.database, domain, reason)
        self._follow_overrides()
        return cleared

    def forget(self, request_id: str) -> Forgotten:
        """Delete what is stored of a request's text: its traces and its measured chains."""
        self.writer.flush(10.0)
        return forget_request(self.traces, request_id)

    def _listeners(self) -> Listeners:
        records, writer = self.settings.records, self.writer
        traffic, spans = self.telemetry.traffic, self.telemetry.spans

        def on_step(step: Step) -> None:
            writer.on_step(step)
            self._pace.note(step)
            traffic.on_step(step)

        def on_finish(request: FinishedRequest) -> None:
            writer.on_finish(request)
            traffic.on_finish(request)
            spans.on_finish(request)

        if not records.enabled:  # then the writer passes over them
            return Listeners(on_step, on_finish, on_event=writer.event)
        return Listeners(
            on_step,
            on_finish,
            writer.on_trace,
            writer.event,
            records.trace_top_k,
            records.trace_share,
            writer.on_evidence,
            frozenset(records.untraced_domains),
        )

    def _run(self, run_id: int) -> None:
        with about(run_id=run_id), self.telemetry.spans.span("training run", run_id=run_id):
            self._learn(run_id)

    def _learn(self, run_id: int) -> None:
        began = time.monotonic()
        try:
            self.writer.flush(10.0)
            self.pipeline.retrain(run_id)
        except AdaptiveSpecError as error:
            logger.warning("run %d: %s", run_id, error)
        except SQLAlchemyError as error:
            logger.warning("run %d ended without the database: %s", run_id, error)
            self._record_end(run_id)
        except Exception:
            logger.exception("run %d failed", run_id)
        finally:
            self._count_run(run_id, time.monotonic() - began)
            self._training.release()
        if not self._stopping.is_set():
            with contextlib.suppress(UnavailableError, SQLAlchemyError):  # it stops just now; the watcher looks again
                self._follow_live()

    def _count_run(self, run_id: int, seconds: float) -> None:
        try:
            run = get_run(self.database, run_id)
        except (AdaptiveSpecError, SQLAlchemyError):  # what it came to is not known; it has not come to anything good
            self.telemetry.learning.run_ended("failed", seconds, None)
            return
        outcome = "failed" if run.state in ACTIVE else run.state
        self.telemetry.spans.note(trigger=run.trigger, outcome=outcome, release=run.release)
        self.telemetry.learning.run_ended(outcome, seconds, (run.report.get("gain") or {}).get("gain_share"))

    def _record_end(self, run_id: int) -> None:
        """Wait for the database and mark a run as failed that ended while it was away."""
        while not self._stopping.wait(1.0):
            try:
                if get_run(self.database, run_id).state in ACTIVE:
                    update_run(self.database, run_id, state="failed", error=_WAS_AWAY)
            except SQLAlchemyError:
                continue
            return

    def _take_lead(self) -> None:
        """Do from now on what one of all processes does."""
        if self._stopping.is_set():
            return
        self._drift = DriftWatch(self.database, self.settings.drift)  # what others have told is in the records
        self._scheduler.resume()
        self._membership.tell()
        self._look_now.set()
        resumer = threading.Thread(target=self._resume_interrupted, name="run-resumer", daemon=True)
        self._watchers.append(resumer)
        resumer.start()

    def _lose_lead(self) -> None:
        """Leave that to another process; what this one has begun must not go on beside it."""
        self._scheduler.pause()
        self._membership.tell()
        self.pipeline.cancel("The process that ran it no longer leads.")

    def _not_leading(self) -> NotLeaderError:
        found = list_decoders(self.database, self.settings.cluster.gone_seconds)
        leader = next((decoder for decoder in found if decoder.state == "leads"), None)
        if leader is None:
            return NotLeaderError("No process leads now. Start one: adaptive-spec serve --role trainer.")
        return NotLeaderError(f"Process {leader.pid} on {leader.host} leads. Ask it: --url {leader.url}")

    def _fail_orphans(self) -> None:
        if not self._training.locked():  # a run of ours changes its process between training and publishing
            fail_orphans(self.database, gone_seconds=self.settings.cluster.gone_seconds)

    def _resume_interrupted(self) -> None:
        """Go on, once, with the run that the end of an earlier process has cut short."""
        try:
            for _ in range(_ENDING_SECONDS):  # its process notices by itself that its service is gone
                self._fail_orphans()
                if active_run(self.database) is None and not self._training.locked():
                    break
                if self._stopping.wait(1.0) or not self.leads:
                    return
            else:
                return
            run = self.pipeline.interrupted()
            if run is not None and run.cancel_reason is None and not run.report.get("num_resumptions"):
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
        """Look for another live release and for runs that were asked for: when told to, else now and then."""
        told, kept = False, time.monotonic()
        while True:
            self._look_now.wait(self.settings.releases.poll_seconds)
            self._look_now.clear()
            if self._stopping.is_set():
                return
            try:
                self._follow_live()
                self._follow_overrides()
                self._heed_cancellation()
                self._claim_requested()
                self._judge_canary()
                if time.monotonic() >= kept + _KEEP_COST_SECONDS:
                    self._keep_cost()
                    kept = time.monotonic()
                told = False
            except SQLAlchemyError as error:
                if not told:
                    logger.warning("the live release cannot be looked up, the present one goes on: %s", error)
                told = True
            except Exception:
                logger.exception("the live release could not be read; the present one goes on")

    def _heed_cancellation(self) -> None:
        """End the run of this process that somebody has cancelled, here or elsewhere."""
        if self._training.locked() and (run := active_run(self.database)) is not None and run.cancel_reason is not None:
            self.pipeline.cancel(f"Cancelled: {run.cancel_reason}.")

    def _claim_requested(self) -> None:
        """Start the run that another process has asked for."""
        if not self.leads or self._training.locked() or requested_run(self.database) is None:
            return
        self._fail_orphans()
        with contextlib.suppress(RunError):  # a calibration has just begun; it will be looked for again
            self._begin(self.pipeline.claim_run)

    def _watch_drift(self) -> None:
        while not self._stopping.wait(self.settings.drift.poll_seconds if self._drift.caught_up else 0.05):
            if not self.leads:
                self._drift.caught_up = True  # with what is its to read: nothing
                continue
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
        drifts = self._drift.poll(self.engine.release)
        for drift in drifts:
            self.telemetry.learning.drifted(drift.source.domain, drift.stream, drift.shift.direction)
        self._drift_answers.answer(drifts)

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

    def _refuse_beside_a_trial(self) -> None:
        if (canary := running_canary(self.database)) is not None:
            raise RunError(
                f"Release {canary.release} is on trial. Wait for it, or end it (adaptive-spec releases canary)."
            )

    def _busy(self) -> RunError:
        running = active_run(self.database)
        return RunError(f"Run {running.id if running else '?'} is active; wait for it (adaptive-spec runs).")

    def _follow_live(self) -> None:
        """Run the releases that are to run, live and on trial.  A bad one is refused and the old one goes on."""
        with self._following:
            live, canary = standing(self.database)
            if live != self.engine.release.version and live not in self._failed_versions:
                with self.telemetry.spans.span("swap", release=live):
                    self._follow(live)
            if self._canary is not None:
                self._canary.follow(canary)

    def _follow_overrides(self) -> None:
        """Draft under the thresholds that persons have set, as they stand now."""
        with self._following:
            end_expired(self.database)
            standing = standing_overrides(self.database)
            seen = tuple((each.domain, each.override, each.until) for each in standing)
            if seen != self._overrides:
                self.engine.override(Overrides({each.domain: (each.override, each.seconds_left) for each in standing}))
                self._overrides = seen

    def _judge_canary(self) -> None:
        with self._following:
            ended = self._canary is not None and self._canary.judge()
        if ended:
            self._follow_live()

    def _follow(self, version: int) -> None:
        try:
            canary = self.engine.canary
            if canary is not None and canary.version == version:
                pause = self.engine.end_canary(promote=True).result()
            else:
                pause = self.engine.swap(self._loaded(version)).result()
        except (ReleaseError, OSError) as error:
            self._failed_versions.add(version)
            self.telemetry.learning.swap_refused()
            self.telemetry.spans.note(refused=str(error))
            logger.error("release %d refused: %s", version, error)
            self.writer.event("release_refused", {"reason": str(error)}, release=version)
            return
        self.telemetry.spans.note(pause_seconds=pause)
        self._membership.tell()
        logger.info("release %d is live after a pause of %.1f ms", version, pause * 1e3)
        self.writer.event("release_swapped", {"pause_seconds": pause}, release=version)

    def _loaded(self, version: int) -> LoadedRelease:
        """A release, its bundle checked; with its updates where something is decoded."""
        release = stored_release(self.database, self.pipeline.store, version, hashes=self.hashes)
        return load_release(release, self.draft) if self.decodes else LoadedRelease(release)

    def _known_cost(self) -> CostModel | None:
        """What an earlier life has measured here, unless it is too old or does not fit the present settings.

        Where nothing is decoded: what decoders of the same models have measured last, wherever they run.
        """
        found = self._recorded_cost()
        longest = timedelta(hours=self.settings.calibration.cost_hours)
        if found is None or datetime.now(UTC) - found[1].measured_at > longest:
            return None
        try:
            cost = CostModel.from_dict(found[1].model, found[0])
        except ValueError as error:
            logger.warning("costs are measured anew: %s", error)
            return None
        decoder = self.settings.decoder
        fits = len(cost.step.verify_seconds) == decoder.max_chain_length + 1 and decoder.slots in cost.measured
        return cost if fits else None

    def _recorded_cost(self) -> tuple[str, CostRecord] | None:
        own = get_cost(self.database, self._cost_key())
        if own is not None or self.decodes:
            return None if own is None else (self._cost_key(), own)
        model = self.settings.model
        same_models = f"|{model.target}|{self.hashes['draft'][:12]}|{model.dtype}|"
        return next((found for found in list_costs(self.database).items() if same_models in found[0]), None)

    def _measure_cost(self, engine: Engine) -> CostModel:
        cost = engine.measure_cost(self._cost_key(), repeats=3)
        save_cost(self.database, self._cost_key(), cost.to_dict())
        return cost

    def _keep_cost(self) -> None:
        """Store what steps have cost lately, or read what decoders have stored, and let calibration use it."""
        if not hasattr(self, "pipeline"):
            return
        try:
            if (cost := self.engine.cost) is None:
                self.pipeline.cost = self._known_cost() or self.pipeline.cost
                return
            self.pipeline.cost = cost
            save_cost(self.database, self._cost_key(), cost.to_dict())
        except SQLAlchemyError as error:
            logger.warning("what steps cost lately is not kept: %s", error)

    def _cost_key(self) -> str:
        model = self.settings.model
        return cost_key(
            target=model.target,
            draft=self.hashes["draft"][:12],
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
        if self.leads:
            self._fail_orphans()
        active = active_run(self.database)
        learned_at = last_begun(self.database, ("passed", "refused"))
        canary = running_canary(self.database)
        return Facts(
            canary=canary.release if canary else None,
            active_run=active.id if active else None,
            num_traces=count_traces(self.database),
            num_new_traces=count_traces(self.database, learned_at),
            learned_at=learned_at,
            last_run_at=last_begun(self.database),
            gains=last_gains(self.database, datetime.now(UTC) - GAIN_MEMORY),
        )

    def _scheduled_calibrate(self) -> None:
        try:
            self.calibrate()
        except RunError as error:
            logger.info("calibration: not now, because %s", error)

    def _scheduled_roll_up(self) -> None:
        roll_up(self.database, self._stopping.is_set)

    def _scheduled_prune(self) -> None:
        if pruned := prune(self.database, self.settings, stopped=self._stopping.is_set):
            logger.info("pruned: %s", pruned)


def _url(server: ServerSettings) -> str:
    """Where other machines would ask this one."""
    everywhere = server.host in ("0.0.0.0", "::", "")
    host = socket.gethostname() if everywhere else server.host
    return f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
