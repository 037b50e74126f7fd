"""Work in a process of its own that is killed at its n-th stage.

A stage is a moment at which something outside the process is about to change or be looked at: a file below a folder is
opened, made, renamed or deleted, a statement goes to the database, a transaction commits.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from tests.children import CONTEXT, PATIENCE

_LOOKED_AT = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.scandir", "os.listdir")


class _Killer:
    """Counts stages and kills the process at one of them."""

    def __init__(self, folder: Path, last: int) -> None:
        self._folder, self._last, self._passed = str(folder), last, 0

    def audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name in _LOOKED_AT and str(arguments[0]).startswith(self._folder):
            self.stage()

    def stage(self, *_: Any) -> None:
        if self._passed == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        self._passed += 1


def _work(work: Callable[..., None], arguments: tuple[Any, ...], folder: Path, stage: int) -> None:
    killer = _Killer(folder, stage)
    event.listen(Engine, "before_cursor_execute", killer.stage)
    event.listen(Engine, "commit", killer.stage)
    sys.addaudithook(killer.audit)
    work(*arguments)


def killed_at(stage: int, folder: Path, work: Callable[..., None], *arguments: Any) -> bool:
    """Do the work in a new process; return whether it had so many stages and was killed at that one, counted from 0."""
    child = CONTEXT.Process(target=_work, args=(work, arguments, folder, stage))
    child.start()
    child.join(60 * PATIENCE)
    assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
    return child.exitcode == -signal.SIGKILL
