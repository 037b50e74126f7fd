"""What commands print: tables for people, JSON and CSV for programs, progress beside them."""

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer


def show(
    found: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str] | None,
    as_json: bool,
    as_csv: bool = False,
) -> bool:
    """Print an answer: whole as JSON, or its rows as CSV or as a table; return whether a person reads it.

    Args:
        columns: None: those of the first row.
    """
    if as_json and as_csv:
        raise typer.BadParameter("An answer is printed one way; give --json or --csv.")
    if as_json:
        print_json(found)
        return False
    if as_csv:
        _print_csv(rows, columns or list(rows[0] if rows else ()))
        return False
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        typer.echo("None yet.")
        return True
    names = columns or list(rows[0])
    table = Table(box=None, header_style="bold")
    for name in names:
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        # Text, not markup: domains and messages are other people's.
        table.add_row(*(Text(_cell(row.get(name))) for name in names))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return True


def say(found: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        typer.echo(text)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _print_csv(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Numbers whole, what is nested as JSON, nothing where there is none."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_csv_value(row.get(name)) for name in names] for row in rows)


def _csv_value(value: object) -> object:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list) else value


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return pairs(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def pairs(details: dict[str, Any]) -> str:
    return " ".join(f"{name}={_cell(value)}" for name, value in details.items())


def report(progress: dict[str, Any] | str) -> None:
    typer.echo(progress if isinstance(progress, str) else pairs(progress), err=True)


def write_records(records: list[dict[str, Any]], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(records, indent=2) + "\n")


def require_folders(*files: Path | None) -> None:
    """Refuse a file that could not be written, before anything is measured."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise typer.BadParameter(f"the folder of {file} does not exist")


def check_chart(chart: Path | None) -> None:
    """Refuse before the work what could not be drawn after it."""
    if chart is not None:
        from adaptive_spec.bench.compare_chart import check_chart

        require_folders(chart)
        check_chart(chart)
