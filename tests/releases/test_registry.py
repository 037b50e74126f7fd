"""Publishing, refusing and rolling back on a real database."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptive_spec.core import Release, Thresholds
from adaptive_spec.errors import ReleaseError
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import list_events
from adaptive_spec.records.releases import get_release, list_releases, live_version, set_live
from adaptive_spec.releases.bundle import write_bundle
from adaptive_spec.releases.registry import live_release, next_version, publish, put_live, refuse, rollback


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'registry.db'}")
    database.upgrade()
    yield database
    database.close()


def write_and_publish(database: Database, root: Path, version: int, parent: int) -> Release:
    thresholds = {"code": Thresholds(temperature=1.0 + version)}
    write_bundle(root, version, adapter=None, thresholds=thresholds, provenance={"parent": parent})
    return publish(database, root, version, {"passed": True})


def test_the_untouched_draft_is_live_at_first(database: Database, tmp_path: Path) -> None:
    assert live_release(database, tmp_path / "nowhere") == Release()
    with pytest.raises(ReleaseError, match="nothing to roll back"):
        rollback(database, tmp_path, None, "test")


def test_publish_then_roll_back_to_the_floor(database: Database, tmp_path: Path) -> None:
    for version in (1, 2):
        release = write_and_publish(database, tmp_path, version, version - 1)
        assert live_release(database, tmp_path) == release
    assert rollback(database, tmp_path, None, "worse") == 1
    assert live_release(database, tmp_path).for_domain("code").temperature == 2.0
    assert rollback(database, tmp_path, None, "worse still") == 0
    assert live_release(database, tmp_path) == Release()
    assert rollback(database, tmp_path, 2, "not so bad") == 2
    assert live_version(database) == 2
    with pytest.raises(ReleaseError, match="live already"):
        rollback(database, tmp_path, 2, "again")


def test_refused_and_unknown_versions_never_serve(database: Database, tmp_path: Path) -> None:
    write_and_publish(database, tmp_path, 1, 0)
    refuse(database, 2, 1, {"passed": False})
    for version in (2, 9):
        with pytest.raises(ReleaseError, match="Choose one of: 0, 1"):
            rollback(database, tmp_path, version, "test")
    assert live_version(database) == 1
    assert {record.version: record.state for record in list_releases(database)} == {1: "live", 2: "refused"}


def test_a_damaged_bundle_is_neither_published_nor_served(database: Database, tmp_path: Path) -> None:
    write_and_publish(database, tmp_path, 1, 0)
    folder = write_bundle(tmp_path, 2, adapter=None, thresholds={}, provenance={"parent": 1})
    (folder / "release.json").write_bytes((folder / "release.json").read_bytes()[:-2])
    with pytest.raises(ReleaseError):
        publish(database, tmp_path, 2, {})
    assert live_version(database) == 1 and len(list_releases(database)) == 1
    shutil.rmtree(tmp_path / "release-000001")
    with pytest.raises(ReleaseError):
        live_release(database, tmp_path)
    assert rollback(database, tmp_path, 0, "files lost") == 0
    with pytest.raises(ReleaseError):
        rollback(database, tmp_path, 1, "but they are lost")
    assert live_version(database) == 0


def test_the_models_in_use_must_be_the_bundle_s(database: Database, tmp_path: Path) -> None:
    write_bundle(tmp_path, 1, adapter=None, thresholds={}, provenance={"hashes": {"target": "a"}})
    with pytest.raises(ReleaseError, match="other models"):
        publish(database, tmp_path, 1, {}, hashes={"target": "b"})
    publish(database, tmp_path, 1, {}, hashes={"target": "a"})
    with pytest.raises(ReleaseError, match="other models"):
        live_release(database, tmp_path, hashes={"target": "b"})


def write_refused(database: Database, root: Path, version: int, *failed: str) -> None:
    write_bundle(root, version, adapter=None, thresholds={}, provenance={"parent": 0})
    checks = [{"name": name, "passed": False, "reason": "no", "figures": {}} for name in failed]
    report = {"passed": False, "reasons": [f"{name}: no" for name in failed], "checks": checks}
    refuse(database, version, 0, report, f"release-{version:06d}")


def test_a_refusal_is_overridden_with_force_and_a_reason_alone(database: Database, tmp_path: Path) -> None:
    write_refused(database, tmp_path, 1, "goodput", "domains")
    for given in ({"reason": "please"}, {"reason": " ", "force": True}):
        with pytest.raises(ReleaseError, match="goodput: no; domains: no"):
            put_live(database, tmp_path, 1, **given)  # type: ignore[arg-type]
    for unforced in (False, True):
        with pytest.raises(ReleaseError, match="refused by the gate"):
            set_live(database, 1, "by itself", by_person=unforced)
    with pytest.raises(ReleaseError, match="Choose one of: 0"):
        rollback(database, tmp_path, 1, "through the back door")
    assert live_version(database) == 0
    assert put_live(database, tmp_path, 1, "the domain that loses is gone", force=True).version == 1
    record = get_release(database, 1)
    assert record.state == "live" and record.report["override"]["checks"] == ["goodput", "domains"]
    assert record.report["override"]["reason"] == "the domain that loses is gone"
    (event,) = list_events(database, kind="release_forced")
    assert event.release == 1 and event.detail == record.report["override"]


def test_no_one_forces_what_is_not_sound(database: Database, tmp_path: Path) -> None:
    write_refused(database, tmp_path, 1, "integrity")
    write_refused(database, tmp_path, 2, "goodput")
    (tmp_path / "release-000002" / "release.json").write_text("{}")
    refuse(database, 3, 0, {"passed": False}, None)
    for version, why in ((1, "nobody can force"), (2, "damaged"), (3, "nobody can force"), (4, "unknown")):
        with pytest.raises(ReleaseError, match=why):
            put_live(database, tmp_path, version, "I insist", force=True)
    assert live_version(database) == 0 and list_events(database, kind="release_forced") == []


def test_a_rolled_back_release_is_never_picked_by_itself(database: Database, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write_and_publish(database, tmp_path, version, version - 1)
    assert rollback(database, tmp_path, 2, "3 is bad") == 2
    assert rollback(database, tmp_path, 1, "2 is bad as well") == 1
    with pytest.raises(ReleaseError, match="Only a person"):
        set_live(database, 2, "another process had picked it before")
    assert put_live(database, tmp_path, 3, "it was not so bad").version == 3
    assert rollback(database, tmp_path, None, "it was") == 1  # its parent, 2, was rolled back
    with pytest.raises(ReleaseError, match="builds on release 2, which was rolled back"):
        write_and_publish(database, tmp_path, 4, 2)
    assert live_version(database) == 1
    assert put_live(database, tmp_path, 4, "on purpose").version == 4
    with pytest.raises(ReleaseError, match="live already"):
        put_live(database, tmp_path, 4, "again")


def test_a_bundle_without_a_row_is_in_nobody_s_way(database: Database, tmp_path: Path) -> None:
    """What a publisher leaves that is killed between the files and the row."""
    assert next_version(database, tmp_path / "nowhere") == 1
    write_bundle(tmp_path, 1, adapter=None, thresholds={}, provenance={})
    (tmp_path / "release-notes").mkdir()
    version = next_version(database, tmp_path)
    assert write_and_publish(database, tmp_path, version, 0).version == version == 2
    refuse(database, 5, 2, {"passed": False})
    assert next_version(database, tmp_path) == 6
