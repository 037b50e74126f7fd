"""Log lines, for people or for programs, and what they belong to: a request, a run.

A field that is bound with ``about`` is on every line that is logged within it, on this thread and in what the event
loop runs for it.  The command line calls ``configure`` once.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

Format = Literal["text", "json"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_FIELDS: ContextVar[Mapping[str, Any]] = ContextVar("log_fields", default=_NOTHING)
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}  # the last is uvicorn's


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Say what the lines within belong to, beside what those around them do."""
    token = _FIELDS.set({**_FIELDS.get(), **fields})
    try:
        yield
    finally:
        _FIELDS.reset(token)


def bind(**fields: Any) -> None:
    """The same, until what is around ends: an ``about``, else the task or the thread."""
    _FIELDS.set({**_FIELDS.get(), **fields})


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a line belongs to, and what was passed to it as ``extra``."""
    own = {name: value for name, value in vars(record).items() if name not in _USUAL}
    return {**_FIELDS.get(), **own}


class TextFormatter(logging.Formatter):
    """Time, level, logger and message; then fields as ``name=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        said = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        return super().formatMessage(record) + said


class JsonFormatter(logging.Formatter):
    """A JSON object a line: ``at`` (UTC), ``level``, ``logger``, ``message``, fields, ``exception`` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in fields_of(record).items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str, format: Format) -> None:
    """Send all lines of this level and above to standard error, in this format."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("apscheduler").setLevel(logging.WARNING)  # else it tells of every look whether a job is due
