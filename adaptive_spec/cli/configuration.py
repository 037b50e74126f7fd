"""``adaptive-spec config`` and ``adaptive-spec db``."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from adaptive_spec.cli.apps import config_app, db_app
from adaptive_spec.cli.asking import read_database
from adaptive_spec.cli.options import Csv, Json
from adaptive_spec.cli.output import say, show


@config_app.command("show")
def config_show(json_: Json = False) -> None:
    """Print the settings in force and where each that is not the default comes from, without secrets."""
    from adaptive_spec.settings import load_settings

    found = load_settings().in_effect()
    say(found, "\n".join(_toml_lines(found["settings"], found["sources"])), json_)


@db_app.command("upgrade")
def db_upgrade() -> None:
    """Bring the database to this version's schema."""
    from adaptive_spec.records.database import Database
    from adaptive_spec.settings import load_settings

    database = Database(load_settings().records.url)
    try:
        database.upgrade()
    finally:
        database.close()
    typer.echo(f"{database} is up to date.")


@db_app.command("prune")
def db_prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """Roll up outcomes, and delete what the settings `retention` keep no longer."""
    from adaptive_spec.pruning import prune
    from adaptive_spec.settings import load_settings

    settings = load_settings()
    found = asdict(read_database(settings.records.url, lambda database: prune(database, settings, dry_run=dry_run)))
    files = {kind: " ".join(map(str, found[kind])) or "none" for kind in ("releases", "checkpoints")}
    rows = [{"what": name, "deleted": number} for name, number in {**found["rows"], **files}.items()]
    if show(found, rows, ("what", "deleted"), json_, csv_) and dry_run:
        typer.echo("Nothing was deleted.")


def _toml_lines(shown: dict[str, Any], sources: dict[str, str]) -> list[str]:
    lines: list[str] = []
    for section, values in shown.items():
        lines.append(f"[{section}]")
        for name, value in values.items():
            source = sources.get(f"{section}.{name}")
            if value is not None:
                lines.append(f"{name} = {_toml_value(value)}{f'  # {source}' if source else ''}")
        lines.append("")
    return lines[:-1]


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml_value(item)}" for name, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
