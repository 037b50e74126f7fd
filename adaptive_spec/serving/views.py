"""What an operator sees of the records, as plain JSON values.

The control routes and the command line (when no service answers) both read through here, so ``--json`` prints the
same either way.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from adaptive_spec.calibration.watch import StreamState
from adaptive_spec.decoding.budget import Budget
from adaptive_spec.errors import ReleaseError, RequestError, RunError
from adaptive_spec.records import calibrations as calibration_records
from adaptive_spec.records import canaries as canary_records
from adaptive_spec.records import decoders as decoder_records
from adaptive_spec.records import domains as domain_records
from adaptive_spec.records import events as event_records
from adaptive_spec.records import releases as release_records
from adaptive_spec.records import run_log as run_log_records
from adaptive_spec.records import runs as run_records
from adaptive_spec.records import statistics
from adaptive_spec.records.database import Database
from adaptive_spec.records.drifts import DRIFT, drift_counts
from adaptive_spec.records.series import time_series
from adaptive_spec.records.slices import Slice
from adaptive_spec.records.spans import Span
from adaptive_spec.records.trace_statistics import trace_statistics
from adaptive_spec.releases.bundle import read_description

ALL = Slice()


def plain(value: Any) -> Any:
    """Turn records into what JSON can carry: dataclasses to objects, times to ISO 8601."""
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, Path) else value


def domains(database: Database) -> dict[str, Any]:
    """Every domain seen so far."""
    return {"domains": domain_records.list_domains(database)}


def stats(database: Database, about: Slice = ALL, *, days: float | None = None) -> dict[str, Any]:
    """Acceptance, speed and divergence per domain; of the last so many days."""
    since = None if days is None else datetime.now(UTC) - timedelta(days=days)
    return {"domains": plain(statistics.domain_statistics(database, since=since, **dataclasses.asdict(about)))}


def series(
    database: Database,
    about: Slice = ALL,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    bucket: Span | None = None,
) -> dict[str, Any]:
    """The same over time, a row per bucket; times without a zone are UTC.

    Raises:
        RequestError: there would be nothing or too much.
    """
    found: dict[str, Any] = plain(time_series(database, about, since=_aware(since), until=_aware(until), bucket=bucket))
    return found


def runs(
    database: Database,
    *,
    limit: int = 20,
    state: str | None = None,
    trigger: str | None = None,
    before: int | None = None,
) -> dict[str, Any]:
    """The latest training runs."""
    return {"runs": plain(run_records.list_runs(database, limit, state=state, trigger=trigger, before=before))}


def run(database: Database, run_id: int) -> dict[str, Any] | None:
    """One run, or None when there is none of that id."""
    try:
        record = run_records.get_run(database, run_id)
    except RunError:
        return None
    found: dict[str, Any] | None = plain(record)
    return found


def run_log(database: Database, run_id: int, *, limit: int = 200) -> dict[str, Any]:
    """What a run told, oldest first."""
    return {"run": run_id, "entries": plain(run_log_records.run_log(database, run_id, limit))}


def releases(
    database: Database, *, limit: int | None = None, state: str | None = None, before: int | None = None
) -> dict[str, Any]:
    """The latest releases, without a limit all, and the live one; 0 is the base draft."""
    live = release_records.live_version(database)
    return {"live": live, "releases": plain(release_records.list_releases(database, limit, state=state, before=before))}


def decoders(database: Database, *, gone_seconds: float) -> dict[str, Any]:
    """Every process of the service, what it runs and whether it lives; and the release that all should run."""
    live = release_records.live_version(database)
    return {"live": live, "decoders": plain(decoder_records.list_decoders(database, gone_seconds))}


def canary(database: Database, *, limit: int = 20) -> dict[str, Any]:
    """The release on trial, null when there is none, and the latest trials."""
    latest = plain(canary_records.list_canaries(database, limit))
    running = canary_records.running_canary(database)
    return {"running": plain(running), "canaries": latest}


def release(database: Database, folder: Path, version: int) -> dict[str, Any]:
    """One release: its row, what the gate said of it, and, where its bundle lies here, thresholds and provenance.

    Raises:
        ReleaseError: it is unknown.
    """
    if version == 0:
        live = release_records.live_version(database) == 0
        return {"version": 0, "state": "live" if live else "retired", "thresholds": {}, "provenance": {}, "gate": {}}
    record = release_records.get_release(database, version)
    found: dict[str, Any] = plain(record)
    gate = found.pop("report")
    try:
        bundle = read_description(folder / str(record.folder)) if record.folder else {}
        unreadable = None
    except ReleaseError as error:
        bundle, unreadable = {}, str(error)
    provenance = {name: value for name, value in bundle.get("provenance", {}).items() if name != "gate"}
    parts = {"thresholds": bundle.get("thresholds", {}), "provenance": provenance, "gate": gate}
    return {**found, **parts, "unreadable": unreadable}


def events(
    database: Database,
    *,
    limit: int = 50,
    kind: str | None = None,
    domain: str | None = None,
    release: int | None = None,
    before: int | None = None,
) -> dict[str, Any]:
    """What the service did and what befell it."""
    found = event_records.list_events(database, limit, kind, domain=domain, release=release, before=before)
    return {"events": plain(found)}


def traces(database: Database, *, domain: str | None = None) -> dict[str, Any]:
    """What the trace store holds of each domain, and what it dropped."""
    return {"domains": plain(trace_statistics(database, domain=domain))}


def nothing_stored(request_id: str) -> str:
    """What somebody is told who wants a request deleted of which nothing is there."""
    return (
        f"Nothing is stored of request {request_id!r}. Give the id of its answer; one that runs is stored when it ends."
    )


def drift(database: Database, states: Iterable[StreamState]) -> dict[str, Any]:
    """Each watched stream under the live release and its last drift under any; and all drifts ever told, counted."""
    last: dict[tuple[str, ...], dict[str, Any]] = {}
    for event in reversed(event_records.list_events(database, 10_000, DRIFT)):
        detail = event.detail
        told = {name: detail[name] for name in ("direction", "before", "after", "num_steps")}
        key = (event.domain or "", detail["drafter"], detail["verifier"], detail["stream"])
        last[key] = {"at": event.at, **told, "release": event.release}
    rows = [
        {**plain(state), "last_drift": last.get((state.domain, state.drafter, state.verifier, state.stream))}
        for state in states
    ]
    counts = [
        {"domain": domain, "stream": stream, "direction": direction, "num_drifts": number}
        for (domain, stream, direction), number in sorted(drift_counts(database).items())
    ]
    return {"streams": plain(rows), "counts": counts}


def divergence(budgets: Mapping[str, Budget]) -> dict[str, Any]:
    """The divergence budget of each domain that relaxed verification has served since the start."""
    return {
        "domains": [
            {
                "domain": domain,
                "budget": budget.share,
                "num_emitted_tokens": budget.num_emitted,
                "num_divergent_tokens": budget.num_divergent,
                "divergence_share": budget.num_divergent / max(1, budget.num_emitted),
                "fallen_back": budget.fallen_back,
                "exact_for_tokens": budget.waits_for,
                "num_fallbacks": budget.num_fallbacks,
            }
            for domain, budget in sorted(dict(budgets).items())
        ]
    }


def calibrations(database: Database, *, domain: str | None = None, limit: int = 20) -> dict[str, Any]:
    """The latest calibrations: the thresholds they gave, and the data that explains them."""
    return {"calibrations": plain(calibration_records.list_calibrations(database, domain, limit))}


def _aware(at: datetime | None) -> datetime | None:
    if at is None:
        return None
    try:
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except OverflowError as error:
        raise RequestError(f"{at} lies outside of all time in UTC.") from error
