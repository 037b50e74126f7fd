"""What the log tells of requests: that they failed and where, never their text.

The message of an error may quote the text it failed on.  So where requests are handled, errors are logged by their
type and the places they came through, whatever formats the records.
"""

import logging
from types import TracebackType
from typing import Any

# Of these loggers, and those below them.
REQUEST_PATH = (
    "adaptive_spec.decoding",
    "adaptive_spec.serving",
    "asyncio",
    "concurrent.futures",
    "fastapi",
    "starlette",
    "uvicorn",
)
_MOST_CAUSES = 10
# At debug level these tell of rows, of headers with credentials, and of every look whether a job is due.
_QUIET = ("aiobotocore", "apscheduler", "botocore", "fsspec", "s3fs", "sqlalchemy", "urllib3")


def quieten_libraries() -> None:
    """Keep libraries from telling what they handle, whatever level the root logger has."""
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def withhold_text() -> None:
    """From now on withhold the messages of errors in records of the request path, in the whole process."""
    make = logging.getLogRecordFactory()

    def without_messages(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if any(record.name == name or record.name.startswith(f"{name}.") for name in REQUEST_PATH):
            if record.exc_info and record.exc_info[1] is not None:
                record.exc_info = _withheld(record.exc_info[1])
            if isinstance(record.args, tuple):
                record.args = tuple(
                    type(each).__name__ if isinstance(each, BaseException) else each for each in record.args
                )
        return record

    logging.setLogRecordFactory(without_messages)


def _withheld(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    copy = _without_message(error, _MOST_CAUSES)
    return type(copy), copy, copy.__traceback__


def _without_message(error: BaseException, most_causes: int) -> BaseException:
    """An error of the same name, place and causes, which says nothing else."""
    kind = type(type(error).__name__, (Exception,), {"__module__": type(error).__module__})
    copy: BaseException = kind("message withheld, it may quote a request; server.log_text shows it")
    copy.__traceback__ = error.__traceback__
    if most_causes:
        cause, context = error.__cause__, error.__context__
        copy.__cause__ = _without_message(cause, most_causes - 1) if cause else None
        copy.__context__ = _without_message(context, most_causes - 1) if context and not cause else None
        copy.__suppress_context__ = error.__suppress_context__
    return copy
