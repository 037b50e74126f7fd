"""retrain(): traces -> distil -> calibrate -> gate -> publish, on one screen.

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
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from adaptive_spec.calibration.calibrate import KEPT, DomainCalibration, alike, calibrate
from adaptive_spec.calibration.cost import CostModel
from adaptive_spec.calibration.rules import with_rules
from adaptive_spec.core import POOLED, Release
from adaptive_spec.errors import GateRefused, RunError, RunInterrupted
from adaptive_spec.learning.checkpoint import CHECKPOINT_NAME
from adaptive_spec.learning.heat import COLD_START, HeatFit
from adaptive_spec.learning.judge import read_judgement
from adaptive_spec.learning.run import ADAPTER_NAME, PAUSE_NAME, REPORT_NAME
from adaptive_spec.learning.yielding import PaceMeter, Yielding
from adaptive_spec.records.calibrations import add_calibration
from adaptive_spec.records.database import Database
from adaptive_spec.records.evidence import RecordedChains, recorded_chains
from adaptive_spec.records.observations import Observations, ngram_acceptance, observations
from adaptive_spec.records.releases import same_draft
from adaptive_spec.records.runs import ACTIVE, RunRecord, create_run, get_run, list_runs, reopen_run, update_run
from adaptive_spec.releases.bundle import write_bundle
from adaptive_spec.releases.gate import GateReport, gate
from adaptive_spec.releases.registry import free_version, live_release, publish, refuse
from adaptive_spec.settings import LearningSettings, Settings

_RUNS = "runs"  # below the folder of releases
# For glibc: large buffers come back every step, and clearing fresh pages for them costs up to a third of it.
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}


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
        self._child: subprocess.Popen[bytes] | None = None
        self._cancelled = False

    def open_run(self, trigger: str) -> int:
        """Write the row of a new run and return its id.  What interrupted runs have left is dropped."""
        run_id = create_run(self.database, trigger, self.settings.learning.model_dump(mode="json"))
        active = {str(run.id) for run in list_runs(self.database) if run.state in ACTIVE}
        for folder in self._runs.glob("*"):
            if folder.name not in active:
                shutil.rmtree(folder, ignore_errors=True)
        return run_id

    def interrupted(self) -> RunRecord | None:
        """The newest run, if its process was cut short here and has left a checkpoint."""
        for run in list_runs(self.database, 1):
            if run.state in ("failed", "cancelled") and (self._runs / str(run.id) / CHECKPOINT_NAME).exists():
                return run
        return None

    def reopen_run(self) -> int:
        """Queue the interrupted run again and return its id; ``retrain`` then goes on from its checkpoint.

        Raises:
            RunError: there is none.
        """
        run = self.interrupted()
        if run is None:
            raise RunError("No run was interrupted lately that has left a checkpoint here. Start a new one.")
        reopen_run(self.database, run.id)
        return run.id

    def retrain(self, run_id: int) -> Release:
        """Distil, calibrate, gate and publish.  The run's row tells the outcome.

        Raises:
            RunInterrupted: the training process was killed, or ended with the service; ``reopen_run`` goes on.
            RunError: training failed.
            GateRefused: the candidate is not better; the live release stays.
        """
        work = self._runs / str(run_id)
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        over = True
        try:
            self._train(run_id, work)
            self._tell(run_id, "gate")
            judgement = read_judgement(work)
            live = live_release(self.database, self.settings.releases.folder)
            report = gate(judgement.before, judgement.after, self.settings.releases.max_domain_loss_share)
            version = free_version(self.database, self.settings.releases.folder)
            if not report.passed:
                self._refuse(run_id, version, live, report)
            calibrations = with_heats(self._calibrated(judgement.observations, live, {}), judgement.heats)
            self._tell(run_id, "publish")
            release = self._publish(version, work, calibrations, report, live)
            self._update(run_id, state="passed", release=version, report=report.to_dict())
            return release
        except GateRefused:
            raise
        except RunInterrupted:
            over = not (work / CHECKPOINT_NAME).exists()
            raise
        except Exception as error:
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
        version = free_version(self.database, self.settings.releases.folder)
        write_bundle(
            self.settings.releases.folder,
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
        publish(self.database, self.settings.releases.folder, version, {"kind": "calibration"}, reason="calibrated")
        self._record(fitted, version)
        return fitted, version

    def cancel(self) -> None:
        """End the training process, if there is one."""
        self._cancelled = True
        child = self._child
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)

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
        return self.settings.releases.folder / _RUNS

    def _train(self, run_id: int, work: Path) -> None:
        """Run the child to its end, under the learning settings that the run began with."""
        learning = LearningSettings.model_validate(get_run(self.database, run_id).settings)
        (work / PAUSE_NAME).unlink(missing_ok=True)
        settings_file = work / "settings.json"
        settings_file.touch(mode=0o600)  # a database URL may hold a password
        settings_file.write_text(self.settings.model_copy(update={"learning": learning}).model_dump_json())
        command = [sys.executable, "-m", "adaptive_spec.learning.run", "--run-id", str(run_id)]
        environment = {**os.environ, **_KEEP_FREED_MEMORY, "TOKENIZERS_PARALLELISM": "false"}
        environment["OMP_NUM_THREADS"] = str(self.settings.learning.threads)
        with open(work / "log", "wb") as log:
            self._child = subprocess.Popen(
                [*command, "--settings", str(settings_file), "--out", str(work)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            self._update(run_id, pid=self._child.pid)
            serving = self.yielding.follow(partial(_ended, self._child), partial(_pause, work / PAUSE_NAME))
            status = self._child.wait()
        self._update(run_id, report={"serving": asdict(serving)})
        self._child = None
        if status == 0:
            self._update(run_id, pid=os.getpid())
            return
        saved = (work / CHECKPOINT_NAME).exists()
        advice = "`adaptive-spec retrain --resume` goes on from its checkpoint." if saved else "Start a new run."
        if self._cancelled:
            self._update(run_id, state="cancelled", error=f"The service stopped. {advice}")
            raise RunInterrupted(f"Run {run_id} was cancelled. {advice}")
        if status < 0:
            self._update(run_id, state="failed", error=f"Killed by signal {-status}. {advice}")
            raise RunInterrupted(f"Run {run_id} was killed by signal {-status}. {advice}")
        told = self._row(run_id).error
        tail = (work / "log").read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
        reason = told or f"exit status {status}: {tail[0]}"
        self._update(run_id, state="failed", error=reason)
        raise RunError(f"Run {run_id} failed: {reason}")

    def _refuse(self, run_id: int, version: int, live: Release, report: GateReport) -> None:
        refuse(self.database, version, live.version, report.to_dict())
        self._update(run_id, state="refused", release=version, report=report.to_dict())
        raise GateRefused(f"Release {version} was refused: {'; '.join(report.reasons)}")

    def _publish(
        self,
        version: int,
        work: Path,
        calibrations: Mapping[str, DomainCalibration],
        report: GateReport,
        live: Release,
    ) -> Release:
        described = json.loads((work / REPORT_NAME).read_text())
        folder = self.settings.releases.folder
        thresholds = {name: calibration.thresholds for name, calibration in calibrations.items()}
        write_bundle(
            folder,
            version,
            adapter=work / ADAPTER_NAME,
            thresholds=thresholds,
            provenance={
                **described["provenance"],
                "distil": described["distil"],
                "cost": asdict(self.cost.step),
                "gate": report.to_dict(),
            },
            vocabulary=described["vocabulary"],
            domain_adapters=_folders(live),
        )
        release = publish(self.database, folder, version, report.to_dict(), hashes=self.hashes)
        self._record(calibrations, version)
        return release

    def _record(self, calibrations: Mapping[str, DomainCalibration], version: int) -> None:
        for name, calibration in calibrations.items():
            add_calibration(self.database, name, calibration.thresholds, calibration.report, version)

    def _row(self, run_id: int) -> RunRecord:
        return self.database.outlast(lambda: get_run(self.database, run_id), lambda: self._cancelled)

    def _update(self, run_id: int, **changes: Any) -> None:
        """Change the run's row.  A database that is away is waited for: else the row says for ever that it runs."""
        self.database.outlast(lambda: update_run(self.database, run_id, **changes), lambda: self._cancelled)

    def _tell(self, run_id: int, phase: str) -> None:
        self._update(run_id, progress={"phase": phase})


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
    """The adapters of domains; they stand for themselves, so the next release carries them on."""
    return {domain: Path(folder) for domain, folder in live.domain_adapters.items()}
