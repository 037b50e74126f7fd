"""Commands that train, calibrate and judge."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaptive_spec.cli.apps import app
from adaptive_spec.cli.asking import ask, read_database, service_at, settings_at
from adaptive_spec.cli.options import Domain, Json, Limit, Token, Traces, Url
from adaptive_spec.cli.output import check_chart, pairs, print_json, require_folders, say, write_records
from adaptive_spec.serving.client import Client

if TYPE_CHECKING:
    from adaptive_spec.records.database import Database


RUN_EXIT_CODES = {"passed": 0, "refused": 3, "failed": 1, "cancelled": 1}


@app.command()
def retrain(
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the run's end.")] = False,
    trigger: Annotated[str, typer.Option(help="What is recorded as the run's reason.")] = "person",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that was interrupted last.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also with too little data.")] = False,
    url: Url = None,
    token: Token = "",
    json_: Json = False,
) -> None:
    """Start a training run now."""
    client = service_at(url, token)
    run_id = client.post("/api/retrain", {"trigger": trigger, "resume": resume, "force": force})["run_id"]
    if not wait:
        say({"run_id": run_id}, f"Run {run_id} started. `adaptive-spec runs` shows it.", json_)
        return
    run = _wait_for(client, run_id)
    error = f": {run['error']}" if run.get("error") else ""
    say(run, f"Run {run_id} {run['state']}{error}", json_)
    raise typer.Exit(RUN_EXIT_CODES[run["state"]])


@app.command()
def calibrate(
    domain: Domain = None,
    chart: Annotated[Path | None, typer.Option(help="PNG or SVG file for the curves behind it.")] = None,
    url: Url = None,
    token: Token = "",
    json_: Json = False,
) -> None:
    """Refit scalings and thresholds from the records now, and say what changed and why."""
    check_chart(chart)
    found = service_at(url, token, timeout_seconds=600).post("/api/calibrate", {"domain": domain})
    _show_calibrations(found, chart, json_)


@app.command()
def calibrations(
    domain: Domain = None,
    limit: Limit = 20,
    chart: Annotated[Path | None, typer.Option(help="PNG or SVG file for the curves of each domain's latest.")] = None,
    url: Url = None,
    json_: Json = False,
) -> None:
    """What earlier calibrations changed, and why."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.calibrations(database, domain=domain, limit=limit)

    check_chart(chart)
    _show_calibrations(ask(url, "/api/calibrations", {"domain": domain, "limit": limit}, direct), chart, json_)


@app.command()
def evaluate(
    adapter: Annotated[
        list[Path] | None, typer.Option("--adapter", help="Folder of an adapter to judge; may be repeated.")
    ] = None,
    release: Annotated[
        list[str] | None, typer.Option("--release", help="Version or folder of a release to judge; may be repeated.")
    ] = None,
    traces: Traces = None,
    domain: Domain = None,
    chain_length: Annotated[int, typer.Option(min=1, max=64, help="Tokens of each chain.")] = 4,
    live: Annotated[bool, typer.Option(help="Judge the live release too.")] = True,
    draft: Annotated[str | None, typer.Option(help="Draft model.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the intervals.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the list of records.")] = None,
    chart: Annotated[Path | None, typer.Option(help="PNG or SVG file for the chart.")] = None,
) -> None:
    """Judge the draft, the live release and candidates on held-out traces, without live traffic."""
    require_folders(json_file)
    check_chart(chart)
    settings = settings_at(traces, {"model": {"draft": draft}})
    from adaptive_spec.bench.evaluation import evaluate as judge
    from adaptive_spec.bench.evaluation_chart import draw_evaluation
    from adaptive_spec.bench.evaluation_report import build_records, print_report
    from adaptive_spec.bench.progress import Teller

    tell = Teller(sys.stderr)
    found = judge(
        settings,
        adapters=adapter or (),
        releases=release or (),
        with_live=live,
        domain=domain,
        chain_length=chain_length,
        seed=seed,
        tell=tell,
    )
    tell.done("evaluate", "")
    records = build_records(found, settings)
    write_records(records, json_file)
    if chart is not None:
        draw_evaluation(records, chart)
    print_report(records)


@app.command()
def distil(
    out: Annotated[Path, typer.Option(help="New folder of the adapter.")],
    traces: Traces = None,
    domain: Annotated[str | None, typer.Option("--domain", help="Train on this domain's traces alone.")] = None,
    base: Annotated[str | None, typer.Option(help="Draft model to adapt; without it, the settings'.")] = None,
    target: Annotated[str | None, typer.Option(help="Target model that the traces are of.")] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Rank of the LoRA.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="At most so many epochs.")] = None,
    time_limit: Annotated[float | None, typer.Option(min=1, help="Seconds of training at most.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    chain_length: Annotated[int, typer.Option(min=1, max=64, help="Tokens of each chain when judged.")] = 4,
    json_: Json = False,
) -> None:
    """Train an adapter on recorded traces, for use elsewhere: a plain peft folder, no service, no release."""
    learning = {"rank": rank, "max_epochs": epochs, "time_limit_seconds": time_limit, "seed": seed}
    settings = settings_at(traces, {"model": {"draft": base, "target": target}, "learning": learning})
    from adaptive_spec.bench.evaluation_report import print_figures
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.learning.offline import distil_adapter

    tell = Teller(sys.stderr)
    report = distil_adapter(
        settings,
        out,
        domain=domain,
        chain_length=chain_length,
        progress=lambda progress: tell("distil", pairs(progress)),
    )
    trained = report["distil"]
    tell.done("distil", f"{trained['num_tokens']} tokens, best epoch {trained['best_epoch']}, {trained['stopped']}")
    if json_:
        print_json(report)
        return
    print_figures(report["held_out"], chain_length)
    typer.echo(out)


@app.command()
def ablate(
    out: Annotated[Path, typer.Argument(help="File of JSON lines, a training each; what it holds is not repeated.")],
    vary: Annotated[
        list[str] | None,
        typer.Option(help="setting=value,value of [learning], top_k=8,full or domain=code; may be repeated."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each variation.")] = 3,
    chain_length: Annotated[int, typer.Option(min=1, help="Of the chains that acceptance is judged at.")] = 4,
    traces_per_domain: Annotated[int | None, typer.Option(min=2, help="To train on: so many, the newest.")] = None,
    held_out_per_domain: Annotated[int | None, typer.Option(min=2, help="To judge on: so many, the newest.")] = None,
    json_: Json = False,
) -> None:
    """What each choice of a training run is worth, on recorded traces."""
    from adaptive_spec.bench.ablation import ablate as run
    from adaptive_spec.bench.ablation import variations
    from adaptive_spec.bench.ablation_report import print_report, summarise
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.settings import load_settings

    require_folders(out)
    settings, tell = load_settings(), Teller(sys.stderr)
    chosen = variations(settings.learning, vary or ())

    def read(database: "Database") -> list[dict[str, Any]]:
        return run(
            settings,
            database,
            chosen,
            seeds,
            out,
            chain_length=chain_length,
            traces_per_domain=traces_per_domain,
            held_out_per_domain=held_out_per_domain,
            tell=tell,
        )

    found = read_database(settings.records.url, read)
    tell.done("ablate", "")
    if json_:
        print_json(summarise(found))
    else:
        print_report(found)


def _wait_for(client: Client, run_id: int) -> dict[str, Any]:
    said = ""
    while True:
        run = client.get(f"/api/runs/{run_id}")
        if run["state"] in RUN_EXIT_CODES:
            return run
        line = f"{run['state']} {pairs(run.get('progress') or {})}"
        if line != said:
            typer.echo(line, err=True)
            said = line
        time.sleep(1.0)


def _show_calibrations(found: dict[str, Any], chart: Path | None, as_json: bool) -> None:
    from adaptive_spec.bench.calibration_chart import draw_calibrations
    from adaptive_spec.serving.calibrations import told

    if chart is not None:
        draw_calibrations(found["calibrations"], chart)
    say(found, "\n\n".join(map(told, found["calibrations"])) or "None yet.", as_json)
