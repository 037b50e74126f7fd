"""What several commands are asked: their options, one spelling of each."""

from typing import Annotated

import typer

from adaptive_spec.cli.asking import TOKEN_VARIABLES
from adaptive_spec.serving.client import DEFAULT_URL

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="ADAPTIVE_SPEC_URL", help=f"The running service.  [default: {DEFAULT_URL}]"),
]
Token = Annotated[
    str,
    typer.Option("--token", envvar=TOKEN_VARIABLES, help="The service's token."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print the table's rows as CSV.")]
Domain = Annotated[str | None, typer.Option("--domain", help="Only this domain.")]
Traces = Annotated[
    str | None,
    typer.Option("--traces", help="Database URL, SQLite file, or folder with one; without it, the settings'."),
]
Before = Annotated[int | None, typer.Option("--before", min=1, help="Only those before this number: the next page.")]
Version = Annotated[int, typer.Argument(min=0, help="The release.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many, the latest.")]
