"""Commands that measure, and the demo."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from adaptive_spec.cli.apps import app
from adaptive_spec.cli.asking import read_database, settings_at
from adaptive_spec.cli.options import Traces
from adaptive_spec.cli.output import check_chart, require_folders, write_records


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
    require_folders(json_file, chart)
    if chart is not None:
        check_chart(chart)
    tell = Teller(sys.stderr)
    found = compare(settings, made, release=release, adapter=adapter, tell=tell)
    tell.done("bench", "")
    about = describe(settings, release or (str(adapter) if adapter else None), found.cost)
    records = build_records(found.cells, about)
    write_records(records, json_file)
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
    require_folders(json_file, chart)
    if chart is not None:
        check_chart(chart)
    tell = Teller(sys.stderr)
    found = read_database(
        settings.records.url, lambda opened: compare_policies(settings, made, opened, release=release, tell=tell)
    )
    tell.done("bench-policies", "")
    records = policy_records(found, describe(settings, release, found.cost))
    write_records(records, json_file)
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
    require_folders(json_file, chart)
    if chart is not None:
        check_chart(chart)
    tell = Teller(sys.stderr)
    found = find_frontier(settings, made, release=release, tasks=Tasks(humaneval, gsm8k, unisolated), tell=tell)
    tell.done("frontier", "")
    records = frontier_records(found, made, describe(settings, release, found.cost))
    write_records(records, json_file)
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

    require_folders(json_file)
    tell = Teller(sys.stderr)
    measured = measure_all(load_settings(), vocab or VOCABS, chain_length, batch, rounds, tell)
    tell.done("bench-verifiers", "")
    records = build_records(measured, chain_length, batch, rounds)
    write_records(records, json_file)
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

    require_folders(json_file)
    tell, templates = Teller(sys.stderr), shape_of(shape) if shape else None
    with tempfile.TemporaryDirectory() as folder:
        urls = database or [f"sqlite:///{folder}/records.db"]
        loads = [measure(url, tokens, templates, seed, tell) for url in urls]
    tell.done("bench-records", "")
    write_records([load.to_dict() for load in loads], json_file)
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

    require_folders(json_file)
    settings = load_settings({"model": {"target": target, "draft": draft}})
    tell = Teller(sys.stderr)
    tell("bench-swap", "loading the models")
    pair = load_pair(settings.model)
    times = measure_swaps(
        pair, settings, swaps, batch, rank, lambda done: tell("bench-swap", f"{done} of {swaps} releases"), seed
    )
    tell.done("bench-swap", "")
    write_records(build_records(times), json_file)
    print_report(times)
    raise typer.Exit(0 if times.longest_share <= 1 else 1)


@app.command("bench-shift")
def bench_shift(
    out: Annotated[Path, typer.Argument(help="Folder for what is made: new, or that of a call to go on with.")],
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
    require_folders(json_file, out)
    check_chart(chart)
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.bench.shift import ALL, Shift, run_shift
    from adaptive_spec.bench.shift_chart import draw_shift
    from adaptive_spec.bench.shift_report import print_report

    tell, sides = Teller(sys.stderr), tuple(replay or (ALL, "0"))
    shift = Shift(tuple(first), then, before, after, held_out, every, oracle_epochs, sides, chain_length, seed)
    records = run_shift(settings_at(traces, {}), out, shift, tell)
    tell.done("shift", "")
    write_records(records, json_file)
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
    require_folders(json_file)
    check_chart(chart)
    settings = settings_at(traces, {"learning": {"batch_tokens": batch_tokens}})
    from adaptive_spec.bench.training import bench_training as measure
    from adaptive_spec.bench.training_chart import draw_training
    from adaptive_spec.bench.training_report import build_records, print_report

    records = build_records(measure(settings, steps), settings)
    write_records(records, json_file)
    if chart is not None:
        draw_training(records, chart)
    print_report(records)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-output"),
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time budget.")] = 13.0,
) -> None:
    """Serve, learn and compare on this machine, and write a report."""
    from adaptive_spec.bench.demo import run_demo

    typer.echo(run_demo(output, seed, minutes * 60))
