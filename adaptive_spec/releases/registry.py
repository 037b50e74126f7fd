"""The registry: which release is live, and how that changes.  Binds bundles (files) to rows (``records.releases``).

Called by the pipeline (publish, refuse), by an operator or a canary (rollback) and by every decoder (live_release).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from adaptive_spec.core import Release
from adaptive_spec.errors import ReleaseError
from adaptive_spec.records.database import Database
from adaptive_spec.records.releases import (
    ReleaseRecord,
    add_release,
    list_releases,
    live_version,
    next_version,
    set_live,
)
from adaptive_spec.releases.bundle import bundle_name, newest_version, read_bundle


def free_version(database: Database, root: Path) -> int:
    """Return the smallest version above all rows and all bundles below ``root``.

    A publisher that was killed leaves a bundle without a row: nobody runs it, and the next one must not run into it.
    """
    return max(next_version(database), newest_version(root) + 1)


def publish(
    database: Database,
    root: Path,
    version: int,
    report: dict[str, Any],
    *,
    reason: str = "published",
    draft: PreTrainedModel | None = None,
    hashes: Mapping[str, str] | None = None,
) -> Release:
    """Check the written bundle of ``version``, record it and make it live.

    Raises:
        ReleaseError: the bundle is not sound; no row is written and the live release stays.
    """
    release = read_bundle(root / bundle_name(version), draft=draft, hashes=hashes)
    add_release(database, version, bundle_name(version), release.parent, report, "candidate")
    set_live(database, version, reason)
    return release


def refuse(database: Database, version: int, parent: int | None, report: dict[str, Any]) -> None:
    """Record a candidate that the gate refused, for the operator to read.  It can never go live."""
    add_release(database, version, None, parent, report, "refused")


def rollback(
    database: Database,
    root: Path,
    to: int | None,
    reason: str,
    *,
    draft: PreTrainedModel | None = None,
    hashes: Mapping[str, str] | None = None,
) -> int:
    """Make an earlier release live again, its bundle checked whole first, and return its version.

    Args:
        to: the version; None means the live release's parent.  0, the untouched draft, always exists.

    Raises:
        ReleaseError: nothing to roll back, an unknown version, or a bundle that is not sound; the live one stays.
    """
    live = live_version(database)
    if live == 0 and to is None:
        raise ReleaseError("Release 0 is live: nothing to roll back. Name a version to go to (adaptive-spec releases).")
    records = {record.version: record for record in list_releases(database)}
    version = _parent(records, live) if to is None else to
    if version == live:
        raise ReleaseError(f"Release {version} is live already. Name another version (adaptive-spec releases).")
    if version != 0:
        _sound(_servable(records, version), root, draft, hashes)
    set_live(database, version, reason)
    return version


def live_release(
    database: Database,
    root: Path,
    *,
    draft: PreTrainedModel | None = None,
    hashes: Mapping[str, str] | None = None,
) -> Release:
    """Return the live release, its bundle below ``root`` checked whole.

    Raises:
        ReleaseError: the bundle is missing, outside ``root`` or not sound.
    """
    version = live_version(database)
    if version == 0:
        return Release()
    record = _servable({record.version: record for record in list_releases(database)}, version)
    return _sound(record, root, draft, hashes)


def _sound(
    record: ReleaseRecord, root: Path, draft: PreTrainedModel | None, hashes: Mapping[str, str] | None
) -> Release:
    folder = root / str(record.folder)
    if folder.resolve().parent != root.resolve():
        raise ReleaseError(f"Release {record.version} lies outside {root}. Move it there or set releases.folder.")
    release = read_bundle(folder, draft=draft, hashes=hashes)
    if release.version != record.version:
        raise ReleaseError(
            f"{folder} holds release {release.version}, not {record.version}. Roll back (adaptive-spec rollback)."
        )
    return release


def _parent(records: Mapping[int, ReleaseRecord], live: int) -> int:
    """The nearest ancestor that can serve, else 0."""
    version = records[live].parent if live in records else 0
    while version and (version not in records or records[version].folder is None):
        version = records[version].parent if version in records else 0
    return version or 0


def _servable(records: Mapping[int, ReleaseRecord], version: int) -> ReleaseRecord:
    record = records.get(version)
    if record is None or record.folder is None or record.state == "refused":
        known = ", ".join(
            str(v) for v in sorted(records) if records[v].folder is not None and records[v].state != "refused"
        )
        raise ReleaseError(f"Release {version} cannot serve. Choose one of: 0{', ' if known else ''}{known}.")
    return record
