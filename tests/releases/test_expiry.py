"""Which bundles go: those that are over, beyond the newest, and that nothing that serves or may serve refers to."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from adaptive_spec.errors import ReleaseError
from adaptive_spec.records.database import Database
from adaptive_spec.records.releases import ReleaseRecord, add_release, list_releases, set_live
from adaptive_spec.releases.bundle import bundle_name
from adaptive_spec.releases.expiry import choose, due, expire

CALIBRATION = {"kind": "calibration"}


def release(version: int, parent: int | None, state: str = "retired", *, calibrated: bool = False) -> ReleaseRecord:
    folder = None if state in ("refused", "expired") else bundle_name(version)
    return ReleaseRecord(version, folder, parent, state, CALIBRATION if calibrated else {}, datetime.now(UTC))


def test_the_oldest_go_and_the_newest_stay() -> None:
    records = [release(6, 5, "live"), *(release(version, version - 1) for version in (5, 4, 3, 2, 1))]
    assert choose(records, {6, 5}, 3) == [1, 2, 3]  # 4 is the third newest, and the parent of 5
    assert choose(records, {6, 5}, 6) == []


def test_what_serves_or_is_referred_to_stays_however_old() -> None:
    records = [
        release(9, 8),
        release(8, 7),
        release(7, 0),
        release(6, 5, "canary"),
        release(5, 2, calibrated=True),
        release(4, 3, "live", calibrated=True),
        release(3, 2, calibrated=True),
        release(2, 1),
        release(1, 0),
    ]
    kept = {9, 6, 5, 4, 3, 2}  # 9: newest; 4 is 3's calibration and 3 is 2's; the canary 6 comes from 5
    assert choose(records, {4, 0}, 1) == sorted({record.version for record in records} - kept)


def test_a_parent_without_a_bundle_passes_the_protection_on() -> None:
    records = [release(4, 3, "live"), release(3, 2, "refused"), release(2, 1), release(1, 0)]
    assert choose(records, {4}, 1) == [1]


@pytest.fixture
def database(tmp_path: Path) -> Database:
    database = Database(f"sqlite:///{tmp_path / 'records.db'}")
    database.upgrade()
    for version in (1, 2, 3, 4):
        (tmp_path / bundle_name(version)).mkdir()
        (tmp_path / bundle_name(version) / "manifest.json").write_text("{}")
        add_release(database, version, bundle_name(version), 0, {})
        set_live(database, version, "published")
    return database


def test_an_expired_release_has_no_bundle_and_cannot_go_live(database: Database, tmp_path: Path) -> None:
    assert due(database, tmp_path, 0) == []
    assert due(database, tmp_path, 1) == [1, 2]  # 4 is live, 3 was before
    assert expire(database, tmp_path, 1)
    assert not (tmp_path / bundle_name(1)).exists()
    states = {record.version: (record.state, record.folder) for record in list_releases(database)}
    assert states[1] == ("expired", None)
    with pytest.raises(ReleaseError, match="deleted"):
        set_live(database, 1, "wish")
    database.close()


def test_a_release_that_went_live_meanwhile_stays(database: Database, tmp_path: Path) -> None:
    [version, *_] = due(database, tmp_path, 1)
    set_live(database, version, "rolled back to")
    assert not expire(database, tmp_path, version)
    assert (tmp_path / bundle_name(version)).exists()
    database.close()


def test_a_folder_that_a_crash_left_goes_the_next_time(database: Database, tmp_path: Path) -> None:
    expire(database, tmp_path, 1)
    (tmp_path / bundle_name(1)).mkdir()
    assert due(database, tmp_path, 4) == [1]
    assert expire(database, tmp_path, 1)
    assert due(database, tmp_path, 4) == []
    database.close()
