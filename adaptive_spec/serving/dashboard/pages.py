"""What each page shows.  GET routes only; nothing here changes anything."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from markupsafe import Markup
from starlette.exceptions import HTTPException

from adaptive_spec.errors import ReleaseError
from adaptive_spec.records.canaries import CanaryRecord, list_canaries
from adaptive_spec.records.domains import list_domains
from adaptive_spec.records.events import list_events
from adaptive_spec.records.releases import RELEASE_LIVE
from adaptive_spec.records.runs import ACTIVE, active_run
from adaptive_spec.records.series import Bucket, Series, time_series
from adaptive_spec.records.slices import Slice
from adaptive_spec.records.spans import LENGTHS
from adaptive_spec.releases.difference import differences
from adaptive_spec.releases.report import verdict
from adaptive_spec.serving import views
from adaptive_spec.serving.dashboard.charts import Marker, Points, bars, nothing, reliability, sparkline, time_chart
from adaptive_spec.serving.dashboard.rendering import page
from adaptive_spec.serving.ports import Service
from adaptive_spec.serving.progress import own_adapters_line, progress_line
from adaptive_spec.serving.thresholds import thresholds_view

OVERVIEW_DAYS = 7
STRETCHES = (1 / 24, 1, 7, 30)  # days that a domain's page offers
REFRESH_SECONDS = 5  # of a run's page, once somebody wants it to follow
_MOST_EVENTS = 200

# name, label, kind
DOMAIN_COLUMNS = (
    ("link", "Domain", ""),
    ("num_requests", "Requests", "number"),
    ("num_cached_requests", "Cached", "number"),
    ("draft_acceptance_rate", "Acceptance rate", "number"),
    ("mean_acceptance_length", "Tokens per step", "number"),
    ("spark", "Over time", ""),
    ("tokens_per_second", "Tokens per second", "number"),
    ("divergence_share", "Diverging share", "number"),
)
DECODER_COLUMNS = (
    ("host", "Host", ""),
    ("pid", "Process", "number"),
    ("role", "Role", ""),
    ("release", "Release", "number"),
    ("state", "State", ""),
    ("age_seconds", "Seconds since its last sign", "number"),
)
EVENT_COLUMNS = (
    ("at", "At", ""),
    ("kind", "Event", ""),
    ("domain", "Domain", ""),
    ("release", "Release", "number"),
    ("detail", "Detail", ""),
)
RELEASE_COLUMNS = (
    ("link", "Release", ""),
    ("state", "State", ""),
    ("gate", "Gate", ""),
    ("goodput", "Goodput", ""),
    ("parent", "Parent", "number"),
    ("at", "Written at", ""),
)
RUN_COLUMNS = (
    ("link", "Run", ""),
    ("trigger", "Trigger", ""),
    ("state", "State", ""),
    ("at", "Asked for at", ""),
    ("line", "Progress", ""),
    ("own_adapters", "Own adapters", ""),
)
CHECK_COLUMNS = (("name", "Check", ""), ("verdict", "Verdict", ""), ("reason", "Why", ""))
THRESHOLD_COLUMNS = (
    ("domain", "Domain", ""),
    ("temperature", "Temperature", "number"),
    ("stop_below", "Stop below", "number"),
    ("max_chain_length", "Longest chain", "number"),
    ("num_observations", "Observations", "number"),
)
DIFFERENCE_COLUMNS = (("part", "Part", ""), ("path", "Field", ""), ("before", "Before", ""), ("after", "After", ""))


def pages_router(service: Service) -> APIRouter:
    """Serve the pages of a service."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    database = service.database

    @router.get("/")
    def overview(notice: Annotated[str | None, Query(max_length=300)] = None) -> HTMLResponse:
        engine = service.engine
        run = active_run(database)
        pauses = engine.pauses
        return page(
            "overview.html",
            "/",
            notice=notice,
            model=service.settings.model.target,
            live=engine.release.version,
            canary=views.canary(database, limit=1)["running"],
            num_active=engine.num_active,
            queue_depth=engine.queue_depth,
            num_dropped=service.writer.num_dropped,
            pause_ms=f"{pauses.longest_seconds * 1e3:.1f}" if pauses.num_swaps else None,
            days=OVERVIEW_DAYS,
            domain_columns=DOMAIN_COLUMNS,
            domains=[_domain_row(service, row) for row in views.stats(database, days=OVERVIEW_DAYS)["domains"]],
            run=_run_row(views.plain(run)) if run else None,
            decoder_columns=DECODER_COLUMNS,
            decoders=views.decoders(database, gone_seconds=service.settings.cluster.gone_seconds)["decoders"],
            event_columns=EVENT_COLUMNS,
            events=_events(service, 8),
        )

    @router.get("/domains/{domain:path}")
    def of_domain(domain: str, days: Annotated[float, Query(gt=0, le=1825)] = 1) -> HTMLResponse:
        if domain not in list_domains(database):
            raise HTTPException(404, f"Nothing is on record of a domain {domain!r}.")
        return page("domain.html", "", days=days, **_of_domain(service, domain, days))

    @router.get("/releases")
    def releases() -> HTMLResponse:
        rows = views.releases(database)["releases"]
        canary = views.canary(database, limit=1)["running"]
        return page(
            "releases.html",
            "/releases",
            columns=RELEASE_COLUMNS,
            releases=[_release_row(row) for row in rows],
            canary=canary and {**canary, "line": _trial_line(canary)},
            earlier=[row["version"] for row in rows if row["state"] in ("retired", "rolled_back")] + [0],
        )

    @router.get("/releases/{version}")
    def of_release(version: int) -> HTMLResponse:
        try:
            return page("release.html", "/releases", version=version, **_of_release(service, version))
        except ReleaseError as error:
            raise HTTPException(404, str(error)) from error

    @router.get("/runs")
    def runs() -> HTMLResponse:
        rows = [_run_row(row) for row in views.runs(database, limit=100)["runs"]]
        return page("runs.html", "/runs", columns=RUN_COLUMNS, runs=rows)

    @router.get("/runs/{run_id}")
    def of_run(run_id: int, live: bool = False) -> HTMLResponse:
        run = views.run(database, run_id)
        if run is None:
            raise HTTPException(404, f"There is no run {run_id}.")
        row, report = _run_row(run), run["report"]
        summary = [
            ("Asked for by", run["trigger"]),
            ("Asked for at", row["at"]),
            ("Progress", row["line"]),
            ("Error", run["error"]),
            ("Own adapters", row["own_adapters"]),
        ]
        return page(
            "run.html",
            "/runs",
            refresh=REFRESH_SECONDS if live and run["state"] in ACTIVE else None,
            active=run["state"] in ACTIVE,
            run=run,
            share=row["share"],
            summary=summary,
            reasons=report.get("reasons", ()),
            check_columns=CHECK_COLUMNS,
            checks=_checks(report),
        )

    @router.get("/events")
    def events() -> HTMLResponse:
        return page("events.html", "/events", columns=EVENT_COLUMNS, events=_events(service, _MOST_EVENTS))

    return router


def _domain_row(service: Service, row: Mapping[str, Any]) -> dict[str, Any]:
    name = row["domain"]
    points = _points(_series(service, name, OVERVIEW_DAYS), "mean_acceptance_length")
    spark = sparkline(points, f"Tokens per step of {name}") if points else ""
    return {**row, "link": _link(f"/domains/{quote(name)}", name), "spark": spark}


def _of_domain(service: Service, domain: str, days: float) -> dict[str, Any]:
    database = service.database
    (row,) = views.stats(database, Slice(domain), days=days)["domains"] or [None]
    series = _series(service, domain, days)
    markers = _markers(service, series.since)
    standing = thresholds_view(database, service.engine.release)
    override = next((one for one in standing["overrides"] if one["domain"] == domain), None)
    latest = next(iter(views.calibrations(database, domain=domain, limit=1)["calibrations"]), None)
    budget = next((one for one in views.divergence(service.engine.budgets)["domains"] if one["domain"] == domain), None)
    return {
        "domain": domain,
        "stretches": STRETCHES,
        "summary": _summary(row),
        "acceptance_chart": _over_time(series, "mean_acceptance_length", "Tokens per step", "tokens", markers),
        "speed_chart": _over_time(series, "tokens_per_second", "Goodput of requests", "tokens/s", markers),
        "position_chart": _positions(row),
        "length_chart": _lengths(latest),
        "reliability_chart": _reliability(latest),
        "thresholds": _in_force(standing, domain),
        "override": override and {**override, "until": _moment(override["until"])},
        "budget": budget and [(name.replace("_", " "), value) for name, value in budget.items() if name != "domain"],
    }


def _series(service: Service, domain: str, days: float) -> Series:
    since = datetime.now(UTC) - timedelta(days=days)
    return time_series(service.database, Slice(domain), since=since)


def _points(series: Series, name: str) -> Points:
    """One value a bucket; a bucket without records parts the line."""
    found: list[tuple[datetime, float | None]] = []
    last: Bucket | None = None
    for bucket in series.buckets:
        if last is not None and bucket.start - last.start > 4 * LENGTHS[series.bucket]:
            found.append((last.start, None))
        found.append((bucket.start, getattr(bucket, name)))
        last = bucket
    return found


def _over_time(series: Series, name: str, title: str, unit: str, markers: Sequence[Marker]) -> Markup:
    points = _points(series, name)
    stretch = (series.since, series.until)
    return time_chart(points, stretch, title, unit, markers) if points else nothing(title)


def _markers(service: Service, since: datetime) -> list[Marker]:
    """When releases went live, and when trials began and ended."""
    live = list_events(service.database, _MOST_EVENTS, RELEASE_LIVE)
    found = [Marker(event.at, f"release {event.release}") for event in live if event.at >= since]
    for canary in list_canaries(service.database, 20):
        found += [marker for marker in _trial_markers(canary) if marker.at >= since]
    return found


def _trial_markers(canary: CanaryRecord) -> Iterator[Marker]:
    yield Marker(canary.started_at, f"{canary.release} tried, {canary.share:.0%}", "canary")
    if canary.ended_at is not None:
        yield Marker(canary.ended_at, f"{canary.release} {canary.state.replace('_', ' ')}", "canary")


def _summary(row: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    if row is None:
        return [("Requests", 0)]
    return [
        ("Requests", row["num_requests"]),
        ("Tokens per step", row["mean_acceptance_length"]),
        ("Acceptance rate", f"{row['draft_acceptance_rate']:.1%}"),
        ("Expected acceptance", f"{row['expected_acceptance']:.1%}"),
        ("Tokens per second", row["tokens_per_second"]),
        ("Diverging tokens", f"{row['num_divergent_tokens']} ({row['divergence_share']:.2%})"),
    ]


def _positions(row: Mapping[str, Any] | None) -> Markup:
    shares = row["acceptance_per_position"] if row else []
    return bars(shares, [f"position {index + 1}" for index in range(len(shares))], "Accepted at each position")


def _lengths(calibration: Mapping[str, Any] | None) -> Markup:
    """The threshold curve of the latest calibration: of each longest chain the best predicted goodput."""
    curve = ((calibration or {}).get("report", {}).get("threshold") or {}).get("curve") or []
    best = max((point["goodput"] for point in curve), default=0.0)
    labels = [f"at most {point['max_chain_length']}, stop {point['stop_below']:g}" for point in curve]
    return bars([point["goodput"] / best for point in curve], labels, "Predicted goodput, the best is 100 %")


def _reliability(calibration: Mapping[str, Any] | None) -> Markup:
    later = (calibration or {}).get("report", {}).get("later") or {}
    checks = later.get("calibration", {})
    names = {"uncalibrated": "as the draft says", "new": "calibrated"}
    series = [
        (label, [(one["confidence"], one["acceptance"], one["count"]) for one in checks[name]["bins"]])
        for name, label in names.items()
        if name in checks
    ]
    return reliability(series, "Reliability of confidences")


def _in_force(standing: Mapping[str, Any], domain: str) -> list[tuple[str, str]]:
    numbers = standing["thresholds"].get(domain) or standing["fallback"]
    sources = standing["sources"].get(domain) or standing["sources"]["*"]
    return [
        (label, f"{numbers[name]:g} ({_said(sources[name])})")
        for name, label in (
            ("temperature", "Temperature"),
            ("stop_below", "Stop below"),
            ("max_chain_length", "Longest chain"),
        )
    ]


def _said(source: Mapping[str, Any]) -> str:
    match source["source"]:
        case "default":
            return "default"
        case "override":
            return f"set by hand until {_moment(source['until']):%Y-%m-%d %H:%M}"
        case "calibration":
            return f"calibration of release {source['release']}"
    return f"release {source['release']}"


def _of_release(service: Service, version: int) -> dict[str, Any]:
    folder, database = service.settings.releases.folder, service.database
    shown = views.release(database, folder, version)
    gate, parent = shown["gate"], shown.get("parent")
    changed = [] if parent is None else differences(views.release(database, folder, parent), shown)
    rows = gate.get("domains", [])
    provenance = shown["provenance"]
    told = [(name.replace("_", " "), provenance[name]) for name in ("run", "window", "versions") if name in provenance]
    return {
        "parent": parent,
        "summary": [("State", shown["state"]), ("Parent", parent), ("Gate", verdict(gate)), *told],
        "check_columns": CHECK_COLUMNS,
        "checks": _checks(gate),
        "gate_columns": [(name, name.replace("_", " "), "number") for name in (rows[0] if rows else ())],
        "gate_domains": rows,
        "threshold_columns": THRESHOLD_COLUMNS,
        "thresholds": [{"domain": name, **values} for name, values in shown["thresholds"].items()],
        "difference_columns": DIFFERENCE_COLUMNS,
        "differences": [views.plain(one) for one in changed if one.part != "gate"],
    }


def _checks(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {**check, "verdict": _coloured("passed" if check["passed"] else "refused", good=check["passed"])}
        for check in report.get("checks", ())
    ]


def _coloured(said: str, *, good: bool) -> Markup:
    return Markup('<span class="{}">{}</span>').format("good" if good else "bad", said)


def _release_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """With the gate's verdict, and what it said of the goodput."""
    checks = row["report"].get("checks", ())
    return {
        **row,
        "link": _link(f"/releases/{row['version']}", row["version"]),
        "gate": verdict(row["report"]),
        "goodput": next((check["reason"] for check in checks if check["name"] == "goodput"), None),
        "at": _moment(row["created_at"]),
    }


def _run_row(row: Mapping[str, Any]) -> dict[str, Any]:
    progress = row["progress"]
    steps = progress.get("steps")
    return {
        **row,
        "link": _link(f"/runs/{row['id']}", row["id"]),
        "at": _moment(row["created_at"]),
        "line": progress_line(progress),
        "own_adapters": own_adapters_line(row["report"].get("own_adapters", ())),
        "share": progress["step"] / steps if steps and row["state"] in ACTIVE and "step" in progress else None,
    }


def _events(service: Service, limit: int) -> list[dict[str, Any]]:
    return [views.plain(event) | {"at": event.at} for event in list_events(service.database, limit)]


def _trial_line(canary: Mapping[str, Any]) -> str:
    report = canary["report"]
    return (
        f"Since {_moment(canary['started_at']):%Y-%m-%d %H:%M}, {canary['share']:.0%} of requests, beside release "
        f"{canary['live']}; {report.get('num_canary_requests', 0)} requests judged."
    )


def _link(path: str, text: object) -> Markup:
    return Markup('<a href="{}">{}</a>').format(path, text)


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
