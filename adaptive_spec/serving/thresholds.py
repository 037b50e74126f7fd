"""The thresholds in force, and where each number comes from: the release, a calibration, or a person."""

from collections.abc import Mapping
from typing import Any

from adaptive_spec.calibration.calibrate import KEPT
from adaptive_spec.core import POOLED, Release, Thresholds
from adaptive_spec.records.calibrations import CalibrationRecord, calibrations_of
from adaptive_spec.records.database import Database
from adaptive_spec.records.overrides import OverrideRecord, standing_overrides
from adaptive_spec.serving.views import plain

Sources = dict[str, dict[str, Any]]


def thresholds_view(database: Database, release: Release) -> dict[str, Any]:
    """The numbers that domains are drafted under, those of a domain without its own, and the source of each."""
    standing = {record.domain: record for record in standing_overrides(database)}
    calibrated = calibrations_of(database, release.version)
    names = sorted({*release.thresholds, *standing} - {POOLED})
    found = {name: _of_domain(name, release, standing, calibrated) for name in (*names, POOLED)}
    shown = (*names, *([POOLED] if POOLED in release.thresholds or POOLED in standing else []))
    return {
        "release": release.version,
        "thresholds": {name: plain(found[name][0]) for name in shown},
        "fallback": plain(found[POOLED][0]),
        "sources": {name: sources for name, (_, sources) in found.items()},
        "overrides": [override_view(record) for record in standing.values()],
    }


def override_view(record: OverrideRecord) -> dict[str, Any]:
    """An override in force."""
    times = {"begun_at": record.begun_at, "until": record.until, "seconds_left": record.seconds_left}
    return {"domain": record.domain, "numbers": record.override.numbers, "reason": record.reason, **plain(times)}


def no_override(domain: str) -> str:
    """What somebody is told who ends an override that is not there."""
    return f"No override of {domain!r} is in force. GET /api/thresholds (adaptive-spec thresholds) lists them."


def _of_domain(
    domain: str, release: Release, standing: Mapping[str, OverrideRecord], calibrated: Mapping[str, CalibrationRecord]
) -> tuple[Thresholds, Sources]:
    own = release.for_domain(domain)
    source = _source(domain if domain in release.thresholds else POOLED, release, calibrated)
    sources = dict.fromkeys(Thresholds.__dataclass_fields__, source)
    record = standing.get(domain) or standing.get(POOLED)
    if record is None:
        return own, sources
    by_hand = {"source": "override", "domain": record.domain, "until": plain(record.until), "reason": record.reason}
    return record.override.over(own), {**sources, **dict.fromkeys(record.override.numbers, by_hand)}


def _source(domain: str, release: Release, calibrated: Mapping[str, CalibrationRecord]) -> dict[str, Any]:
    """Where a release has its numbers for a domain from."""
    if domain not in release.thresholds:
        return {"source": "default"}
    found = {"release": release.version, "domain": domain}
    record = calibrated.get(domain)
    if record is None or record.report.get("source") == KEPT:
        return {"source": "release", **found}
    return {"source": "calibration", **found, "at": plain(record.created_at)}
