"""What ``adaptive-spec doctor`` looks at.  Each check reports; none changes anything."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.errors import AdaptiveSpecError, ModelError, RecordsError, SettingsError
from adaptive_spec.settings import Settings

if TYPE_CHECKING:
    from torch.nn import Module

MIN_FREE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    ok: bool
    detail: str


def examine(settings: Settings, *, with_models: bool = True) -> list[Finding]:
    """Run every check; models last, since loading them takes longest."""
    checks: list[tuple[str, Callable[[Settings], str]]] = [
        ("server", _server),
        ("database", _database),
        ("disk", _disk),
        ("threads", _threads),
    ]
    if with_models:
        checks.append(("models", _models))
    return [_finding(name, check, settings) for name, check in checks]


def _finding(name: str, check: Callable[[Settings], str], settings: Settings) -> Finding:
    try:
        return Finding(name, True, check(settings))
    except (AdaptiveSpecError, OSError, SQLAlchemyError) as error:
        return Finding(name, False, str(error))


def _server(settings: Settings) -> str:
    from adaptive_spec.serving.app import check_bind
    from adaptive_spec.serving.tokens import TokenFile

    server = settings.server
    check_bind(server)
    num_tokens = len(TokenFile(server.token_file).read()) + bool(server.token)
    return f"{server.host}:{server.port}, {num_tokens or 'no'} token{'' if num_tokens == 1 else 's'}"


def _database(settings: Settings) -> str:
    from adaptive_spec.records.database import Database

    path = settings.records.url.removeprefix("sqlite:///")
    if path != settings.records.url and not Path(path).exists():
        raise RecordsError(f"There is no database {path}. Run `adaptive-spec db upgrade`.")
    database = Database(settings.records.url)
    try:
        database.check()
        return f"{database.engine.dialect.name}, schema up to date"
    finally:
        database.close()


def _disk(settings: Settings) -> str:
    least: int | None = None
    for folder in (settings.records.folder, settings.releases.folder):
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if not os.access(existing, os.W_OK):
            raise SettingsError(f"{existing} is not writable. Correct its permissions or set another folder.")
        free = shutil.disk_usage(existing).free
        least = free if least is None else min(least, free)
    assert least is not None
    if least < MIN_FREE_BYTES:
        raise SettingsError(f"Only {least >> 20} MiB are free for traces and releases. Free some or set other folders.")
    return f"{least >> 30} GiB free for traces and releases"


def _threads(settings: Settings) -> str:
    import torch

    cores = os.cpu_count() or 1
    wanted = settings.model.threads + settings.learning.threads
    if settings.model.threads and wanted > cores:
        raise SettingsError(f"Decoding and training want {wanted} threads of {cores} cores. Lower model.threads.")
    return f"{cores} cores, torch uses {torch.get_num_threads()}, training {settings.learning.threads}"


def _models(settings: Settings) -> str:
    from adaptive_spec.models.loading import load_pair

    try:
        pair = load_pair(settings.model)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{settings.model.target} cannot be loaded: {error}") from error
    return f"target {_millions(pair.target)} M parameters, draft {_millions(pair.draft)} M"


def _millions(model: "Module") -> int:
    return round(sum(parameter.numel() for parameter in model.parameters()) / 1e6)
