"""What becomes of a candidate between training and the gate's verdict, without a model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptive_spec.calibration.calibrate import DomainCalibration
from adaptive_spec.calibration.cost import CostModel
from adaptive_spec.core import Release, StepCost, Thresholds
from adaptive_spec.errors import GateRefused
from adaptive_spec.pipeline import Pipeline, _Candidate
from adaptive_spec.records.database import Database
from adaptive_spec.records.releases import add_release, get_release, set_live
from adaptive_spec.releases.bundle import read_bundle
from adaptive_spec.releases.report import INTEGRITY, Check, GateReport
from adaptive_spec.settings import load_settings

HASHES = {"target": "a"}
COST = CostModel({1: StepCost(0.1, (1.0, 1.1), "test")})


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    settings = load_settings(
        {
            "records": {"url": f"sqlite:///{tmp_path / 'r.db'}"},
            "releases": {"folder": tmp_path / "releases", "store": f"file://{tmp_path / 'store'}"},
        }
    )
    database = Database(settings.records.url)
    database.upgrade()
    yield Pipeline(database, settings, COST, HASHES)
    database.close()


def candidate(tmp_path: Path, live: int = 0, parent: int = 0) -> _Candidate:
    """Version 5, as a training process leaves it."""
    work = tmp_path / "work"
    (work / "adapter").mkdir(parents=True)
    (work / "adapter" / "adapter_config.json").write_text("{}")
    (work / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")
    provenance = {"parent": parent, "hashes": HASHES}
    (work / "distil.json").write_text(
        json.dumps({"distil": {}, "vocabulary": None, "domain_adapters": {}, "provenance": provenance})
    )
    calibrations = {"code": DomainCalibration(Thresholds(temperature=1.5), {"source": "own"})}
    return _Candidate(5, work, calibrations, Release(live))


def test_a_refused_bundle_is_kept_with_the_gates_report(pipeline: Pipeline, tmp_path: Path) -> None:
    report = GateReport((Check(INTEGRITY, True, "sound"), Check("goodput", False, "no gain")))
    made = candidate(tmp_path)
    pipeline._write(made, report)
    run_id = pipeline.open_run("test")
    with pytest.raises(GateRefused, match="goodput: no gain"):
        pipeline._refuse(run_id, made, report)
    record = get_release(pipeline.database, 5)
    assert (record.state, record.folder) == ("refused", "release-000005")
    for root in (tmp_path / "releases", tmp_path / "store"):
        assert read_bundle(root / "release-000005", hashes=HASHES).for_domain("code").temperature == 1.5
    written = json.loads((tmp_path / "releases" / "release-000005" / "release.json").read_text())
    assert written["provenance"]["gate"] == record.report == report.to_dict()


def test_an_unsound_bundle_is_written_nowhere(pipeline: Pipeline, tmp_path: Path) -> None:
    report = GateReport((Check(INTEGRITY, False, "not finite"), Check("goodput", True, "faster")))
    made = candidate(tmp_path)
    pipeline._write(made, report)
    with pytest.raises(GateRefused, match="integrity: not finite"):
        pipeline._refuse(pipeline.open_run("test"), made, report)
    assert get_release(pipeline.database, 5).folder is None
    assert not list((tmp_path / "releases").glob("release-*")) and not (tmp_path / "store").exists()


def test_thresholds_that_no_bundle_holds_fail_integrity(pipeline: Pipeline, tmp_path: Path) -> None:
    made = candidate(tmp_path)
    bad = {"code": DomainCalibration(Thresholds(stop_below=2.0), {})}
    (check,) = pipeline._rehearsed(0, _Candidate(5, made.work, bad, made.live))
    assert (check.name, check.passed) == (INTEGRITY, False) and "out of range" in check.reason


def test_what_was_judged_beside_another_draft_does_not_pass(pipeline: Pipeline, tmp_path: Path) -> None:
    add_release(pipeline.database, 1, None, 0, {})
    add_release(pipeline.database, 2, None, 1, {"kind": "calibration"})
    for version in (1, 2):
        set_live(pipeline.database, version, "test")
    made = candidate(tmp_path, live=2, parent=1)
    assert pipeline._of_the_live(made).passed  # a calibration drafts with the same weights
    check = pipeline._of_the_live(_Candidate(5, made.work, {}, Release(0)))
    assert not check.passed and check.figures == {"parent": 1, "live": 0}
