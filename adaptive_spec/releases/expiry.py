"""Which releases' bundles are old enough to go, and their deletion.  Called by ``adaptive_spec.pruning``.

The row of such a release stays: what it was, and that its draft is that of others.  It is marked ``expired`` before its
folder goes, so that nobody can choose it meanwhile; a crash in between leaves a folder that the next round deletes.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from adaptive_spec.records.database import Database
from adaptive_spec.records.releases import ReleaseRecord, expire_release, list_releases, live_before, live_version
from adaptive_spec.releases.bundle import bundle_name

_OVER = ("retired", "rolled_back")  # every other state is of a release that serves, may serve, or never had a bundle


def due(database: Database, root: Path, num_kept: int) -> list[int]:
    """Return the versions whose bundles below ``root`` may go, oldest first.

    Args:
        num_kept: newest bundles that stay, beside those that must; 0: all do.
    """
    records = list_releases(database)
    left = [r.version for r in records if r.state == "expired" and (root / bundle_name(r.version)).exists()]
    chosen = choose(records, {live_version(database), live_before(database)}, num_kept) if num_kept else []
    return sorted([*left, *chosen])


def choose(records: Sequence[ReleaseRecord], needed: set[int], num_kept: int) -> list[int]:
    """Choose from all releases, newest first, those that are over, beyond the newest and that nothing refers to.

    Args:
        needed: the live release and the one before it.
    """
    by_version = {record.version: record for record in records}
    bundled = [record.version for record in records if record.folder is not None]
    anchors = needed | {record.version for record in records if record.state not in (*_OVER, "refused", "expired")}
    kept = {*bundled[:num_kept], *anchors}
    for version in anchors:
        kept.update(_referred(by_version, version))
    return [version for version in bundled[::-1] if version not in kept and by_version[version].state in _OVER]


def expire(database: Database, root: Path, version: int) -> bool:
    """Mark a release and delete its bundle; False when it has come to use meanwhile.

    Raises:
        OSError: the folder cannot be deleted.
    """
    if not expire_release(database, version, _OVER):
        return False
    if (folder := root / bundle_name(version)).exists():
        shutil.rmtree(folder)
    return True


def _referred(records: Mapping[int, ReleaseRecord], version: int) -> Iterator[int]:
    """What a release refers to: the nearest ancestor to which a rollback would go, and the draft of a calibration."""
    ancestors = list(_ancestors(records, version))
    yield from [ancestor for ancestor in ancestors if records[ancestor].folder is not None][:1]
    of = records.get(version)
    for ancestor in ancestors:
        if of is None or of.report.get("kind") != "calibration":
            return
        yield ancestor
        of = records[ancestor]


def _ancestors(records: Mapping[int, ReleaseRecord], version: int) -> Iterator[int]:
    """Recorded parents, the nearest first."""
    parent = records[version].parent if version in records else None
    while parent is not None and parent in records:
        yield parent
        parent = records[parent].parent  # always an earlier version
