"""Commands that show what the service has recorded."""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaptive_spec.cli.apps import app
from adaptive_spec.cli.asking import ask, read_database
from adaptive_spec.cli.options import Before, Csv, Domain, Json, Limit, Url
from adaptive_spec.cli.output import check_chart, print_json, show

if TYPE_CHECKING:
    from adaptive_spec.bench.simulate_records import RecordedSimulation
    from adaptive_spec.records.database import Database


@app.command()
def stats(
    domain: Domain = None,
    release: Annotated[int | None, typer.Option(help="Only this release.")] = None,
    policy: Annotated[str | None, typer.Option(help="Only requests under: policy, fixed, off or cache.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Only chains of: model or ngram.")] = None,
    verifier: Annotated[str | None, typer.Option(help="Only steps judged by this verifier.")] = None,
    days: Annotated[float | None, typer.Option(min=0, max=36_500, help="Only the last so many days.")] = None,
    series: Annotated[bool, typer.Option("--series", help="Over time, a row per bucket; the last day unless told.")] = (
        False
    ),
    bucket: Annotated[str | None, typer.Option(help="Of a series: minute, hour or day; else what suits.")] = None,
    url: Url = None,
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """Acceptance, speed and divergence per domain, or over time: adaptive-spec stats --series --days 7 --csv"""
    about: dict[str, Any] = {
        "domain": domain,
        "release": release,
        "policy": policy,
        "drafter": drafter,
        "verifier": verifier,
    }
    if series:
        _show_series(about, days, bucket, url, json_, csv_)
        return

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.records.slices import Slice
        from adaptive_spec.serving import views

        return views.stats(database, Slice(**about), days=days)

    found = ask(url, "/api/stats", {**about, "days": days}, direct)
    columns = (
        "domain",
        "num_requests",
        "num_cached_requests",
        "num_spec_steps",
        "draft_acceptance_rate",
        "mean_acceptance_length",
        "tokens_per_second",
        "divergence_share",
    )
    show(found, found["domains"], columns, json_, csv_)


@app.command()
def domains(url: Url = None, json_: Json = False, csv_: Csv = False) -> None:
    """Every domain seen so far."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.domains(database)

    found = ask(url, "/api/domains", {}, direct)
    show(found, [{"domain": name} for name in found["domains"]], ("domain",), json_, csv_)


@app.command()
def events(
    limit: Limit = 50,
    kind: Annotated[str | None, typer.Option(help="Only this kind.")] = None,
    domain: Domain = None,
    before: Before = None,
    url: Url = None,
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """What the service did and what befell it."""
    query: dict[str, Any] = {"limit": limit, "kind": kind, "domain": domain, "before": before}

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.events(database, **query)

    found = ask(url, "/api/events", query, direct)
    show(found, found["events"], ("id", "at", "kind", "domain", "release", "detail"), json_, csv_)


@app.command()
def drift(url: Url = None, json_: Json = False, csv_: Csv = False) -> None:
    """Acceptance and calibration as drift detection sees them, and when they last changed."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.calibration.watch import replay
        from adaptive_spec.releases.registry import live_release
        from adaptive_spec.serving import views
        from adaptive_spec.settings import load_settings

        settings = load_settings()
        live = live_release(database, settings.releases.folder)
        return views.drift(database, replay(database, settings.drift, live) if settings.drift.enabled else ())

    found = ask(url, "/api/drift", {}, direct)
    columns = ("domain", "drafter", "verifier", "stream", "release", "mean", "num_steps", "last_drift")
    show(found, found["streams"], columns, json_, csv_)


@app.command()
def simulate(
    domain: Domain = None,
    release: Annotated[
        int | None, typer.Option(min=0, help="The release whose steps; without it, the live one.")
    ] = None,
    drafter: Annotated[str, typer.Option(help="Whose chains; only those of the draft model can be.")] = "model",
    batch: Annotated[int, typer.Option(min=1, help="Rows of the steps whose cost is charged.")] = 1,
    split: Annotated[float, typer.Option(min=0, max=0.95, help="Share of the requests to learn from.")] = 0.5,
    cost: Annotated[str | None, typer.Option(help="Key of a stored cost, or a JSON file with one.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of filling in and of the intervals.")] = 0,
    chart: Annotated[Path | None, typer.Option(help="PNG or SVG file for the chart.")] = None,
    json_: Json = False,
) -> None:
    """What other length policies would have made of the recorded traffic."""
    from adaptive_spec.bench.simulate_chart import draw_simulation
    from adaptive_spec.bench.simulate_records import simulate_records
    from adaptive_spec.bench.simulate_report import print_report
    from adaptive_spec.settings import load_settings

    check_chart(chart)
    settings = load_settings()

    def run(database: "Database") -> "RecordedSimulation":
        return simulate_records(
            database,
            settings,
            domain=domain,
            release=release,
            drafter=drafter,
            rows=batch,
            split=split,
            cost=cost,
            seed=seed,
        )

    found = read_database(settings.records.url, run)
    if chart is not None:
        draw_simulation(found, chart)
    if json_:
        print_json(found.to_dict())
    else:
        print_report(found)


@app.command()
def risk(
    domain: Domain = None,
    release: Annotated[
        int | None, typer.Option(min=0, help="The release whose draft; without it, the live one.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many resamplings.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the resamplings.")] = 0,
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """How often verifiers' thresholds calibrated on the recorded traffic exceed the divergence budget."""
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.bench.risk import DomainRisk, recorded_risk
    from adaptive_spec.settings import load_settings

    settings, tell = load_settings(), Teller(sys.stderr)

    def run(database: "Database") -> list[DomainRisk]:
        return recorded_risk(
            database, settings, domain=domain, release=release, num_samples=samples, seed=seed, tell=tell
        )

    rows = [found.to_dict() for found in read_database(settings.records.url, run)]
    columns = (
        "domain",
        "budget",
        "allowed_share",
        "exceeded_share",
        "expected_exceeded_share",
        "relaxed_share",
        "divergence_share",
        "tokens_per_step",
        "tokens_per_step_exact",
        "num_requests",
    )
    show({"domains": rows}, rows, columns, json_, csv_)


def _show_series(
    about: dict[str, Any], days: float | None, bucket: str | None, url: str | None, as_json: bool, as_csv: bool
) -> None:
    if bucket not in (None, "minute", "hour", "day"):
        raise typer.BadParameter("A bucket is a minute, an hour or a day.")
    since = None if days is None else datetime.now(UTC) - timedelta(days=days)

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.records.slices import Slice
        from adaptive_spec.serving import views

        return views.series(database, Slice(**about), since=since, bucket=bucket)  # type: ignore[arg-type]

    query = {**about, "since": since.isoformat() if since else None, "bucket": bucket}
    found = ask(url, "/api/series", query, direct)
    columns = (
        "start",
        "num_requests",
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "num_emitted_tokens",
        "draft_acceptance_rate",
        "mean_acceptance_length",
        "tokens_per_second",
        "divergence_share",
    )
    show(found, found["buckets"], columns, as_json, as_csv)
