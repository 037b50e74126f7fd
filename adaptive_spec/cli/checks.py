"""Commands that check this machine and the promise of exact output."""

import sys
from typing import Annotated

import typer

from adaptive_spec.cli.apps import app
from adaptive_spec.cli.options import Json
from adaptive_spec.cli.output import say, show


@app.command()
def doctor(models: Annotated[bool, typer.Option(help="Load the models too.")] = True, json_: Json = False) -> None:
    """Check settings, port, database, clock, disk, threads, device and models, and suggest what to set."""
    from adaptive_spec.bench.progress import Teller
    from adaptive_spec.serving.doctor import examine
    from adaptive_spec.settings import load_settings

    tell = Teller(sys.stderr)
    findings = examine(load_settings(), with_models=models, tell=lambda check: tell("doctor", check))
    tell.done("doctor", "")
    rows = [{"check": f.check, "ok": "ok" if f.ok else "FAILED", "detail": f.detail} for f in findings]
    show({"checks": [{"check": f.check, "ok": f.ok, "detail": f.detail} for f in findings]}, rows, None, json_)
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
    say(details, "\n".join(f"{name}: {value}" for name, value in details.items()), json_)
    raise typer.Exit(0 if report.passed else 1)
