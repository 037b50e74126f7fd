"""Progress for a person who waits."""

import sys
import time
from typing import TextIO


class Teller:
    """One line rewritten on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._began = time.monotonic()
        self._last = 0.0
        self._terminal = self._stream.isatty()

    def __call__(self, title: str, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (0.3 if self._terminal else 10):
            return
        self._last = now
        line = f"[{now - self._began:4.0f} s] {title}: {text}"
        print(
            f"\r\x1b[2K{line[:150]}" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=self._stream,
            flush=True,
        )

    def done(self, title: str, text: str) -> None:
        """End a phase with a line that stays."""
        self._last = 0.0
        start = "\r\x1b[2K" if self._terminal else ""
        print(
            f"{start}[{time.monotonic() - self._began:4.0f} s] {title}: {text or 'done'}", file=self._stream, flush=True
        )
