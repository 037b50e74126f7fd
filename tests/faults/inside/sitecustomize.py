"""Faults inside a process of the product, which knows nothing of them.

Python imports this module at its start wherever this folder is on PYTHONPATH; the training processes of a service
inherit it.  Two environment variables ask for a fault:

FAULT_KILL_BEFORE   ``module:name``: the process is killed (SIGKILL) as it calls that function.
FAULT_CLOCK_SECONDS  how far the wall clock of the process is ahead; negative: behind.
"""

import datetime as _datetime
import functools
import importlib.abc
import importlib.util
import os
import signal
import sys
import time as _time
from types import ModuleType
from typing import Any


class _KillBefore(importlib.abc.MetaPathFinder):
    """Replaces one function, as soon as its module is imported and before anybody else can take it from there."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            *path, last = self._name.split(".")
            holder = functools.reduce(getattr, path, module)
            getattr(holder, last)  # an unknown name is a mistake of the test
            setattr(holder, last, _die)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def _die(*arguments: Any, **named: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _set_clock(seconds: float) -> None:
    """Before anything else is imported: whoever takes ``datetime`` or ``time`` takes the wrong clock."""
    real_time, real = _time.time, _datetime.datetime

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real)

    class Wrong(real, metaclass=Kind):  # type: ignore[valid-type,misc]
        @classmethod
        def now(cls, tz: _datetime.tzinfo | None = None) -> _datetime.datetime:
            return real.fromtimestamp(real_time() + seconds, tz)

    Wrong.__name__, Wrong.__qualname__, Wrong.__module__ = "datetime", "datetime", "datetime"
    _time.time = lambda: real_time() + seconds
    _datetime.datetime = Wrong  # type: ignore[misc]


if asked := os.environ.get("FAULT_KILL_BEFORE"):
    sys.meta_path.insert(0, _KillBefore(*asked.split(":")))
if asked := os.environ.get("FAULT_CLOCK_SECONDS"):
    _set_clock(float(asked))
