"""``adaptive-spec releases``, and going back to an earlier one."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaptive_spec.cli.apps import app, releases_app
from adaptive_spec.cli.asking import ask, service_at
from adaptive_spec.cli.options import Before, Csv, Json, Limit, Token, Url, Version
from adaptive_spec.cli.output import say, show

if TYPE_CHECKING:
    from adaptive_spec.records.database import Database


CHECKS = ("name", "passed", "reason")
GATE_FIGURES = (
    "domain",
    "num_requests",
    "goodput_before",
    "goodput",
    "goodput_low",
    "goodput_high",
    "acceptance_length_before",
    "acceptance_length",
)


@releases_app.callback()
def releases(
    ctx: typer.Context,
    before: Before = None,
    limit: Limit = 100,
    url: Url = None,
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """The latest releases and which is live."""
    if ctx.invoked_subcommand is not None:
        return
    from adaptive_spec.releases.report import verdict

    query: dict[str, Any] = {"limit": limit, "before": before}

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.releases(database, **query)

    found = ask(url, "/api/releases", query, direct)
    rows = [{**row, "gate": verdict(row.get("report") or {})} for row in found["releases"]]
    if show(found, rows, ("version", "state", "gate", "parent", "created_at", "folder"), json_, csv_):
        typer.echo(f"Live: release {found['live']}")


@releases_app.command("status")
def releases_status(url: Url = None, json_: Json = False, csv_: Csv = False) -> None:
    """Every process of the service, the release that it runs, and which one leads."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views
        from adaptive_spec.settings import load_settings

        return views.decoders(database, gone_seconds=load_settings().cluster.gone_seconds)

    found = ask(url, "/api/decoders", {}, direct)
    columns = ("id", "host", "pid", "role", "url", "release", "state", "age_seconds", "started_at", "version")
    if show(found, found["decoders"], columns, json_, csv_):
        typer.echo(f"Live: release {found['live']}")


@releases_app.command("canary")
def releases_canary(
    promote: Annotated[bool, typer.Option("--promote", help="Make the release on trial live now.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Roll the release on trial back now.")] = False,
    reason: Annotated[str, typer.Option(help="What is recorded as the reason.")] = "asked for",
    limit: Limit = 20,
    url: Url = None,
    token: Token = "",
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """The release on trial and how it does, and past trials; or end the trial."""
    if promote and abort:
        raise typer.BadParameter("A trial ends one way; give --promote or --abort.")
    if promote or abort:
        order = {"action": "promote" if promote else "abort", "reason": reason}
        found = service_at(url, token).post("/api/canary", order)
        say(found, f"Release {found['live']} is live.", json_)
        return

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.canary(database, limit=limit)

    found = ask(url, "/api/canary", {"limit": limit}, direct)
    columns = ("release", "live", "share", "state", "started_at", "ended_at", "reason")
    if show(found, found["canaries"], columns, json_, csv_) and found["running"]:
        from adaptive_spec.serving.canaries import told

        typer.echo(told(found["running"]))


@releases_app.command("show")
def releases_show(version: Version, url: Url = None, json_: Json = False, csv_: Csv = False) -> None:
    """What the gate asked of a release and what it found, check by check and domain by domain."""
    found = _release(url, version)
    gate = found["gate"]
    checks = [{**c, "passed": "yes" if c["passed"] else "NO"} for c in gate.get("checks", [])]
    if not show(found, checks, CHECKS, json_, csv_):
        return
    if gate.get("domains"):
        show(found, gate["domains"], GATE_FIGURES, False)
    if override := gate.get("override"):
        typer.echo(f"Forced at {override['at']} over {', '.join(override['checks'])}: {override['reason']}")
    typer.echo(f"Release {version} is {found['state']}. {found.get('unreadable') or ''}".rstrip())


@releases_app.command("diff")
def releases_diff(first: Version, second: Version, url: Url = None, json_: Json = False, csv_: Csv = False) -> None:
    """What differs between two releases: thresholds, provenance, and what the gate said."""
    from adaptive_spec.releases.difference import differences

    found = [asdict(row) for row in differences(_release(url, first), _release(url, second))]
    rows = [
        {"field": f"{row['part']}: {row['path']}", str(first): row["before"], str(second): row["after"]}
        for row in found
    ]
    show({"differences": found}, rows, None, json_, csv_)


@releases_app.command("publish")
def releases_publish(
    version: Version,
    force: Annotated[bool, typer.Option("--force", help="Also over the gate's refusal; needs --reason.")] = False,
    reason: Annotated[str, typer.Option(help="What is recorded as the reason.")] = "",
    url: Url = None,
    token: Token = "",
    json_: Json = False,
) -> None:
    """Put this release live: one that passed or served before, or a refused one by force."""
    body = {"force": force, "reason": reason}
    found = service_at(url, token).post(f"/api/releases/{version}/publish", body)
    say(found, f"Release {found['live']} is live.", json_)


@app.command()
def rollback(
    to: Annotated[int | None, typer.Option(min=0, help="The release; without it, the parent of the live one.")] = None,
    reason: Annotated[str, typer.Option(help="What is recorded as the reason.")] = "asked for",
    url: Url = None,
    token: Token = "",
    json_: Json = False,
) -> None:
    """Put an earlier release live again."""
    found = service_at(url, token).post("/api/releases/rollback", {"to": to, "reason": reason})
    say(found, f"Release {found['live']} is live.", json_)


def _release(url: str | None, version: int) -> dict[str, Any]:
    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views
        from adaptive_spec.settings import load_settings

        return views.release(database, load_settings().releases.folder, version)

    return ask(url, f"/api/releases/{version}", {}, direct)
