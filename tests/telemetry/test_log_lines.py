import contextvars
import json
import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from adaptive_spec.telemetry.logs import JsonFormatter, TextFormatter, about, bind, configure


def line(formatter: logging.Formatter, **extra: object) -> str:
    record = logging.LogRecord("here", logging.WARNING, "f.py", 1, "lost %d\nrows", (3,), None)
    vars(record).update(extra)
    return formatter.format(record)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, and afterwards as it was."""
    root = logging.getLogger()
    handlers, level, quiet = root.handlers[:], root.level, logging.getLogger("apscheduler").level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("apscheduler").setLevel(quiet)


def test_json_is_one_object_a_line() -> None:
    with about(request_id="r-1"), about(run_id=7):
        told = line(JsonFormatter(), domain="code", path=object)
    assert "\n" not in told
    found = json.loads(told)
    assert found.pop("at").endswith("+00:00") and found.pop("path") == str(object)
    assert found == {
        "level": "warning",
        "logger": "here",
        "message": "lost 3\nrows",
        "request_id": "r-1",
        "run_id": 7,
        "domain": "code",
    }


def test_json_keeps_the_traceback() -> None:
    try:
        raise ValueError("no such row")
    except ValueError:
        record = logging.LogRecord("here", logging.ERROR, "f.py", 1, "failed", (), sys.exc_info())
    found = json.loads(JsonFormatter().format(record))
    assert found["exception"].startswith("Traceback") and found["exception"].endswith("ValueError: no such row")


def test_fields_end_with_what_they_are_about() -> None:
    with about(run_id=1):
        with about(run_id=2):
            assert line(TextFormatter()).endswith("rows run_id=2")
        assert line(TextFormatter()).endswith("rows run_id=1")
    assert line(TextFormatter()).endswith(" WARNING here: lost 3\nrows")


def test_other_threads_are_about_something_else() -> None:
    told: list[str] = []
    with about(run_id=1):
        thread = threading.Thread(target=lambda: told.append(line(TextFormatter())))
        thread.start()
        thread.join()
    assert "run_id" not in told[0]


def test_bound_until_what_is_around_ends() -> None:
    told: list[str] = []

    def work() -> None:
        with about(run_id=1):
            bind(request_id="r-1")
        told.append(line(TextFormatter()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told[0].endswith("rows") and "request_id" not in line(TextFormatter())
    context = contextvars.copy_context()
    context.run(bind, request_id="r-2")
    assert context.run(line, TextFormatter()).endswith("rows request_id=r-2")


def test_configured(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure("warning", "json")
    logging.getLogger("adaptive_spec.x").info("too quiet")
    logging.getLogger("adaptive_spec.x").warning("loud", extra={"domain": "law"})
    (told,) = capsys.readouterr().err.splitlines()
    assert json.loads(told)["domain"] == "law"
