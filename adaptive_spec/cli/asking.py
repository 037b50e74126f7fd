"""Where answers come from: the running service, or the database where nothing answers and that is safe."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from adaptive_spec.errors import RecordsError
from adaptive_spec.serving.client import DEFAULT_URL, Client, UnreachableError

if TYPE_CHECKING:
    from adaptive_spec.records.database import Database
    from adaptive_spec.records.traces import TraceStore
    from adaptive_spec.settings import Settings

T = TypeVar("T")
TOKEN_VARIABLES = ["ADAPTIVE_SPEC_TOKEN", "ADAPTIVE_SPEC_SERVER__TOKEN"]


def service_at(url: str | None, token: str = "", timeout_seconds: float = 60.0) -> Client:
    """The service of ``--url``, or the one that this machine would run; its token is the given or the environment's."""
    known = token or next(filter(None, map(os.environ.get, TOKEN_VARIABLES)), "")
    return Client(url or DEFAULT_URL, known, timeout_seconds=timeout_seconds)


def ask(
    url: str | None, path: str, query: dict[str, Any], direct: Callable[["Database"], dict[str, Any]]
) -> dict[str, Any]:
    """Ask the service; read the database when no URL was named and nothing answers at the default."""
    # A named service may be slow; the guessed one is on this machine.
    client = service_at(url, timeout_seconds=60 if url else 10)
    return tell(url, lambda: client.get(path, **query), direct)


def tell(
    url: str | None, call: Callable[[], dict[str, Any]], direct: Callable[["Database"], dict[str, Any]]
) -> dict[str, Any]:
    """Call the service; turn to the database when no URL was named and nothing answers at the default."""
    try:
        return call()
    except UnreachableError:
        if url:
            raise
    from adaptive_spec.settings import load_settings

    records_url = load_settings().records.url
    _refuse_missing_file(records_url)
    return read_database(records_url, direct)


def read_database(records_url: str, read: Callable[["Database"], T]) -> T:
    from adaptive_spec.records.database import Database

    if (path := _missing_file(records_url)) is not None:
        raise RecordsError(f"There is no database {path}. Start `adaptive-spec serve` or set records.url.")
    database = Database(records_url)
    try:
        database.check()
        return read(database)
    finally:
        database.close()


def settings_at(traces: str | None, overrides: dict[str, dict[str, Any]]) -> "Settings":
    """The settings with the records of ``--traces``; refused where there is no database to read."""
    from adaptive_spec.settings import load_settings, placed_at

    settings = load_settings({**overrides, **(placed_at(traces) if traces else {})})
    if (path := _missing_file(settings.records.url)) is not None:
        raise RecordsError(f"There is no database {path}. Name one with --traces, or set records.url.")
    return settings


def trace_store(database: "Database") -> "TraceStore":
    from adaptive_spec.records.quota import Quota
    from adaptive_spec.records.traces import TraceStore
    from adaptive_spec.settings import load_settings

    records = load_settings().records
    return TraceStore(database, records.folder, records.held_out_share, Quota.of(records))


def _refuse_missing_file(records_url: str) -> None:
    if (path := _missing_file(records_url)) is not None:
        raise UnreachableError(
            f"No service answers at {DEFAULT_URL} and there is no database {path}. "
            "Start `adaptive-spec serve`, pass --url or set ADAPTIVE_SPEC_RECORDS__URL."
        )


def _missing_file(records_url: str) -> str | None:
    """The file of a SQLite database that is not there; opening it would leave an empty one behind."""
    path = records_url.removeprefix("sqlite:///")
    return path if path != records_url and not Path(path).exists() else None
