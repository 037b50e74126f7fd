"""``adaptive-spec traces``."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from adaptive_spec.cli.apps import traces_app
from adaptive_spec.cli.asking import ask, service_at, tell, trace_store
from adaptive_spec.cli.options import Csv, Domain, Json, Token, Url
from adaptive_spec.cli.output import say, show
from adaptive_spec.errors import RecordsError

if TYPE_CHECKING:
    from adaptive_spec.records.database import Database


@traces_app.callback()
def traces(ctx: typer.Context, domain: Domain = None, url: Url = None, json_: Json = False, csv_: Csv = False) -> None:
    """What is stored of each domain to learn from, and what was dropped and why."""
    if ctx.invoked_subcommand is not None:
        return

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.traces(database, domain=domain)

    found = ask(url, "/api/traces", {"domain": domain}, direct)
    columns = (
        "domain",
        "num_traces",
        "held_out_share",
        "num_tokens",
        "bytes_per_token",
        "kept_mass",
        "dropped",
        "oldest",
        "newest",
    )
    show(found, found["domains"], columns, json_, csv_)


@traces_app.command("delete")
def traces_delete(
    request_id: Annotated[str, typer.Argument(help="The id of the answer; its choices ID-0, ID-1, … go too.")],
    url: Url = None,
    token: Token = "",
    json_: Json = False,
) -> None:
    """Delete what is stored of a request's text."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.records.retention import forget_request
        from adaptive_spec.serving import views

        found = forget_request(trace_store(database), request_id)
        if not found.num_traces and not found.num_evidence:
            raise RecordsError(views.nothing_stored(request_id))
        told: dict[str, Any] = views.plain(found)
        return told

    route = f"/api/traces/{quote(request_id, safe='')}"
    found = tell(url, lambda: service_at(url, token, timeout_seconds=600).delete(route), direct)
    text = f"Deleted {found['num_traces']} traces and {found['num_evidence']} measured chains of {request_id}."
    say(found, text, json_)


@traces_app.command("import")
def traces_import(
    prompts: Annotated[Path, typer.Argument(help='JSONL file of {"prompt": …} or {"messages": […]}.')],
    domain: Annotated[str, typer.Option("--domain", help="The domain of the traces.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete prompts as they are, without the chat template.")
    ] = False,
    json_: Json = False,
) -> None:
    """Let the target answer prompts, offline, and keep the answers as traces."""
    from adaptive_spec.importing.answers import Writing, check_domain, import_prompts
    from adaptive_spec.importing.prompts import read_prompts
    from adaptive_spec.settings import load_settings

    settings = load_settings()
    writing = Writing(domain, max_tokens, temperature, seed, raw)
    check_domain(domain, settings)
    read, problems = read_prompts(prompts)

    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.models.loading import load_pair
    from adaptive_spec.records.database import Database

    database, tell = Database(settings.records.url), Teller(sys.stderr)
    try:
        database.upgrade()
        report = import_prompts(trace_store(database), load_pair(settings.model), settings, read, writing, tell)
    finally:
        database.close()
    problems = sorted([*problems, *report.problems], key=lambda problem: problem.line)
    text = (
        f"{report.num_stored} traces stored, {report.num_known} known already, {report.num_dropped} dropped, "
        f"{len(problems)} lines passed over"
    )
    tell.done("import", text)
    for problem in problems:
        typer.echo(f"{prompts}:{problem.line}: {problem.reason}", err=True)
    say(asdict(replace(report, problems=tuple(problems))), text, json_)
    raise typer.Exit(1 if problems else 0)
