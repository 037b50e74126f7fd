"""The tree of commands, which the other modules of this package hang theirs into."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from adaptive_spec.errors import AdaptiveSpecError


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
tokens_app = typer.Typer(no_args_is_help=True, help="The tokens that open routes of the service.")
releases_app = typer.Typer(
    invoke_without_command=True, help="Releases: all of them, which is live, which on trial, who runs what."
)
runs_app = typer.Typer(invoke_without_command=True, help="Training runs: the latest, what each told, and their end.")
thresholds_app = typer.Typer(
    invoke_without_command=True, help="Thresholds: the numbers in force, and those set by hand."
)
for name, part in (
    ("releases", releases_app),
    ("runs", runs_app),
    ("thresholds", thresholds_app),
    ("config", config_app),
    ("db", db_app),
    ("traces", traces_app),
    ("models", models_app),
    ("tokens", tokens_app),
):
    app.add_typer(part, name=name)


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
