"""Writes the pages of commands and settings out of the code while MkDocs builds the site."""

import builtins
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from typer.main import get_command

from adaptive_spec.cli import app
from adaptive_spec.settings import Settings, data_dir
from deploy.example import meanings

_PAGES = re.compile(r"\]\((?=[a-z-]+\.md)")  # links as they stand in docs/, one folder up


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put what the code says in the place of a page's mark."""
    for mark, write in (("<!-- commands -->", commands), ("<!-- settings -->", settings)):
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(write()))
    return markdown


def commands() -> Iterator[str]:
    """Every command: usage, what it does, a table of what it takes."""
    yield from _command(get_command(app), "adaptive-spec")


def _command(command: Any, name: str) -> Iterator[str]:
    subcommands = getattr(command, "commands", {})
    own = [parameter for parameter in command.params if parameter.name != "help"]
    if not subcommands or command.invoke_without_command:
        usage = " ".join([name, *(_usage(parameter) for parameter in own)])
        yield from (f"## {name}", "", command.help or "", "", "```", usage, "```", "")
        if own:
            yield from ("| takes | default | means |", "| --- | --- | --- |")
            yield from (_parameter(parameter) for parameter in own)
            yield ""
    for word, subcommand in sorted(subcommands.items()):
        yield from _command(subcommand, f"{name} {word}")


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return parameter.opts[0] if parameter.required else f"[{parameter.opts[0]}]"
    shown = parameter.name.upper()
    return shown if parameter.required else f"[{shown}]"


def _parameter(parameter: Any) -> str:
    option = parameter.param_type_name == "option"
    spellings = [*parameter.opts, *parameter.secondary_opts] if option else [parameter.name.upper()]
    default = "required" if parameter.required else _default(parameter.default)
    variables = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
    told = " ".join([getattr(parameter, "help", None) or "", *(f"(`{variable}`)" for variable in variables)])
    return _row(" ".join(f"`{spelling}`" for spelling in spellings), default, told)


def _default(value: Any) -> str:
    return "" if value in (None, "", False, ()) or callable(value) else f"`{value}`"


def settings() -> Iterator[str]:
    """Every section: a table of its settings."""
    told = meanings()
    for section, tree in Settings.model_fields.items():
        model: Any = tree.annotation
        yield from (f"## {section}", "", model.__doc__, "", "| setting | type | default | means |", "| --- " * 4 + "|")
        for name, field in model.model_fields.items():
            meaning = _PAGES.sub("](../", told[f"{section}.{name}"])
            default = field.get_default(call_default_factory=True)
            shown = "" if default is None else f"`{json.dumps(default, default=str)}`".replace(str(data_dir()), "DATA")
            kind = ", ".join([_kind(field.annotation), *_bounds(field.metadata)])
            yield _row(f"`{section}.{name}`", kind, shown, meaning)
        yield ""


def _kind(annotation: Any) -> str:
    inner = [_kind(argument) for argument in get_args(annotation) if get_origin(argument) or isinstance(argument, type)]
    match get_origin(annotation):
        case typing.Literal:
            return ", ".join(f"`{value}`" for value in get_args(annotation))
        case typing.Annotated:
            return _kind(get_args(annotation)[0])
        case builtins.dict:
            return f"per {inner[0]}: {inner[1]}"
        case builtins.tuple:
            return f"list of {inner[0]}"
        case types.UnionType:
            return " or ".join(inner)
    return str({str: "text", Path: "path", types.NoneType: "not set"}.get(annotation, annotation.__name__))


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return (f"{signs[name]} {getattr(bound, name)}" for bound in metadata for name in signs if hasattr(bound, name))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
