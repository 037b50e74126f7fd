"""Which process leads.  The service asks before it trains, calibrates or runs what is due; one thread keeps the answer.

Every ``seconds`` the thread takes the lock or makes sure that it still has it.  Between two answers of the database a
process believes that it leads for a few more of them and no longer, so one that is cut off stops by itself.
"""

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.records.leadership import LeaderLock

logger = logging.getLogger(__name__)

_BELIEVED_LOOKS = 3


class Leadership:
    """Campaigns for the lead, and says when it is won and lost.

    Args:
        seconds: between two looks at the lock.
        won, lost: called on the campaign's thread, in turn, and once at most each time.
    """

    def __init__(self, lock: LeaderLock, seconds: float, *, won: Callable[[], None], lost: Callable[[], None]) -> None:
        self._lock = lock
        self._seconds = seconds
        self._won = won
        self._lost = lost
        self._leads = False
        self._sure_until = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)

    @property
    def leads(self) -> bool:
        """Whether this process leads, as far as it can know."""
        return self._leads and time.monotonic() < self._sure_until

    def start(self) -> None:
        """Look once, so that a process that is alone leads when this returns; then keep looking."""
        self._look()
        self._thread.start()

    def stop(self) -> None:
        """Look no more, but keep what is held until ``release``, for work that is just being ended."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def release(self) -> None:
        """Let others lead."""
        self._leads = False
        self._lock.release()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            self._look()

    def _look(self) -> None:
        asked = time.monotonic()
        try:
            held = self._lock.hold()
        except (SQLAlchemyError, OSError) as error:
            held = False
            if self._leads:
                logger.warning("the lead is lost, the database does not answer: %s", error)
        if held:
            self._sure_until = asked + _BELIEVED_LOOKS * self._seconds
        if held == self._leads:
            return
        self._leads = held
        logger.info("this process leads" if held else "this process no longer leads")
        try:
            (self._won if held else self._lost)()
        except Exception:
            logger.exception("what follows from the lead could not all be done")
