"""The command line.  Thin: it parses, calls, prints.

What is heavy to import is imported inside the command that needs it, so that ``--help`` is instant.  Exit codes:
0 done, 1 a check or a run failed, 2 an error with a message, 3 the gate refused the run's candidate.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import quote

# Threads that wait for work sleep.  By default they spin, and beside another busy process decoding then collapses.
# OpenMP reads this once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer
from typer.core import TyperGroup

from adaptive_spec.errors import AdaptiveSpecError, RecordsError
from adaptive_spec.serving.client import DEFAULT_URL, Client, UnreachableError
from adaptive_spec.serving.progress import own_adapters_line, progress_line

if TYPE_CHECKING:
    from adaptive_spec.bench.simulate_records import RecordedSimulation
    from adaptive_spec.healing.recipe import Recipe
    from adaptive_spec.records.database import Database
    from adaptive_spec.records.traces import TraceStore
    from adaptive_spec.settings import Settings

T = TypeVar("T")
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
RUN_EXIT_CODES = {"passed": 0, "refused": 3, "failed": 1, "cancelled": 1}


class _Group(TyperGroup):
    """Prints an error of the tree as one message instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AdaptiveSpecError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Speculative decoding that keeps learning from the traffic it serves.",
)
config_app = typer.Typer(no_args_is_help=True, help="The settings.")
db_app = typer.Typer(no_args_is_help=True, help="The database.")
traces_app = typer.Typer(invoke_without_command=True, help="The traces that training learns from.")
models_app = typer.Typer(no_args_is_help=True, help="Targets and drafts.")
releases_app = typer.Typer(
    invoke_without_command=True, help="Releases: all of them, which is live, which on trial, who runs what."
)
app.add_typer(releases_app, name="releases")
app.add_typer(config_app, name="config")
app.add_typer(db_app, name="db")
app.add_typer(traces_app, name="traces")
app.add_typer(models_app, name="models")
app.add_typer(releases_app, name="releases")

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="ADAPTIVE_SPEC_URL", help=f"The running service.  [default: {DEFAULT_URL}]"),
]
Token = Annotated[
    str,
    typer.Option("--token", envvar=["ADAPTIVE_SPEC_TOKEN", "ADAPTIVE_SPEC_SERVER__TOKEN"], help="The service's token."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Domain = Annotated[str | None, typer.Option("--domain", help="Only this domain.")]
Traces = Annotated[
    str | None,
    typer.Option("--traces", help="Database URL, SQLite file, or folder with one; without it, the settings'."),
]
Version = Annotated[int, typer.Argument(min=0, help="The release.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many, the latest.")]
NumTokens = Annotated[int | None, typer.Option("--num-tokens", min=1, help="Tokens the target writes to heal on.")]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.")]
HealSeed = Annotated[int | None, typer.Option("--seed", help="Seed of writing and training.")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="JSON of heal settings; flags win.")]


@app.callback(invoke_without_command=True)
def main(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", help="The TOML file of settings.")] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib import metadata

        try:
            typer.echo(metadata.version("adaptive-spec"))
        except metadata.PackageNotFoundError:
            typer.echo("unknown")
        raise typer.Exit
    if config is not None:
        os.environ["ADAPTIVE_SPEC_CONFIG"] = str(config)


# ---- serving


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
    target: Annotated[str | None, typer.Option(help="Target model.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model.")] = None,
    role: Annotated[
        str | None,
        typer.Option(help="all, decoder (never trains) or trainer (never decodes), among several processes."),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve the OpenAI-compatible API and learn from its traffic."""
    import logging

    from adaptive_spec.settings import load_settings

    settings = load_settings(
        {
            "server": {"host": host, "port": port},
            "model": {"target": target, "draft": draft},
            "cluster": {"role": role},
        }
    )
    from adaptive_spec.serving.app import check_bind, create_app

    check_bind(settings.server)
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("apscheduler").setLevel(logging.WARNING)  # else it tells of every look whether a job is due

    from adaptive_spec.service import Service
    from adaptive_spec.serving.server import exit_on_sigterm, run

    service = Service(settings)
    exit_on_sigterm()
    try:
        service.start(lambda part: _report(f"starting: {part}"))
        run(create_app(service), service, log_level)
    finally:
        service.stop()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    domain: Annotated[str | None, typer.Option("--domain", help="The domain of the prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    chain_length: Annotated[int | None, typer.Option(min=0, help="Fixed chain length; 0: no speculation.")] = None,
    drafter: Annotated[str | None, typer.Option(help="model, ngram or combined; without it, the service's.")] = None,
    verifier: Annotated[str | None, typer.Option(help="exact, or a relaxed one that the operator allows.")] = None,
    record: Annotated[bool, typer.Option(help="Let the service keep a trace for learning.")] = True,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it is, without the chat template.")
    ] = False,
    url: Url = None,
    token: Token = "",
    json_: Json = False,
) -> None:
    """Complete a prompt with the running service."""
    text = sys.stdin.read() if prompt == "-" else prompt
    body = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "metadata": {"domain": domain} if domain else None,
        "speculation": {"chain_length": chain_length, "drafter": drafter, "verifier": verifier, "record": record},
    } | ({"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]})
    pieces: list[str] = []
    last: dict[str, Any] = {}
    client = Client(url or DEFAULT_URL, token)
    for event in client.stream("/v1/completions" if raw else "/v1/chat/completions", body):
        for choice in event["choices"]:
            piece = choice["text"] if raw else choice["delta"].get("content", "")
            pieces.append(piece)
            if not json_:
                typer.echo(piece, nl=False)
        last = event
    if json_:
        _print_json({"text": "".join(pieces), "usage": last.get("usage"), "speculation": last.get("speculation")})
        return
    typer.echo()
    if usage := last.get("usage"):
        steps = max(last["speculation"]["num_spec_steps"], 1)
        typer.echo(f"[{usage['completion_tokens']} tokens in {steps} steps]", err=True)


# ---- what the service knows


@app.command()
def stats(
    domain: Domain = None,
    release: Annotated[int | None, typer.Option(help="Only this release.")] = None,
    policy: Annotated[str | None, typer.Option(help="Only requests under: policy, fixed, off or cache.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Only chains of: model or ngram.")] = None,
    verifier: Annotated[str | None, typer.Option(help="Only steps judged by this verifier.")] = None,
    days: Annotated[float | None, typer.Option(min=0, max=36_500, help="Only the last so many days.")] = None,
    url: Url = None,
    json_: Json = False,
) -> None:
    """Acceptance, speed and divergence per domain."""
    query: dict[str, Any] = {
        "domain": domain,
        "release": release,
        "policy": policy,
        "drafter": drafter,
        "verifier": verifier,
        "days": days,
    }

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.stats(database, **query)

    found = _ask(url, "/api/stats", query, direct)
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
    _show(found, found["domains"], columns, json_)


@app.command()
def domains(url: Url = None, json_: Json = False) -> None:
    """Every domain seen so far."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.domains(database)

    found = _ask(url, "/api/domains", {}, direct)
    _show(found, [{"domain": name} for name in found["domains"]], ("domain",), json_)


@app.command()
def runs(limit: Limit = 20, url: Url = None, json_: Json = False) -> None:
    """The latest training runs."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.runs(database, limit=limit)

    found = _ask(url, "/api/runs", {"limit": limit}, direct)
    rows = [
        {
            **run,
            "progress": progress_line(run.get("progress") or {}),
            "own_adapters": own_adapters_line((run.get("report") or {}).get("own_adapters") or ()),
        }
        for run in found["runs"]
    ]
    columns = ("id", "trigger", "state", "created_at", "finished_at", "progress", "own_adapters", "release", "error")
    _show(found, rows, columns, json_)


@releases_app.callback()
def releases(ctx: typer.Context, url: Url = None, json_: Json = False) -> None:
    """All releases and which is live."""
    if ctx.invoked_subcommand is not None:
        return
    from adaptive_spec.releases.report import verdict

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.releases(database)

    found = _ask(url, "/api/releases", {}, direct)
    rows = [{**row, "gate": verdict(row.get("report") or {})} for row in found["releases"]]
    _show(found, rows, ("version", "state", "gate", "parent", "created_at", "folder"), json_)
    if not json_:
        typer.echo(f"Live: release {found['live']}")


@releases_app.command("status")
def releases_status(url: Url = None, json_: Json = False) -> None:
    """Every process of the service, the release that it runs, and which one leads."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views
        from adaptive_spec.settings import load_settings

        return views.decoders(database, gone_seconds=load_settings().cluster.gone_seconds)

    found = _ask(url, "/api/decoders", {}, direct)
    columns = ("id", "host", "pid", "role", "url", "release", "state", "age_seconds", "started_at", "version")
    _show(found, found["decoders"], columns, json_)
    if not json_:
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
) -> None:
    """The release on trial and how it does, and past trials; or end the trial."""
    if promote and abort:
        raise typer.BadParameter("A trial ends one way; give --promote or --abort.")
    if promote or abort:
        order = {"action": "promote" if promote else "abort", "reason": reason}
        found = Client(url or DEFAULT_URL, token).post("/api/canary", order)
        _say(found, f"Release {found['live']} is live.", json_)
        return

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.canary(database, limit=limit)

    found = _ask(url, "/api/canary", {"limit": limit}, direct)
    columns = ("release", "live", "share", "state", "started_at", "ended_at", "reason")
    _show(found, found["canaries"], columns, json_)
    if not json_ and found["running"]:
        from adaptive_spec.serving.canaries import told

        typer.echo(told(found["running"]))


@releases_app.command("show")
def releases_show(version: Version, url: Url = None, json_: Json = False) -> None:
    """What the gate asked of a release and what it found, check by check and domain by domain."""
    found = _release(url, version)
    gate = found["gate"]
    _show(found, [{**c, "passed": "yes" if c["passed"] else "NO"} for c in gate.get("checks", [])], CHECKS, json_)
    if json_:
        return
    if gate.get("domains"):
        _show(found, gate["domains"], GATE_FIGURES, False)
    if override := gate.get("override"):
        typer.echo(f"Forced at {override['at']} over {', '.join(override['checks'])}: {override['reason']}")
    typer.echo(f"Release {version} is {found['state']}. {found.get('unreadable') or ''}".rstrip())


@releases_app.command("diff")
def releases_diff(first: Version, second: Version, url: Url = None, json_: Json = False) -> None:
    """What differs between two releases: thresholds, provenance, and what the gate said."""
    from adaptive_spec.releases.difference import differences

    found = [asdict(row) for row in differences(_release(url, first), _release(url, second))]
    rows = [
        {"field": f"{row['part']}: {row['path']}", str(first): row["before"], str(second): row["after"]}
        for row in found
    ]
    _show({"differences": found}, rows, None, json_)


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
    found = Client(url or DEFAULT_URL, token).post(f"/api/releases/{version}/publish", body)
    _say(found, f"Release {found['live']} is live.", json_)


@app.command()
def events(
    limit: Limit = 50,
    kind: Annotated[str | None, typer.Option(help="Only this kind.")] = None,
    url: Url = None,
    json_: Json = False,
) -> None:
    """What the service did and what befell it."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.events(database, limit=limit, kind=kind)

    found = _ask(url, "/api/events", {"limit": limit, "kind": kind}, direct)
    _show(found, found["events"], ("at", "kind", "domain", "release", "detail"), json_)


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

    _check_chart(chart)
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

    found = _read_database(settings.records.url, run)
    if chart is not None:
        draw_simulation(found, chart)
    if json_:
        _print_json(found.to_dict())
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

    rows = [found.to_dict() for found in _read_database(settings.records.url, run)]
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
    _show({"domains": rows}, rows, columns, json_)


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
    _require_folders(json_file)
    _check_chart(chart)
    settings = _settings_at(traces, {"model": {"draft": draft}})
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
    _write_records(records, json_file)
    if chart is not None:
        draw_evaluation(records, chart)
    print_report(records)


@app.command()
def drift(url: Url = None, json_: Json = False) -> None:
    """Acceptance and calibration as drift detection sees them, and when they last changed."""

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.calibration.watch import replay
        from adaptive_spec.releases.registry import live_release
        from adaptive_spec.serving import views
        from adaptive_spec.settings import load_settings

        settings = load_settings()
        live = live_release(database, settings.releases.folder)
        return views.drift(database, replay(database, settings.drift, live) if settings.drift.enabled else ())

    found = _ask(url, "/api/drift", {}, direct)
    columns = ("domain", "drafter", "verifier", "stream", "release", "mean", "num_steps", "last_drift")
    _show(found, found["streams"], columns, json_)


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
    settings = _settings_at(traces, {"model": {"draft": base, "target": target}, "learning": learning})
    from adaptive_spec.bench.evaluation_report import print_figures
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.learning.offline import distil_adapter

    tell = Teller(sys.stderr)
    report = distil_adapter(
        settings,
        out,
        domain=domain,
        chain_length=chain_length,
        progress=lambda progress: tell("distil", _line(progress)),
    )
    trained = report["distil"]
    tell.done("distil", f"{trained['num_tokens']} tokens, best epoch {trained['best_epoch']}, {trained['stopped']}")
    if json_:
        _print_json(report)
        return
    print_figures(report["held_out"], chain_length)
    typer.echo(out)


# ---- what the service is told


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
    client = Client(url or DEFAULT_URL, token)
    run_id = client.post("/api/retrain", {"trigger": trigger, "resume": resume, "force": force})["run_id"]
    if not wait:
        _say({"run_id": run_id}, f"Run {run_id} started. `adaptive-spec runs` shows it.", json_)
        return
    run = _wait_for(client, run_id)
    error = f": {run['error']}" if run.get("error") else ""
    _say(run, f"Run {run_id} {run['state']}{error}", json_)
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
    _check_chart(chart)
    found = Client(url or DEFAULT_URL, token, timeout_seconds=600).post("/api/calibrate", {"domain": domain})
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

    _check_chart(chart)
    _show_calibrations(_ask(url, "/api/calibrations", {"domain": domain, "limit": limit}, direct), chart, json_)


@app.command()
def rollback(
    to: Annotated[int | None, typer.Option(min=0, help="The release; without it, the parent of the live one.")] = None,
    reason: Annotated[str, typer.Option(help="What is recorded as the reason.")] = "asked for",
    url: Url = None,
    token: Token = "",
    json_: Json = False,
) -> None:
    """Put an earlier release live again."""
    found = Client(url or DEFAULT_URL, token).post("/api/releases/rollback", {"to": to, "reason": reason})
    _say(found, f"Release {found['live']} is live.", json_)


# ---- checks


@app.command()
def doctor(models: Annotated[bool, typer.Option(help="Load the models too.")] = True, json_: Json = False) -> None:
    """Check settings, database, disk, threads and models."""
    from adaptive_spec.serving.doctor import examine
    from adaptive_spec.settings import load_settings

    findings = examine(load_settings(), with_models=models)
    rows = [{"check": f.check, "ok": "ok" if f.ok else "FAILED", "detail": f.detail} for f in findings]
    _show({"checks": [{"check": f.check, "ok": f.ok, "detail": f.detail} for f in findings]}, rows, None, json_)
    raise typer.Exit(0 if all(f.ok for f in findings) else 1)


@app.command()
def check_lossless(
    num_prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 48,
    drafter: Annotated[str, typer.Option(help="Who proposes: model, ngram or combined.")] = "model",
    chain_length: Annotated[int, typer.Option(min=0, help="Tokens of each chain; see --policy.")] = 4,
    policy: Annotated[bool, typer.Option("--policy", help="Let the length policy decide instead.")] = False,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Prompts decoded together; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
    json_: Json = False,
) -> None:
    """Check that speculation changes nothing the target would say."""
    from adaptive_spec.bench.lossless import BATCHES
    from adaptive_spec.bench.lossless import check_lossless as check
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.models.loading import load_pair
    from adaptive_spec.settings import load_settings

    tell = Teller(sys.stderr)
    report = check(
        load_pair(load_settings().model),
        num_prompts,
        seed,
        max_tokens=max_tokens,
        chain_length=None if policy else chain_length,
        drafter=drafter,
        batches=batch or BATCHES,
        progress=tell,
    )
    tell.done("check-lossless", "passed" if report.passed else "FAILED")
    details = report.to_dict()
    _say(details, "\n".join(f"{name}: {value}" for name, value in details.items()), json_)
    raise typer.Exit(0 if report.passed else 1)


@app.command()
def bench(
    domain: Annotated[list[str] | None, typer.Option("--domain", help="Only this domain; may be repeated.")] = None,
    side: Annotated[
        list[str] | None, typer.Option("--side", help="Only sides whose name contains this; may be repeated.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="Prompts per domain.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="At most so many tokens an answer.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Counted rounds, after one that warms up.")] = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Growth: a batch; repeatable.")] = None,
    prompt_tokens: Annotated[
        list[int] | None, typer.Option("--prompt-tokens", min=1, help="Growth: a prompt length; repeatable.")
    ] = None,
    growth: Annotated[bool | None, typer.Option(help="Measure growing batches and prompts too.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two domains, short answers, no growth: a few minutes.")
    ] = False,
    release: Annotated[
        str | None, typer.Option(help="Version or folder of a release whose draft all sides use.")
    ] = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of an adapter that all sides' draft wears.")] = None,
    target: Annotated[str | None, typer.Option(help="Target model.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the list of records.")] = None,
    chart: Annotated[Path | None, typer.Option(help="PNG or SVG file for the chart.")] = None,
) -> None:
    """Compare ways to decode, ours and others', side by side on this machine."""
    from adaptive_spec.bench.compare import compare
    from adaptive_spec.bench.compare_chart import check_chart, draw
    from adaptive_spec.bench.compare_report import all_ours_identical, build_records, describe, print_report
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.bench.sides import choose
    from adaptive_spec.bench.workloads import plan
    from adaptive_spec.settings import load_settings

    settings = load_settings({"model": {"target": target, "draft": draft}})
    made = plan(
        quick=quick,
        domains=tuple(domain or ()),
        sides=choose(side or ()),
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        rounds=rounds,
        batches=tuple(batch or ()),
        prompt_lengths=tuple(prompt_tokens or ()),
        growth=growth,
    )
    _require_folders(json_file, chart)
    if chart is not None:
        check_chart(chart)
    tell = Teller(sys.stderr)
    found = compare(settings, made, release=release, adapter=adapter, tell=tell)
    tell.done("bench", "")
    about = describe(settings, release or (str(adapter) if adapter else None), found.cost)
    records = build_records(found.cells, about)
    _write_records(records, json_file)
    if chart is not None:
        draw(records, chart)
    print_report(records)
    raise typer.Exit(0 if all_ours_identical(records) else 1)


@app.command("bench-policies")
def bench_policies(
    release: Annotated[str, typer.Option(help="Version or folder of the release whose draft and thresholds are used.")],
    domain: Annotated[list[str] | None, typer.Option("--domain", help="Only this domain; may be repeated.")] = None,
    num_prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts per domain.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds, after one that warms up.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=8, help="At most so many tokens an answer.")] = 48,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    database: Annotated[
        str | None, typer.Option(help="URL of the database with the release's earlier traffic, if not the settings'.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Target model.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the list of records.")] = None,
    chart: Annotated[Path | None, typer.Option(help="PNG or SVG file for the chart.")] = None,
) -> None:
    """Compare length policies, ours and others', in our decoder on this machine."""
    from adaptive_spec.bench.compare_chart import check_chart
    from adaptive_spec.bench.compare_report import describe
    from adaptive_spec.bench.policies import compare_policies
    from adaptive_spec.bench.policies_chart import draw_policies
    from adaptive_spec.bench.policies_report import all_identical, policy_records, print_report
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.bench.workloads import plan
    from adaptive_spec.settings import load_settings

    settings = load_settings({"model": {"target": target, "draft": draft}, "records": {"url": database}})
    made = plan(
        domains=tuple(domain or ()),
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        rounds=rounds,
        batches=(batch,),
        growth=False,
    )
    _require_folders(json_file, chart)
    if chart is not None:
        check_chart(chart)
    tell = Teller(sys.stderr)
    found = _read_database(
        settings.records.url, lambda opened: compare_policies(settings, made, opened, release=release, tell=tell)
    )
    tell.done("bench-policies", "")
    records = policy_records(found, describe(settings, release, found.cost))
    _write_records(records, json_file)
    if chart is not None:
        draw_policies(records, chart)
    print_report(records)
    raise typer.Exit(0 if all_identical(records) else 1)


@app.command()
def frontier(
    domain: Annotated[list[str] | None, typer.Option("--domain", help="Only this domain; may be repeated.")] = None,
    num_prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="Prompts per domain.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=8, help="At most so many tokens an answer.")] = None,
    chain_length: Annotated[int | None, typer.Option(min=1, max=16, help="The longest chain.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step whose seconds count.")] = None,
    live: Annotated[
        int | None, typer.Option(min=0, help="Relaxed points decoded for real, per domain; 0: none.")
    ] = None,
    timed: Annotated[int | None, typer.Option(min=1, help="Prompts per domain for live seconds.")] = None,
    num_tasks: Annotated[
        int | None, typer.Option("--tasks", min=0, help="Tasks with checkable answers, per set; 0: none.")
    ] = None,
    humaneval: Annotated[Path | None, typer.Option(help="File of HumanEval, if not installed.")] = None,
    gsm8k: Annotated[Path | None, typer.Option(help="File of GSM8K, if not installed.")] = None,
    unisolated: Annotated[
        bool, typer.Option("--unisolated", help="Run the model's programs even where they cannot be locked in.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two domains, few points: about two minutes.")] = False,
    release: Annotated[str | None, typer.Option(help="Version or folder of a release whose draft is used.")] = None,
    target: Annotated[str | None, typer.Option(help="Target model.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the list of records.")] = None,
    chart: Annotated[Path | None, typer.Option(help="PNG or SVG file for the chart.")] = None,
) -> None:
    """Show what relaxed verifiers gain in speed for what they diverge, per domain."""
    from adaptive_spec.bench.compare_chart import check_chart
    from adaptive_spec.bench.compare_report import describe
    from adaptive_spec.bench.frontier import Tasks, find_frontier, frontier_plan
    from adaptive_spec.bench.frontier_chart import draw_frontier
    from adaptive_spec.bench.frontier_report import frontier_records, print_frontier
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.settings import load_settings

    settings = load_settings({"model": {"target": target, "draft": draft}})
    made = frontier_plan(
        quick=quick,
        domains=tuple(domain or ()),
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        chain_length=chain_length,
        batch=batch,
        timed_prompts=timed,
        live=live,
        num_tasks=num_tasks,
    )
    _require_folders(json_file, chart)
    if chart is not None:
        check_chart(chart)
    tell = Teller(sys.stderr)
    found = find_frontier(settings, made, release=release, tasks=Tasks(humaneval, gsm8k, unisolated), tell=tell)
    tell.done("frontier", "")
    records = frontier_records(found, made, describe(settings, release, found.cost))
    _write_records(records, json_file)
    if chart is not None:
        draw_frontier(records, chart)
    print_frontier(records)


@app.command("bench-verifiers")
def bench_verifiers(
    vocab: Annotated[
        list[int] | None, typer.Option("--vocab", min=2, help="Tokens of a vocabulary; may be repeated.")
    ] = None,
    chain_length: Annotated[int, typer.Option(min=1, help="Tokens of each chain.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds, after one that warms up.")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the list of records.")] = None,
) -> None:
    """Measure what each verifier's decision costs beside the target's forward."""
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.bench.verification_cost import VOCABS, measure_all
    from adaptive_spec.bench.verification_cost_report import build_records, print_report
    from adaptive_spec.settings import load_settings

    _require_folders(json_file)
    tell = Teller(sys.stderr)
    measured = measure_all(load_settings(), vocab or VOCABS, chain_length, batch, rounds, tell)
    tell.done("bench-verifiers", "")
    records = build_records(measured, chain_length, batch, rounds)
    _write_records(records, json_file)
    print_report(records)


@app.command("bench-records")
def bench_records(
    database: Annotated[
        list[str] | None,
        typer.Option(help="URL of an empty database, which is filled; repeatable.  [default: a SQLite file that goes]"),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="URL of a database whose steps give the shape of traffic.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Emitted tokens of the recorded traffic.")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="Seed of the traffic.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the list of records.")] = None,
) -> None:
    """Measure how fast outcomes are written, what they take on the disk, and how fast statistics answer."""
    import tempfile

    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.bench.records_load import measure, shape_of
    from adaptive_spec.bench.records_report import print_report

    _require_folders(json_file)
    tell, templates = Teller(sys.stderr), shape_of(shape) if shape else None
    with tempfile.TemporaryDirectory() as folder:
        urls = database or [f"sqlite:///{folder}/records.db"]
        loads = [measure(url, tokens, templates, seed, tell) for url in urls]
    tell.done("bench-records", "")
    _write_records([load.to_dict() for load in loads], json_file)
    print_report(loads, [factor * tokens for factor in (1, 10, 100)])


@app.command("bench-swap")
def bench_swap(
    swaps: Annotated[int, typer.Option(min=2, help="Releases that are put live.")] = 100,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the updates.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the updates.")] = 0,
    target: Annotated[str | None, typer.Option(help="Target model.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the list of records.")] = None,
) -> None:
    """Measure how long decoding stands still when a release goes live.  Fails above one step at p99."""
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.bench.swaps import measure_swaps
    from adaptive_spec.bench.swaps_report import build_records, print_report
    from adaptive_spec.models.loading import load_pair
    from adaptive_spec.settings import load_settings

    _require_folders(json_file)
    settings = load_settings({"model": {"target": target, "draft": draft}})
    tell = Teller(sys.stderr)
    tell("bench-swap", "loading the models")
    pair = load_pair(settings.model)
    times = measure_swaps(
        pair, settings, swaps, batch, rank, lambda done: tell("bench-swap", f"{done} of {swaps} releases"), seed
    )
    tell.done("bench-swap", "")
    _write_records(build_records(times), json_file)
    print_report(times)
    raise typer.Exit(0 if times.longest_share <= 1 else 1)


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

    _require_folders(out)
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

    found = _read_database(settings.records.url, read)
    tell.done("ablate", "")
    if json_:
        _print_json(summarise(found))
    else:
        print_report(found)


@app.command("bench-shift")
def bench_shift(
    out: Annotated[Path, typer.Argument(help="Folder for databases, releases and records; new or empty.")],
    first: Annotated[list[str], typer.Option("--first", help="Domain served before the shift; may be repeated.")],
    then: Annotated[str, typer.Option(help="Domain served after it.")],
    every: Annotated[int, typer.Option(min=1, help="Logged requests between two runs.")] = 100,
    replay: Annotated[
        list[str] | None, typer.Option(help="A side: share of older tokens, or all of them alike; may be repeated.")
    ] = None,
    before: Annotated[int | None, typer.Option(min=2, help="To log of each first domain, at most.")] = None,
    after: Annotated[int | None, typer.Option(min=2, help="To log of the new domain, at most.")] = None,
    held_out: Annotated[int | None, typer.Option(min=2, help="To judge of each domain, at most.")] = None,
    oracle_epochs: Annotated[int, typer.Option(min=1, help="Of the oracle, at most.")] = 8,
    traces: Traces = None,
    chain_length: Annotated[int, typer.Option(min=1, max=64, help="Tokens of each chain when judged.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the order of requests and of intervals.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the list of records.")] = None,
    chart: Annotated[Path | None, typer.Option(help="PNG or SVG file for the chart.")] = None,
) -> None:
    """Shift recorded traffic from some domains to another: how soon the draft follows, what it forgets."""
    _require_folders(json_file, out)
    _check_chart(chart)
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.bench.shift import ALL, Shift, run_shift
    from adaptive_spec.bench.shift_chart import draw_shift
    from adaptive_spec.bench.shift_report import print_report

    tell, sides = Teller(sys.stderr), tuple(replay or (ALL, "0"))
    shift = Shift(tuple(first), then, before, after, held_out, every, oracle_epochs, sides, chain_length, seed)
    records = run_shift(_settings_at(traces, {}), out, shift, tell)
    tell.done("shift", "")
    _write_records(records, json_file)
    if chart is not None:
        draw_shift(records, chart)
    print_report(records)


@app.command("bench-training")
def bench_training(
    traces: Traces = None,
    steps: Annotated[int, typer.Option(min=4, help="Training steps, each beside a bare pass.")] = 200,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a batch; without it, the settings'.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the list of records.")] = None,
    chart: Annotated[Path | None, typer.Option(help="PNG or SVG file for the chart.")] = None,
) -> None:
    """Measure what a training step costs beside the model's own forward and backward, and its memory."""
    _require_folders(json_file)
    _check_chart(chart)
    settings = _settings_at(traces, {"learning": {"batch_tokens": batch_tokens}})
    from adaptive_spec.bench.training import bench_training as measure
    from adaptive_spec.bench.training_chart import draw_training
    from adaptive_spec.bench.training_report import build_records, print_report

    records = build_records(measure(settings, steps), settings)
    _write_records(records, json_file)
    if chart is not None:
        draw_training(records, chart)
    print_report(records)


@config_app.command("show")
def config_show(json_: Json = False) -> None:
    """Print the settings in force, without secrets."""
    from adaptive_spec.settings import load_settings

    shown = _without_secrets(load_settings())
    _say(shown, "\n".join(_toml_lines(shown)), json_)


@db_app.command("upgrade")
def db_upgrade() -> None:
    """Bring the database to this version's schema."""
    from adaptive_spec.records.database import Database
    from adaptive_spec.settings import load_settings

    url = load_settings().records.url
    database = Database(url)
    try:
        database.upgrade()
    finally:
        database.close()
    typer.echo(f"{_without_password(url)} is up to date.")


@db_app.command("prune")
def db_prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json_: Json = False,
) -> None:
    """Roll up outcomes, and delete what the settings `retention` keep no longer."""
    from adaptive_spec.pruning import prune
    from adaptive_spec.settings import load_settings

    settings = load_settings()
    found = asdict(_read_database(settings.records.url, lambda database: prune(database, settings, dry_run=dry_run)))
    files = {kind: " ".join(map(str, found[kind])) or "none" for kind in ("releases", "checkpoints")}
    rows = [{"what": name, "deleted": number} for name, number in {**found["rows"], **files}.items()]
    _show(found, rows, ("what", "deleted"), json_)
    if dry_run and not json_:
        typer.echo("Nothing was deleted.")


# ---- traces


@traces_app.callback()
def traces(ctx: typer.Context, domain: Domain = None, url: Url = None, json_: Json = False) -> None:
    """What is stored of each domain to learn from, and what was dropped and why."""
    if ctx.invoked_subcommand is not None:
        return

    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views

        return views.traces(database, domain=domain)

    found = _ask(url, "/api/traces", {"domain": domain}, direct)
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
    _show(found, found["domains"], columns, json_)


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

        found = forget_request(_trace_store(database), request_id)
        if not found.num_traces and not found.num_evidence:
            raise RecordsError(views.nothing_stored(request_id))
        told: dict[str, Any] = views.plain(found)
        return told

    route = f"/api/traces/{quote(request_id, safe='')}"
    found = _tell(url, lambda: Client(url or DEFAULT_URL, token, timeout_seconds=600).delete(route), direct)
    text = f"Deleted {found['num_traces']} traces and {found['num_evidence']} measured chains of {request_id}."
    _say(found, text, json_)


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
        report = import_prompts(_trace_store(database), load_pair(settings.model), settings, read, writing, tell)
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
    _say(asdict(replace(report, problems=tuple(problems))), text, json_)
    raise typer.Exit(1 if problems else 0)


# ---- models and the demo


@models_app.command("fetch")
def models_fetch(name: Annotated[str, typer.Argument(help="A known name, as in model.target.")]) -> None:
    """Download a target model."""
    from adaptive_spec.models.fetch import fetch

    typer.echo(fetch(name, _report))


@models_app.command("cut-draft")
def models_cut_draft(
    target: Annotated[str, typer.Argument(help="The target to cut from.")],
    out: Annotated[Path, typer.Argument(help="Folder of the draft.")],
    layers: Annotated[str, typer.Option(help="Layers to keep, comma-separated, counted from 0.")] = "0,1",
    heal: Annotated[bool, typer.Option(help="Heal it at once; else `models heal` does.")] = True,
    num_tokens: NumTokens = None,
    steps: Steps = None,
    seed: HealSeed = None,
    recipe_file: RecipeFile = None,
) -> None:
    """Cut a draft out of a target and heal it."""
    kept = _layers(layers)
    from adaptive_spec.healing.heal import cut, cut_and_heal

    if heal:
        cut_and_heal(target, kept, out, _recipe(recipe_file, num_tokens, steps, seed), _report)
    else:
        cut(target, kept, out)
    typer.echo(out)


@models_app.command("heal")
def models_heal(
    draft: Annotated[Path, typer.Argument(help="Folder of a cut draft, which is healed in place.")],
    target: Annotated[str | None, typer.Option(help="What it was cut from, if it is not there any more.")] = None,
    num_tokens: NumTokens = None,
    steps: Steps = None,
    seed: HealSeed = None,
    recipe_file: RecipeFile = None,
) -> None:
    """Heal a draft that was cut earlier, on text that its target writes; again to heal it further."""
    from adaptive_spec.healing.heal import heal

    heal(draft, _recipe(recipe_file, num_tokens, steps, seed), _report, target)
    typer.echo(draft)


@models_app.command("choose-draft")
def models_choose_draft(
    candidate: Annotated[
        list[str] | None, typer.Argument(help="Drafts as in model.draft; without any, the settings' one.")
    ] = None,
    traces: Traces = None,
    depth: Annotated[
        list[int] | None, typer.Option("--depth", min=1, help="Also each draft's first so many layers; repeatable.")
    ] = None,
    vocabulary: Annotated[
        list[int] | None,
        typer.Option("--vocabulary", min=0, help="Tokens to trim the heads to, 0: all; repeatable.  [default: 0]"),
    ] = None,
    domain: Domain = None,
    chain_length: Annotated[int, typer.Option(min=1, max=16, help="The longest chain.")] = 6,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 1,
    sampled: Annotated[bool, typer.Option("--sampled", help="Show sampled requests instead of greedy ones.")] = False,
    target: Annotated[str | None, typer.Option(help="Target model.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the intervals.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the list of records.")] = None,
    chart: Annotated[Path | None, typer.Option(help="PNG or SVG file for the chart.")] = None,
) -> None:
    """Compare drafts by measured cost and held-out acceptance, and recommend by goodput."""
    _require_folders(json_file)
    _check_chart(chart)
    settings = _settings_at(traces, {"model": {"target": target}})
    from adaptive_spec.bench.choose_draft import choose_draft
    from adaptive_spec.bench.choose_draft_chart import draw_choice
    from adaptive_spec.bench.choose_draft_report import build_records, print_report
    from adaptive_spec.bench.progress import Teller

    tell = Teller(sys.stderr)
    found = choose_draft(
        settings,
        candidate or (),
        depths=depth or (),
        vocabularies=vocabulary or (),
        domain=domain,
        max_chain_length=chain_length,
        rows=batch,
        tell=tell,
    )
    tell.done("choose-draft", "")
    records = build_records(found, settings, seed)
    kind = "sampled" if sampled else "greedy"
    _write_records(records, json_file)
    if chart is not None:
        draw_choice(records, kind, chart)
    print_report(records, kind)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-output"),
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time budget.")] = 13.0,
) -> None:
    """Serve, learn and compare on this machine, and write a report."""
    from adaptive_spec.bench.demo import run_demo

    typer.echo(run_demo(output, seed, minutes * 60))


# ---- plumbing


def _ask(
    url: str | None, path: str, query: dict[str, Any], direct: Callable[["Database"], dict[str, Any]]
) -> dict[str, Any]:
    """Ask the service; read the database when no URL was named and nothing answers at the default."""
    # A named service may be slow; the guessed one is on this machine.
    client = Client(url or DEFAULT_URL, timeout_seconds=60 if url else 10)
    return _tell(url, lambda: client.get(path, **query), direct)


def _release(url: str | None, version: int) -> dict[str, Any]:
    def direct(database: "Database") -> dict[str, Any]:
        from adaptive_spec.serving import views
        from adaptive_spec.settings import load_settings

        return views.release(database, load_settings().releases.folder, version)

    return _ask(url, f"/api/releases/{version}", {}, direct)


def _tell(
    url: str | None, call: Callable[[], dict[str, Any]], direct: Callable[["Database"], dict[str, Any]]
) -> dict[str, Any]:
    """Call the service; turn to the database when no URL was named and nothing answers at the default."""
    try:
        return call()
    except UnreachableError:
        if url:
            raise
    from adaptive_spec.settings import load_settings

    records_url = load_settings().records.url
    _refuse_missing_file(records_url)
    return _read_database(records_url, direct)


def _read_database(records_url: str, read: Callable[["Database"], T]) -> T:
    from adaptive_spec.records.database import Database

    if (path := _missing_file(records_url)) is not None:
        raise RecordsError(f"There is no database {path}. Start `adaptive-spec serve` or set records.url.")
    database = Database(records_url)
    try:
        database.check()
        return read(database)
    finally:
        database.close()


def _settings_at(traces: str | None, overrides: dict[str, dict[str, Any]]) -> "Settings":
    """The settings with the records of ``--traces``; refused where there is no database to read."""
    from adaptive_spec.settings import load_settings, placed_at

    settings = load_settings({**overrides, **(placed_at(traces) if traces else {})})
    if (path := _missing_file(settings.records.url)) is not None:
        raise RecordsError(f"There is no database {path}. Name one with --traces, or set records.url.")
    return settings


def _trace_store(database: "Database") -> "TraceStore":
    from adaptive_spec.records.quota import Quota
    from adaptive_spec.records.traces import TraceStore
    from adaptive_spec.settings import load_settings

    records = load_settings().records
    return TraceStore(database, records.folder, records.held_out_share, Quota.of(records))


def _refuse_missing_file(records_url: str) -> None:
    if (path := _missing_file(records_url)) is not None:
        raise UnreachableError(
            f"No service answers at {DEFAULT_URL} and there is no database {path}. "
            "Start `adaptive-spec serve`, pass --url or set ADAPTIVE_SPEC_RECORDS__URL."
        )


def _missing_file(records_url: str) -> str | None:
    """The file of a SQLite database that is not there; opening it would leave an empty one behind."""
    path = records_url.removeprefix("sqlite:///")
    return path if path != records_url and not Path(path).exists() else None


def _wait_for(client: Client, run_id: int) -> dict[str, Any]:
    said = ""
    while True:
        run = client.get(f"/api/runs/{run_id}")
        if run["state"] in RUN_EXIT_CODES:
            return run
        line = f"{run['state']} {_line(run.get('progress') or {})}"
        if line != said:
            typer.echo(line, err=True)
            said = line
        time.sleep(1.0)


def _show(found: dict[str, Any], rows: Sequence[dict[str, Any]], columns: Sequence[str] | None, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        typer.echo("None yet.")
        return
    names = columns or list(rows[0])
    table = Table(box=None, header_style="bold")
    for name in names:
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        # Text, not markup: domains and messages are other people's.
        table.add_row(*(Text(_cell(row.get(name))) for name in names))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _say(found: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        _print_json(found)
    else:
        typer.echo(text)


def _require_folders(*files: Path | None) -> None:
    """Refuse a file that could not be written, before anything is measured."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise typer.BadParameter(f"the folder of {file} does not exist")


def _check_chart(chart: Path | None) -> None:
    """Refuse before the work what could not be drawn after it."""
    if chart is not None:
        from adaptive_spec.bench.compare_chart import check_chart

        _require_folders(chart)
        check_chart(chart)


def _show_calibrations(found: dict[str, Any], chart: Path | None, as_json: bool) -> None:
    from adaptive_spec.bench.calibration_chart import draw_calibrations
    from adaptive_spec.serving.calibrations import told

    if chart is not None:
        draw_calibrations(found["calibrations"], chart)
    _say(found, "\n\n".join(map(told, found["calibrations"])) or "None yet.", as_json)


def _write_records(records: list[dict[str, Any]], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(records, indent=2) + "\n")


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return _line(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _line(details: dict[str, Any]) -> str:
    return " ".join(f"{name}={_cell(value)}" for name, value in details.items())


def _report(progress: dict[str, Any] | str) -> None:
    typer.echo(progress if isinstance(progress, str) else _line(progress), err=True)


def _recipe(file: Path | None, num_tokens: int | None, steps: int | None, seed: int | None) -> "Recipe":
    """The recipe of the file, else the default one; what was given as a flag wins."""
    from adaptive_spec.healing.recipe import Recipe, read_recipe

    given: dict[str, Any] = {"num_tokens": num_tokens, "steps": steps, "seed": seed}
    recipe = read_recipe(file) if file else Recipe()
    return replace(recipe, **{name: value for name, value in given.items() if value is not None})


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 0,1,29.", param_hint="--layers") from error


def _without_password(url: str) -> str:
    return re.sub(r"://([^:/@]*):[^@]*@", r"://\1:***@", url)


def _without_secrets(settings: "Settings") -> dict[str, Any]:
    shown = settings.model_dump(mode="json")
    shown["records"]["url"] = _without_password(shown["records"]["url"])
    shown["server"]["token"] = "***" if shown["server"]["token"] else ""
    return shown


def _toml_lines(shown: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for section, values in shown.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml_value(value)}" for name, value in values.items() if value is not None]
        lines.append("")
    return lines[:-1]


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml_value(item)}" for name, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    app()
