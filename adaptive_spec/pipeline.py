"""retrain(): traces -> distil -> calibrate -> rehearse -> gate -> publish, on one screen.

Distilling and scoring happen in a child process of lower priority; the parent judges and publishes.  Killing either
leaves a failed run, no release, and a folder ``runs/N`` beside the releases with which the run can go on.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.calibration.calibrate import KEPT, DomainCalibration, alike, calibrate
from adaptive_spec.calibration.cost import CostModel
from adaptive_spec.calibration.rules import with_rules
from adaptive_spec.core import POOLED, Release, Thresholds
from adaptive_spec.errors import GateRefused, ReleaseError, RunError, RunInterrupted
from adaptive_spec.learning.checkpoint import CHECKPOINT_NAME
from adaptive_spec.learning.goodput import serve, without_fold
from adaptive_spec.learning.heat import COLD_START, HeatFit
from adaptive_spec.learning.judge import Judgement, read_judgement
from adaptive_spec.learning.memory import KEEP_FREED_MEMORY
from adaptive_spec.learning.own import ADAPTER_NAME
from adaptive_spec.learning.run import PAUSE_NAME, REPORT_NAME
from adaptive_spec.learning.yielding import PaceMeter, Yielding
from adaptive_spec.records.calibrations import add_calibration
from adaptive_spec.records.database import Database
from adaptive_spec.records.evidence import RecordedChains, recorded_chains
from adaptive_spec.records.observations import Observations, ngram_acceptance, observations
from adaptive_spec.records.releases import same_draft
from adaptive_spec.records.run_log import log_output
from adaptive_spec.records.runs import (
    ACTIVE,
    RunRecord,
    claim_run,
    create_run,
    get_run,
    list_runs,
    reopen_run,
    update_run,
)
from adaptive_spec.releases.bundle import bundle_name, write_bundle
from adaptive_spec.releases.gate import gate
from adaptive_spec.releases.registry import live_release, next_version, publish, refuse
from adaptive_spec.releases.report import INTEGRITY, Check, GateReport
from adaptive_spec.releases.store import BundleStore
from adaptive_spec.settings import LearningSettings, Settings

RUNS_NAME = "runs"  # below the folder of releases
_KEPT_OUTPUT_BYTES = 100_000
_SETTINGS_NAME = "settings.json"


class Pipeline:
    """Makes releases.  One at a time: the caller holds the lock."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        cost: CostModel,
        hashes: Mapping[str, str],
        yielding: Yielding | None = None,
    ) -> None:
        self.yielding = yielding or Yielding(PaceMeter(), settings.learning.max_slowdown_share)
        self.database = database
        self.settings = settings
        self.cost = cost
        self.hashes = dict(hashes)
        self.store = BundleStore(settings.releases.folder, settings.releases.store)
        self._child: subprocess.Popen[bytes] | None = None
        self._cancelled: str | None = None  # why the child was told to end

    def open_run(self, trigger: str) -> int:
        """Write the row of a new run and return its id.  What interrupted runs have left is dropped.

        Raises:
            RunError: another process's run is active.
        """
        run_id = create_run(self.database, trigger, self.settings.learning.model_dump(mode="json"), alone=True)
        self._clear_up()
        return run_id

    def claim_run(self) -> int | None:
        """Queue the run that another process has asked for and return its id; None when there is none to begin now."""
        run_id = claim_run(self.database, self.settings.learning.model_dump(mode="json"))
        if run_id is not None:
            self._clear_up()
        return run_id

    def _clear_up(self) -> None:
        active = {str(run.id) for run in list_runs(self.database) if run.state in ACTIVE}
        for folder in self._runs.glob("*"):
            if folder.name not in active:
                shutil.rmtree(folder, ignore_errors=True)

    def interrupted(self) -> RunRecord | None:
        """The newest run, if its process was cut short here and has left a checkpoint."""
        for run in list_runs(self.database, 1):
            if run.state in ("failed", "cancelled") and (self._runs / str(run.id) / CHECKPOINT_NAME).exists():
                return run
        return None

    def reopen_run(self, *, ask: bool = False) -> int:
        """Queue the interrupted run again and return its id; ``retrain`` then goes on from its checkpoint.

        Args:
            ask: whoever leads to do that.

        Raises:
            RunError: there is none.
        """
        run = self.interrupted()
        if run is None:
            raise RunError("No run was interrupted lately that has left a checkpoint here. Start a new one.")
        reopen_run(self.database, run.id, ask=ask)
        return run.id

    def retrain(self, run_id: int) -> Release:
        """Distil, calibrate, gate and publish.  The run's row tells the outcome.

        Raises:
            RunInterrupted: the training process was killed, or ended with the service; ``reopen_run`` goes on.
            RunError: training failed.
            SQLAlchemyError: the database is away, and the row does not tell that the run has ended.
            GateRefused: the candidate is not better; the live release stays.
        """
        work = self._runs / str(run_id)
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        over, self._cancelled = True, None
        try:
            self._train(run_id, work)
            self._tell(run_id, "gate")
            judgement = read_judgement(work)
            live = live_release(self.database, self.store)
            calibrations = with_heats(self._calibrated(judgement.observations, live, {}), judgement.heats)
            version = next_version(self.database, self.store.folder)
            candidate = _Candidate(version, work, calibrations, live)
            self._tell(run_id, "rehearse")
            checks = [*self._rehearsed(run_id, candidate), self._of_the_live(candidate)]
            report = self._judged(judgement, live).with_checks(checks)
            self._end_if_cancelled(run_id, work)
            self._tell(run_id, "publish")
            self._write(candidate, report)
            if not report.passed:
                self._refuse(run_id, candidate, report)
            release = self._publish(version, report.to_dict())
            self._record(calibrations, version)
            self._update(run_id, state="passed", release=version, report=report.to_dict())
            return release
        except GateRefused:
            raise
        except RunInterrupted:
            over = not (work / CHECKPOINT_NAME).exists()
            raise
        except Exception as error:
            if isinstance(error, SQLAlchemyError):  # the database was away; the run may go on when it is back
                over = not (work / CHECKPOINT_NAME).exists()
            if self._row(run_id).state not in ("failed", "cancelled"):
                self._update(run_id, state="failed", error=f"{type(error).__name__}: {error}")
            raise
        finally:
            if over:
                shutil.rmtree(work, ignore_errors=True)

    def calibrate_live(
        self, live: Release, domain: str | None, after_step: int = 0
    ) -> tuple[dict[str, DomainCalibration], int]:
        """Fit thresholds to what the live release showed, and publish them as a release with the same adapter.

        Args:
            domain: only this one.
            after_step: forget what the domain showed up to the step of this id.

        Returns the calibrations and the version that now is live: the old one when nothing changed noticeably.
        """
        seen = observations(self.database, release=live.version)
        if domain is not None and after_step:
            seen.pop(domain, None)
            seen |= observations(self.database, release=live.version, domain=domain, after_step=after_step)
        fitted = self._calibrated(seen, live, self._evidence(live, domain, after_step))
        if domain is not None:
            fitted = {name: calibration for name, calibration in fitted.items() if name == domain}
        thresholds = {**live.thresholds, **{name: c.thresholds for name, c in fitted.items()}}
        learned = any(c.source != KEPT or c.report.get("rule", {}).get("num_requests") for c in fitted.values())
        if not learned or all(alike(thresholds[name], live.for_domain(name)) for name in thresholds):
            self._record(fitted, live.version)
            return fitted, live.version
        version = next_version(self.database, self.store.folder)
        write_bundle(
            self.store.folder,
            version,
            adapter=Path(live.adapter) if live.adapter else None,
            thresholds=thresholds,
            provenance={
                "parent": live.version,
                "hashes": self.hashes,
                "kind": "calibration",
                "cost": asdict(self.cost.step),
            },
            vocabulary=live.vocabulary,
            domain_adapters=_folders(live),
        )
        self.store.push(bundle_name(version))
        self._publish(version, {"kind": "calibration"}, reason="calibrated")
        self._record(fitted, version)
        return fitted, version

    def cancel(self, reason: str = "The service stopped.") -> None:
        """End the run under way, if there is one, with its process."""
        self._cancelled = reason
        if (child := self._child) is not None:
            child.send_signal(signal.SIGTERM)  # nothing happens to one that has ended

    def _calibrated(
        self, seen: Mapping[str, Observations], live: Release, evidence: Mapping[str, RecordedChains]
    ) -> dict[str, DomainCalibration]:
        fitted = calibrate(
            seen,
            self.cost.measured,
            self.settings.calibration,
            self.settings.decoder.max_chain_length,
            dict(live.thresholds),
            ngram=ngram_acceptance(self.database),
        )
        return with_rules(fitted, evidence, self.settings.verification, live.thresholds)

    def _evidence(self, live: Release, domain: str | None, after_step: int) -> dict[str, RecordedChains]:
        """What was measured of the live draft's chains, under whichever thresholds."""
        releases = same_draft(self.database, live.version)
        found = recorded_chains(self.database, releases=releases)
        if domain is not None and after_step:
            found.pop(domain, None)
            found |= recorded_chains(self.database, releases=releases, domain=domain, after_step=after_step)
        return found

    @property
    def _runs(self) -> Path:
        return self.store.folder / RUNS_NAME

    def _train(self, run_id: int, work: Path) -> None:
        """Run the child to its end, under the learning settings that the run began with."""
        learning = LearningSettings.model_validate(self._row(run_id).settings)
        (work / PAUSE_NAME).unlink(missing_ok=True)
        settings_file = work / _SETTINGS_NAME
        settings_file.touch(mode=0o600)  # a database URL may hold a password
        settings_file.write_text(self.settings.model_copy(update={"learning": learning}).model_dump_json())
        live_release(self.database, self.store)  # fetches it for the child, if it was made elsewhere
        arguments = ("--run-id", str(run_id), "--out", str(work))
        status, serving = self._run_child(run_id, work, "adaptive_spec.learning.run", *arguments)
        self._update(run_id, report={"serving": serving})
        if status == 0:
            return
        self._end_if_cancelled(run_id, work)
        advice = _advice(work)
        if status < 0:
            self._update(run_id, state="failed", error=f"Killed by signal {-status}. {advice}")
            raise RunInterrupted(f"Run {run_id} was killed by signal {-status}. {advice}")
        told = self._row(run_id).error
        tail = (work / "log").read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
        reason = told or f"exit status {status}: {tail[0]}"
        self._update(run_id, state="failed", error=reason)
        raise RunError(f"Run {run_id} failed: {reason}")

    def _run_child(self, run_id: int, work: Path, module: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Run one of our modules to its end in a process of its own; return its status, and what it cost serving."""
        environment = {**os.environ, **KEEP_FREED_MEMORY, "TOKENIZERS_PARALLELISM": "false"}
        environment["OMP_NUM_THREADS"] = str(self.settings.learning.threads)
        with open(work / "log", "wb") as log:
            child = self._child = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--settings", str(work / _SETTINGS_NAME)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        try:
            self._update(run_id, pid=child.pid)
            serving = self.yielding.follow(partial(_ended, child), partial(_pause, work / PAUSE_NAME))
            status = child.wait()
            self._update(run_id, pid=os.getpid())
            self._keep_output(run_id, work)
        finally:
            child.kill()  # the database was away: nobody would follow it any more
            child.wait()
            self._child = None
        return status, asdict(serving)

    def _keep_output(self, run_id: int, work: Path) -> None:
        """Add what the child has printed to the run's log."""
        with open(work / "log", "rb") as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _KEPT_OUTPUT_BYTES))
            text = output.read().decode(errors="replace")
        self.database.outlast(lambda: log_output(self.database, run_id, text), lambda: bool(self._cancelled))

    def _end_if_cancelled(self, run_id: int, work: Path) -> None:
        asked = self._row(run_id).cancel_reason  # the watcher need not have seen it yet
        if reason := self._cancelled or (asked and f"Cancelled: {asked}."):
            self._update(run_id, state="cancelled", error=f"{reason} {_advice(work)}")
            raise RunInterrupted(f"Run {run_id} was cancelled. {_advice(work)}")

    def _judged(self, judgement: Judgement, live: Release) -> GateReport:
        """The gate's checks on held-out requests; each is judged by thresholds that others taught."""

        def learnt(fold: int) -> Mapping[str, Thresholds]:
            seen = without_fold(judgement.observations, fold)
            return {name: found.thresholds for name, found in self._calibrated(seen, live, {}).items()}

        cost, decoder = self.cost.step, self.settings.decoder
        before = serve(judgement.before, lambda fold: live.thresholds, cost, decoder)
        after = serve(judgement.after, learnt, cost, decoder)
        return gate(before, after, self.settings.releases.max_domain_loss_share)

    def _rehearsed(self, run_id: int, candidate: "_Candidate") -> list[Check]:
        """The checks of a trial bundle that stays in the run's folder."""
        told, trial = candidate.work / "rehearsal.json", candidate.work / "trial"
        try:
            bundle = self._write_bundle(trial, candidate, {})
        except ReleaseError as error:
            return [Check(INTEGRITY, False, str(error))]
        self._end_if_cancelled(run_id, candidate.work)
        arguments = ("--bundle", str(bundle), "--out", str(told))
        status, _ = self._run_child(run_id, candidate.work, "adaptive_spec.rehearsal", *arguments)
        self._end_if_cancelled(run_id, candidate.work)
        shutil.rmtree(trial, ignore_errors=True)
        if status == 0:
            return [Check(**values) for values in json.loads(told.read_text(encoding="utf-8"))]
        tail = (candidate.work / "log").read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
        return [Check(INTEGRITY, False, f"its process ended with status {status}: {tail[0]}")]

    def _of_the_live(self, candidate: "_Candidate") -> Check:
        """Whether what is live drafts as the release that training began with: else it was judged beside another."""
        began = int(candidate.described["provenance"]["parent"])
        live = candidate.live.version
        figures = {"parent": began, "live": live}
        if began in same_draft(self.database, live):
            return Check("parent", True, f"release {live}, which is live, drafts as release {began} did", figures)
        return Check(
            "parent", False, f"it was judged beside release {began}, and {live} is live now. Retrain.", figures
        )

    def _write(self, candidate: "_Candidate", report: GateReport) -> None:
        """Write the bundle with the gate's report, here and in the store, unless there is no sound one."""
        if any(check.name == INTEGRITY and not check.passed for check in report.checks):
            return
        self._write_bundle(self.store.folder, candidate, report.to_dict())
        self.store.push(bundle_name(candidate.version))

    def _write_bundle(self, root: Path, candidate: "_Candidate", report: Mapping[str, Any]) -> Path:
        described = candidate.described
        return write_bundle(
            root,
            candidate.version,
            adapter=candidate.work / ADAPTER_NAME,
            thresholds={name: found.thresholds for name, found in candidate.calibrations.items()},
            provenance={
                **described["provenance"],
                "distil": described["distil"],
                "cost": asdict(self.cost.step),
                "gate": report,
            },
            vocabulary=described["vocabulary"],
            domain_adapters={domain: Path(adapter) for domain, adapter in described["domain_adapters"].items()},
        )

    def _publish(self, version: int, report: dict[str, Any], reason: str = "published") -> Release:
        """Make it live, or put it on trial first where the setting says so."""
        share = self.settings.releases.canary_share
        root = self.store.folder
        return publish(self.database, root, version, report, reason=reason, hashes=self.hashes, canary_share=share)

    def _refuse(self, run_id: int, candidate: "_Candidate", report: GateReport) -> None:
        """Record the refusal.  What was written of the bundle stays, should a person want it nonetheless."""
        version, name = candidate.version, bundle_name(candidate.version)
        folder = name if (self.store.folder / name).exists() else None
        refuse(self.database, version, candidate.live.version, report.to_dict(), folder)
        self._update(run_id, state="refused", release=version, report=report.to_dict())
        raise GateRefused(f"Release {version} was refused: {'; '.join(report.reasons)}")

    def _record(self, calibrations: Mapping[str, DomainCalibration], version: int) -> None:
        for name, calibration in calibrations.items():
            add_calibration(self.database, name, calibration.thresholds, calibration.report, version)

    def _row(self, run_id: int) -> RunRecord:
        return self.database.outlast(lambda: get_run(self.database, run_id), lambda: bool(self._cancelled))

    def _update(self, run_id: int, **changes: Any) -> None:
        """Change the run's row.  A database that is away is waited for: else the row says for ever that it runs."""
        self.database.outlast(lambda: update_run(self.database, run_id, **changes), lambda: bool(self._cancelled))

    def _tell(self, run_id: int, phase: str) -> None:
        self._update(run_id, progress={"phase": phase})


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What a run has made, and the release that is live beside it."""

    version: int
    work: Path
    calibrations: Mapping[str, DomainCalibration]
    live: Release

    @property
    def described(self) -> dict[str, Any]:
        """What the training process says of it."""
        found: dict[str, Any] = json.loads((self.work / REPORT_NAME).read_text(encoding="utf-8"))
        return found


def _advice(work: Path) -> str:
    saved = (work / CHECKPOINT_NAME).exists()
    return "`adaptive-spec retrain --resume` goes on from its checkpoint." if saved else "Start a new run."


def _ended(child: "subprocess.Popen[bytes]", seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _pause(flag: Path, wanted: bool) -> None:
    """Not SIGSTOP: a process that is stopped within a transaction would keep everybody else out of SQLite."""
    if wanted:
        flag.touch()
    else:
        flag.unlink(missing_ok=True)


def with_heats(
    calibrations: Mapping[str, DomainCalibration], heats: Mapping[str, HeatFit]
) -> dict[str, DomainCalibration]:
    """Add the sampling temperatures of a new draft; a domain that could not be judged draws as all together do."""
    pooled = heats.get(POOLED)
    found = {}
    for domain, calibration in calibrations.items():
        own = heats.get(domain)
        fit = own if own is not None and own.reason != COLD_START else pooled
        thresholds = replace(calibration.thresholds, sampling_temperature=fit.temperature if fit else 1.0)
        report = calibration.report | {"sampling": asdict(fit) if fit else None}
        found[domain] = DomainCalibration(thresholds, report)
    return found


def _folders(live: Release) -> dict[str, Path]:
    """The adapters of domains, which a release with the same shared adapter carries on."""
    return {domain: Path(folder) for domain, folder in live.domain_adapters.items()}
