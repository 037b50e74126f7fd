"""The writer: the decoder's callbacks on one side, the database on the other, a bounded queue between.

The decoder's thread only appends.  One daemon thread writes a batch every ``flush_seconds`` and sweeps the traces
every ``sweep_seconds``.  While the database is away the batch is retried and the queue fills; once full, new rows are
dropped and counted.  Nothing here raises into the decoder.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError

from adaptive_spec.core import ChainEvidence, FinishedRequest, Step, Trace
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import event_row
from adaptive_spec.records.outcomes import Outcome, in_bulk
from adaptive_spec.records.retention import Retention
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import RecordSettings

logger = logging.getLogger(__name__)

_BATCH_ROWS = 4_000
_RETRY_SECONDS = (0.1, 5.0)  # first and longest wait while the database is away
_OUTAGE = (OperationalError, InterfaceError, OSError)

Item = Outcome | Trace
Kind = TypeVar("Kind", Outcome, Trace)


class Writer:
    """Writes what the decoder reports.  Safe to call from any thread.

    Args:
        database: at the newest revision.
        traces: where traces go; unfinished shards of an earlier life are discarded at start.
        settings: whether to record, how much may wait, how often to write, and what is kept of traces.
    """

    def __init__(self, database: Database, traces: TraceStore, settings: RecordSettings) -> None:
        self.num_written = 0
        self.num_dropped = 0
        self._database = database
        self._traces = traces
        self._settings = settings
        self._items: deque[tuple[float, Item]] = deque()  # with when they came
        self._oldest: float | None = None  # of the batch that is being written: when its first item came
        self._changed = threading.Condition()
        self._num_taken = 0  # ever queued
        self._num_settled = 0  # ever written or given up
        self._flushing = False
        self._closing = threading.Event()
        self._give_up_at = float("inf")
        self._retention = Retention(traces, settings, self._closing.is_set)
        self._thread = threading.Thread(target=self._run, name="adaptive-spec-writer", daemon=True)
        self._thread.start()

    @property
    def queue_depth(self) -> int:
        """Rows waiting, those of the batch being written included."""
        return self._num_taken - self._num_settled

    @property
    def lag_seconds(self) -> float:
        """How long the row has waited that waits longest; 0: none waits."""
        with self._changed:
            oldest = self._oldest if self._oldest is not None else self._items[0][0] if self._items else None
        return 0.0 if oldest is None else time.monotonic() - oldest

    def on_step(self, step: Step) -> None:
        """Queue a step."""
        if self._settings.enabled:
            self._put(step)

    def on_evidence(self, evidence: ChainEvidence) -> None:
        """Queue a measured chain.  The decoder has already chosen which may be recorded."""
        if self._settings.enabled:
            self._put(evidence)

    def on_finish(self, request: FinishedRequest) -> None:
        """Queue the summary of a request."""
        if self._settings.enabled:
            self._put(request)

    def on_trace(self, trace: Trace) -> None:
        """Queue a trace.  The decoder has already chosen which requests keep one."""
        if self._settings.enabled:
            self._put(trace)

    def event(self, kind: str, detail: dict[str, Any], domain: str | None = None, release: int | None = None) -> None:
        """Queue an event.  Events are kept even when recording is off."""
        self._put(event_row(kind, detail, domain, release))

    def flush(self, timeout_seconds: float = 10.0) -> bool:
        """Wait until everything queued so far is settled; False when the time is up first."""
        with self._changed:
            goal = self._num_taken
            self._flushing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._num_settled >= goal, timeout_seconds)

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Write what is queued, for so long at most, and end the thread.  What is left then counts as dropped."""
        self._give_up_at = time.monotonic() + timeout_seconds
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._thread.join(timeout_seconds + 1)

    def _put(self, item: Item) -> None:
        with self._changed:
            if self._closing.is_set() or self.queue_depth >= self._settings.queue_rows:
                self.num_dropped += 1
                return
            self._items.append((time.monotonic(), item))
            self._num_taken += 1

    def _run(self) -> None:
        self._tend(self._retention.recover)
        swept = time.monotonic()
        while True:
            batch = self._next_batch()
            self._settle([item for item in batch if isinstance(item, Trace)], self._traces.add)
            self._settle([item for item in batch if not isinstance(item, Trace)], self._write_outcomes)
            self._oldest = None
            if not batch and self._closing.is_set():
                return
            if time.monotonic() >= swept + self._settings.sweep_seconds and not self._closing.is_set():
                self._tend(self._retention.sweep)
                swept = time.monotonic()

    def _next_batch(self) -> list[Item]:
        with self._changed:
            self._changed.wait_for(lambda: self._flushing or self._closing.is_set(), self._settings.flush_seconds)
            self._oldest = self._items[0][0] if self._items else None
            batch = [self._items.popleft()[1] for _ in range(min(_BATCH_ROWS, len(self._items)))]
            self._flushing = bool(self._items)
            return batch

    def _settle(self, batch: Sequence[Kind], write: Callable[[Sequence[Kind]], object]) -> None:
        """Write a batch however long it takes; give up rows that the database refuses, or at the closing deadline.

        Traces and rows come in batches of their own, so that a retry for one part does not count the other twice.
        """
        if not batch:
            return
        wait_seconds, longest = _RETRY_SECONDS
        while True:
            try:
                num_written = self._write(batch, write)
                break
            except _OUTAGE as error:
                if wait_seconds == _RETRY_SECONDS[0]:
                    logger.warning("records cannot be written, will be tried again: %s", error)
                if time.monotonic() >= self._give_up_at:
                    num_written = 0
                    break
                self._pause(wait_seconds)
                wait_seconds = min(2 * wait_seconds, longest)
        with self._changed:
            self.num_written += num_written
            self.num_dropped += len(batch) - num_written
            self._num_settled += len(batch)
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        if self._closing.is_set():
            time.sleep(max(0.0, min(seconds, self._give_up_at - time.monotonic())))
        else:
            self._closing.wait(seconds)

    def _write(self, batch: Sequence[Kind], write: Callable[[Sequence[Kind]], object]) -> int:
        """Write a batch in one go, or, when the database refuses a row of it, row by row."""
        try:
            write(batch)
            return len(batch)
        except _OUTAGE:
            raise
        except Exception:
            if len(batch) == 1:
                logger.exception("a record is dropped, the database refuses it")
                return 0
            return sum(self._write([item], write) for item in batch)

    def _write_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        with self._database.session_scope() as session:
            for table, columns in in_bulk(outcomes):
                self._database.insert_many(session, table, columns)

    def _tend(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (SQLAlchemyError, OSError) as error:
            logger.warning("the trace store is tended to later: %s", error)
        except Exception:
            logger.exception("the trace store could not be tended to")
