"""The engine thread: the only one that touches the models.  Everybody else submits, and reads streams.

Swaps, cancels and cost measurements are jobs that run between two steps.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from adaptive_spec.core import Release, Request
from adaptive_spec.decoding.decoder import Decoder, Listeners
from adaptive_spec.decoding.slot import Delta
from adaptive_spec.errors import BusyError
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import Deltas
from adaptive_spec.settings import DecoderSettings

logger = logging.getLogger(__name__)


class Stream:
    """The reader's end of one request."""

    def __init__(self, request: Request, engine: "Engine") -> None:
        self.request = request
        self.submitted = time.perf_counter()
        self._engine = engine
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()

    def events(self) -> Iterator[Delta]:
        """Yield deltas until the one with a finish reason; blocks between them."""
        while True:
            delta = self._deltas.get()
            yield delta
            if delta.finish_reason is not None:
                return

    def collect(self) -> tuple[str, list[int], Delta]:
        """Wait for the end; return the text, the tokens and the last delta."""
        deltas = list(self.events())
        tokens = [token for delta in deltas for token in delta.token_ids]
        return "".join(delta.text for delta in deltas), tokens, deltas[-1]

    def cancel(self) -> None:
        """Stop the request between two steps; the stream ends with reason ``cancelled``."""
        self._engine.cancel(self.request.request_id)

    def put(self, delta: Delta) -> None:
        """Engine side: hand over a delta."""
        self._deltas.put(delta)


class Engine:
    """One thread, one decoder, a bounded queue in front."""

    def __init__(
        self, pair: ModelPair, settings: DecoderSettings, listeners: Listeners | None = None, seed: int = 0
    ) -> None:
        self.pair = pair
        self.settings = settings
        self.decoder = Decoder(pair, settings, listeners or Listeners(), seed)
        self.last_swap_seconds = 0.0
        self._waiting: deque[Stream] = deque()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def release(self) -> Release:
        return self.decoder.release

    @property
    def num_active(self) -> int:
        return self.decoder.num_active

    @property
    def queue_depth(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Finish live rows, refuse the waiting ones, end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, request: Request) -> Stream:
        """Queue a request.

        Raises:
            RequestError: parameters that cannot be served.
            BusyError: the queue is full, or the engine is stopping.
        """
        self.decoder.check(request)
        stream = Stream(request, self)
        with self._changed:
            if self._stopping:
                raise BusyError("The service is shutting down; send the request elsewhere.")
            if len(self._waiting) >= self.settings.queue_limit:
                raise BusyError(f"{len(self._waiting)} requests are waiting already; try again in a few seconds.")
            self._waiting.append(stream)
            self._changed.notify()
        return stream

    def cancel(self, request_id: str) -> None:
        """Cancel a waiting or a running request."""
        with self._changed:
            for stream in list(self._waiting):
                if stream.request.request_id == request_id:
                    self._waiting.remove(stream)
                    stream.put(Delta("", [], "cancelled"))
                    return
        self.call(lambda: self.decoder.cancel(request_id))

    def swap(
        self,
        release: Release,
        deltas: Deltas,
        own: Mapping[str, Deltas] | None = None,
        vocabulary: Sequence[int] | None = None,
    ) -> "Future[float]":
        """Put a validated release live between two steps.  The future gives the pause in seconds.

        Args:
            deltas: of the shared adapter; empty for the base draft.
            own: of adapters that domains have for themselves, by domain.
            vocabulary: the only tokens that drafts may propose; None: all.
        """

        def put_live() -> float:
            began = time.perf_counter()
            self.decoder.swap(release, deltas, own, vocabulary)
            self.last_swap_seconds = time.perf_counter() - began
            return self.last_swap_seconds

        return self.call(put_live)

    def call(self, job: Callable[[], Any]) -> "Future[Any]":
        """Run a function on the engine thread between two steps."""
        future: Future[Any] = Future()
        with self._changed:
            self._jobs.append((job, future))
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._jobs or self._waiting or self.decoder.num_active or self._stopping):
                    self._changed.wait()
                if self._stopping and not self.decoder.num_active:
                    self._refuse_rest()
                    return
                jobs = list(self._jobs)
                self._jobs.clear()
            for job, future in jobs:
                self._do(job, future)
            self._admit()
            self._advance()

    def _advance(self) -> None:
        if self.decoder.filling:
            try:
                self.decoder.fill()
            except Exception as error:
                logger.exception("a prompt could not be prefilled; its request is ended with an error")
                self.decoder.fail_filling(f"the prompt could not be prefilled: {error}")
        if self.decoder.slots:
            try:
                self.decoder.step()
            except Exception as error:
                logger.exception("a decoding step failed; its requests are ended with an error")
                self.decoder.fail_all(f"decoding failed: {error}")

    def _do(self, job: Callable[[], Any], future: "Future[Any]") -> None:
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)

    def _admit(self) -> None:
        while self.decoder.has_room and not self._stopping:
            with self._changed:
                if not self._waiting:
                    return
                stream = self._waiting.popleft()
            try:
                self.decoder.admit(stream.request, stream.put, stream.submitted)
            except Exception as error:
                logger.exception("request %s could not be admitted", stream.request.request_id)
                stream.put(Delta("", [], "error", error=str(error)))

    def _refuse_rest(self) -> None:
        while self._waiting:
            self._waiting.popleft().put(
                Delta("", [], "error", error="The service shut down before this request began.")
            )
        while self._jobs:
            self._do(*self._jobs.popleft())
