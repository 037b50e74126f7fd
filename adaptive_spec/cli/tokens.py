"""``adaptive-spec tokens``: who may do what.  A running service follows within its next request."""

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from adaptive_spec.cli.apps import tokens_app
from adaptive_spec.cli.options import Json
from adaptive_spec.cli.output import print_json, show

if TYPE_CHECKING:
    from adaptive_spec.serving.tokens import TokenFile


class Scope(StrEnum):
    """What a token opens."""

    admin = "admin"
    read = "read"
    api = "api"


Name = Annotated[str, typer.Argument(help="What it is for, or whose it is.")]


@tokens_app.command("add")
def tokens_add(
    name: Name,
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            help="admin: control routes that change something, and reads; read: those that only read; api: /v1.  "
            "Repeatable.  [default: admin]"
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Make a token and print it, once: only its hash is kept."""
    scopes = [each.value for each in scope or (Scope.admin,)]
    made = _token_file().add(name, scopes)
    if json_:
        print_json({"name": name, "scopes": scopes, "token": made})
        return
    typer.echo(made)
    typer.echo(f"Keep it: it is not shown again. It opens {', '.join(scopes)}.", err=True)


@tokens_app.command("list")
def tokens_list(json_: Json = False) -> None:
    """List the tokens, not what they are."""
    rows = [
        {name: value for name, value in asdict(token).items() if name not in ("salt", "digest")}
        for token in _token_file().read()
    ]
    show({"tokens": rows}, [{**row, "scopes": " ".join(row["scopes"])} for row in rows], None, json_)


@tokens_app.command("revoke")
def tokens_revoke(name: Name) -> None:
    """Make a token invalid, in a running service too."""
    _token_file().revoke(name)
    typer.echo(f"{name} is revoked.")


def _token_file() -> "TokenFile":
    from adaptive_spec.serving.tokens import TokenFile
    from adaptive_spec.settings import load_settings

    return TokenFile(load_settings().server.token_file)
