"""The history of thresholds: what each domain's were, and why.  Written when a release goes live."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select

from adaptive_spec.core import Thresholds
from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import CalibrationRow


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """One domain's thresholds at one time."""

    id: int
    domain: str
    release: int
    thresholds: Thresholds
    report: dict[str, Any]
    created_at: datetime


def add_calibration(
    database: Database, domain: str, thresholds: Thresholds, report: dict[str, Any], release: int
) -> None:
    """Store one domain's thresholds."""
    row = CalibrationRow(
        domain=domain,
        release=release,
        thresholds=asdict(thresholds),
        report=report,
        created_at=datetime.now(UTC),
    )
    with database.session_scope() as session:
        session.add(row)


def list_calibrations(database: Database, domain: str | None = None, limit: int = 100) -> list[CalibrationRecord]:
    """Return the newest first."""
    query = select(CalibrationRow).order_by(CalibrationRow.id.desc()).limit(limit)
    if domain is not None:
        query = query.where(CalibrationRow.domain == domain)
    with database.session_scope(read_only=True) as session:
        return [_record(row) for row in session.scalars(query)]


def calibrations_of(database: Database, release: int) -> dict[str, CalibrationRecord]:
    """Return the last calibration of a release by domain."""
    query = select(CalibrationRow).where(CalibrationRow.release == release).order_by(CalibrationRow.id)
    with database.session_scope(read_only=True) as session:
        return {row.domain: _record(row) for row in session.scalars(query)}


def thresholds_of(database: Database, release: int, parents: Mapping[int, int | None]) -> dict[str, Thresholds]:
    """Return the thresholds of a release by domain; what it was not calibrated for it has from its parents.

    Args:
        parents: of every release, None for those without one.
    """
    found: dict[str, Thresholds] = {}
    version: int | None = release
    seen: set[int] = set()
    while version and version not in seen:
        seen.add(version)
        query = select(CalibrationRow).where(CalibrationRow.release == version).order_by(CalibrationRow.id.desc())
        with database.session_scope(read_only=True) as session:
            for row in session.scalars(query):
                found.setdefault(row.domain, _record(row).thresholds)
        version = parents.get(version)
    return found


def _record(row: CalibrationRow) -> CalibrationRecord:
    thresholds = Thresholds.from_dict(row.thresholds)
    return CalibrationRecord(row.id, row.domain, row.release, thresholds, row.report, row.created_at)
