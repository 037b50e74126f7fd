"""``adaptive-spec models``."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaptive_spec.cli.apps import models_app
from adaptive_spec.cli.asking import settings_at
from adaptive_spec.cli.options import Domain, Traces
from adaptive_spec.cli.output import check_chart, report, require_folders, write_records

if TYPE_CHECKING:
    from adaptive_spec.healing.recipe import Recipe


NumTokens = Annotated[int | None, typer.Option("--num-tokens", min=1, help="Tokens the target writes to heal on.")]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Training steps.")]
HealSeed = Annotated[int | None, typer.Option("--seed", help="Seed of writing and training.")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="JSON of heal settings; flags win.")]


@models_app.command("fetch")
def models_fetch(name: Annotated[str, typer.Argument(help="A known name, as in model.target.")]) -> None:
    """Download a target model."""
    from adaptive_spec.models.fetch import fetch

    typer.echo(fetch(name, report))


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
        cut_and_heal(target, kept, out, _recipe(recipe_file, num_tokens, steps, seed), report)
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

    heal(draft, _recipe(recipe_file, num_tokens, steps, seed), report, target)
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
    require_folders(json_file)
    check_chart(chart)
    settings = settings_at(traces, {"model": {"target": target}})
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
    write_records(records, json_file)
    if chart is not None:
        draw_choice(records, kind, chart)
    print_report(records, kind)


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
