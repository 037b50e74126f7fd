"""What ``adaptive-spec doctor`` looks at.  Each check reports; none changes anything."""

import errno
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.errors import AdaptiveSpecError, ModelError, RecordsError, SettingsError
from adaptive_spec.serving.client import Client
from adaptive_spec.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

MIN_FREE_BYTES = 1 << 30
MOST_CLOCK_SECONDS = 5.0
DTYPES = ("float32", "bfloat16", "float16")
FASTER = 1.5  # than the dtype in use, to be worth a word


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    ok: bool
    detail: str


def examine(
    settings: Settings, *, with_models: bool = True, tell: Callable[[str], None] = lambda check: None
) -> list[Finding]:
    """Run every check, telling of each before it; models last, since loading them takes longest."""
    checks: list[tuple[str, Callable[[Settings], str]]] = [
        ("server", _server),
        ("port", _port),
        ("database", _database),
        ("clock", _clock),
        ("disk", _disk),
        ("threads", _threads),
        ("device", _device),
    ]
    if with_models:
        checks.append(("models", _models))
    return [_finding(name, check, settings, tell) for name, check in checks]


def _finding(name: str, check: Callable[[Settings], str], settings: Settings, tell: Callable[[str], None]) -> Finding:
    tell(name)
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


def _port(settings: Settings) -> str:
    """Free, or this service's own."""
    server = settings.server
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise SettingsError(
                    f"{server.host}:{server.port} cannot be bound: {error}. Correct server.host."
                ) from error
        else:
            return f"{server.port} is free"
    try:
        version = Client(f"http://{_in_url(server.host)}:{server.port}", timeout_seconds=5).get("/version")["version"]
    except (AdaptiveSpecError, KeyError):
        raise SettingsError(f"Something else listens on port {server.port}. Stop it, or set server.port.") from None
    return f"adaptive-spec {version} listens on {server.port}"


def _in_url(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


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


def _clock(settings: Settings) -> str:
    """Releases, runs and statistics of several machines are put in order by their clocks."""
    from adaptive_spec.records.database import Database

    database = Database(settings.records.url)
    if database.is_sqlite:
        return "the database is a file of this machine, or seen as one"
    try:
        ahead = database.clock_ahead_seconds()
    finally:
        database.close()
    if abs(ahead) > MOST_CLOCK_SECONDS:
        raise SettingsError(f"This machine's clock is {ahead:+.0f} s from the database server's. Set both by NTP.")
    return f"{ahead:+.1f} s from the database server's"


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


def _device(settings: Settings) -> str:
    """Whether it is there, and which dtype it multiplies fastest, by the side of the one that is set."""
    import torch

    try:
        speeds = {name: _multiplications(settings.model.device, getattr(torch, name)) for name in DTYPES}
    except (RuntimeError, AssertionError) as error:
        there = ", ".join(["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))])
        raise SettingsError(
            f"model.device {settings.model.device} cannot be used: {error}. There is: {there}."
        ) from error
    told = ", ".join(f"{name} {speed / 1e9:,.0f} GFLOP/s" for name, speed in speeds.items())
    fastest = max(speeds, key=lambda name: speeds[name])
    if speeds[fastest] > FASTER * speeds[settings.model.dtype]:
        told += f"; consider model.dtype {fastest} (output is then that of the target in {fastest})"
    return f"{settings.model.device}: {told}"


def _multiplications(device: str, dtype: "torch.dtype") -> float:
    """Floating point operations per second of multiplying matrices of this size, the best of three."""
    import torch

    size = 256 if device == "cpu" else 4096
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(4):
        begun = perf_counter()
        float((a @ b)[0, 0])  # waits for the device
        seconds.append(perf_counter() - begun)
    return 2 * size**3 / min(seconds[1:])


def _models(settings: Settings) -> str:
    from adaptive_spec.models.loading import load_pair

    try:
        pair = load_pair(settings.model)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{settings.model.target} cannot be loaded: {error}") from error
    return f"target {_millions(pair.target)} M parameters, draft {_millions(pair.draft)} M"


def _millions(model: "Module") -> int:
    return round(sum(parameter.numel() for parameter in model.parameters()) / 1e6)
