"""The registry: which release is live, and how that changes.  Binds bundles (files) to rows (``records.releases``).

Called by the pipeline (publish, refuse), by an operator or a canary (rollback, put_live) and by every decoder
(live_release).  Bundles are taken from a ``BundleStore``, which fetches those that were made on another machine.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from adaptive_spec.core import Release
from adaptive_spec.errors import ReleaseError
from adaptive_spec.records.canaries import ABORTED, begin_canary, end_canary, running_canary
from adaptive_spec.records.database import Database
from adaptive_spec.records.releases import (
    ReleaseRecord,
    add_release,
    get_release,
    list_releases,
    live_version,
    set_live,
)
from adaptive_spec.records.releases import next_version as next_stored
from adaptive_spec.releases.bundle import bundle_name, read_bundle
from adaptive_spec.releases.report import INTEGRITY, failed_checks
from adaptive_spec.releases.store import BundleStore


def publish(
    database: Database,
    root: Path,
    version: int,
    report: dict[str, Any],
    *,
    reason: str = "published",
    draft: PreTrainedModel | None = None,
    hashes: Mapping[str, str] | None = None,
    canary_share: float = 0.0,
) -> Release:
    """Check the written bundle of ``version``, record it and make it live, or put it on trial first.

    Args:
        canary_share: of requests that it serves while it is on trial; 0 makes it live at once.

    Raises:
        ReleaseError: the bundle is not sound; no row is written and the live release stays.
    """
    release = read_bundle(root / bundle_name(version), draft=draft, hashes=hashes)
    add_release(database, version, bundle_name(version), release.parent, report, "candidate")
    if canary_share:
        begin_canary(database, version, canary_share, reason)
    else:
        set_live(database, version, reason)
    return release


def refuse(
    database: Database, version: int, parent: int | None, report: dict[str, Any], folder: str | None = None
) -> None:
    """Record a candidate that the gate refused, for the operator to read.

    Args:
        folder: of its bundle below the root; None: it has none, and can never go live.
    """
    add_release(database, version, folder, parent, report, "refused")


def put_live(
    database: Database,
    root: Path | BundleStore,
    version: int,
    reason: str,
    *,
    force: bool = False,
    draft: PreTrainedModel | None = None,
    hashes: Mapping[str, str] | None = None,
) -> Release:
    """Make a release live that a person named, its bundle checked whole first.

    Args:
        force: also over the gate's refusal, with ``reason``, which is recorded; never over failed integrity.

    Raises:
        ReleaseError: unknown, live already, refused and not forced with a reason, without a bundle, or not sound.
    """
    record = get_release(database, version)
    if record.state == "live":
        raise ReleaseError(f"Release {version} is live already.")
    failed = [str(check["name"]) for check in failed_checks(record.report)] or ["gate"]
    refused = record.state == "refused"
    if refused and not (force and reason.strip()):
        reasons = "; ".join(record.report.get("reasons", ())) or "no reason is recorded"
        raise ReleaseError(
            f"Release {version} was refused: {reasons}. Publish it nonetheless with --force and --reason, or leave it."
        )
    if record.folder is None or INTEGRITY in failed:
        raise ReleaseError(f"Release {version} has no sound bundle, which nobody can force. Train a new one.")
    release = _sound(record, root, draft, hashes)
    set_live(database, version, reason, by_person=True, over_refusal=failed if refused else ())
    return release


def next_version(database: Database, root: Path) -> int:
    """Return the smallest version above all stored ones whose folder is free: a kill may leave one without its row."""
    version = next_stored(database)
    while (root / bundle_name(version)).exists():
        version += 1
    return version


def rollback(
    database: Database,
    root: Path | BundleStore,
    to: int | None,
    reason: str,
    *,
    draft: PreTrainedModel | None = None,
    hashes: Mapping[str, str] | None = None,
) -> int:
    """Make an earlier release live again, its bundle checked whole first, and return its version.

    Args:
        to: the version; None means what was live before the newest one served anybody: while there is a canary, the
            live release, and else its nearest ancestor that was neither refused nor rolled back.  0, the untouched
            draft, always exists.

    Raises:
        ReleaseError: nothing to roll back, an unknown version, or a bundle that is not sound; the live one stays.
    """
    live = live_version(database)
    if to is None and (canary := running_canary(database)) is not None:
        end_canary(database, canary.id, ABORTED, reason, {})
        return live
    if live == 0 and to is None:
        raise ReleaseError("Release 0 is live: nothing to roll back. Name a version to go to (adaptive-spec releases).")
    records = {record.version: record for record in list_releases(database)}
    version = _parent(records, live) if to is None else to
    if version == live:
        raise ReleaseError(f"Release {version} is live already. Name another version (adaptive-spec releases).")
    if version != 0:
        _sound(_servable(records, version), root, draft, hashes)
    set_live(database, version, reason, by_person=to is not None)
    return version


def live_release(
    database: Database,
    root: Path | BundleStore,
    *,
    draft: PreTrainedModel | None = None,
    hashes: Mapping[str, str] | None = None,
) -> Release:
    """Return the live release, its bundle below ``root`` checked whole.

    Raises:
        ReleaseError: the bundle is missing, outside ``root`` or not sound.
    """
    return stored_release(database, root, live_version(database), draft=draft, hashes=hashes)


def stored_release(
    database: Database,
    root: Path | BundleStore,
    version: int,
    *,
    draft: PreTrainedModel | None = None,
    hashes: Mapping[str, str] | None = None,
) -> Release:
    """Return a release, its bundle below ``root`` checked whole.

    Raises:
        ReleaseError: unknown, refused, or as ``live_release``.
    """
    if version == 0:
        return Release()
    record = _servable({record.version: record for record in list_releases(database)}, version)
    return _sound(record, root, draft, hashes)


def _sound(
    record: ReleaseRecord, root: Path | BundleStore, draft: PreTrainedModel | None, hashes: Mapping[str, str] | None
) -> Release:
    store = root if isinstance(root, BundleStore) else BundleStore(root)
    name = str(record.folder)
    if (store.folder / name).resolve().parent != store.folder.resolve():
        raise ReleaseError(
            f"Release {record.version} lies outside {store.folder}. Move it there or set releases.folder."
        )
    folder = store.fetch(name)
    release = read_bundle(folder, draft=draft, hashes=hashes)
    if release.version != record.version:
        raise ReleaseError(
            f"{folder} holds release {release.version}, not {record.version}. Roll back (adaptive-spec rollback)."
        )
    return release


def _parent(records: Mapping[int, ReleaseRecord], live: int) -> int:
    """The nearest ancestor that may go live by itself, else 0."""
    version = records[live].parent if live in records else 0
    while version and not _returns_by_itself(records.get(version)):
        version = records[version].parent if version in records else 0
    return version or 0


def _returns_by_itself(record: ReleaseRecord | None) -> bool:
    return record is not None and record.folder is not None and record.state not in ("refused", "rolled_back")


def _servable(records: Mapping[int, ReleaseRecord], version: int) -> ReleaseRecord:
    record = records.get(version)
    if record is None or record.folder is None or record.state == "refused":
        known = ", ".join(
            str(v) for v in sorted(records) if records[v].folder is not None and records[v].state != "refused"
        )
        raise ReleaseError(f"Release {version} cannot serve. Choose one of: 0{', ' if known else ''}{known}.")
    return record
