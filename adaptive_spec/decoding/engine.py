"""The engine thread: the only one that touches the models.  Everybody else submits, and reads streams.

Swaps, cancels, deadlines and cost measurements have their turn between two steps.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from adaptive_spec.calibration.cost import CostModel, measure_cost
from adaptive_spec.core import Release, Request
from adaptive_spec.decoding.answers import Answer, AnswerCache
from adaptive_spec.decoding.budget import Budget
from adaptive_spec.decoding.decoder import Decoder
from adaptive_spec.decoding.failures import failure, is_out_of_memory
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.decoding.overrides import Overrides
from adaptive_spec.decoding.queue import FairQueue
from adaptive_spec.decoding.slot import Delta, Slot, Usage, undecoded
from adaptive_spec.decoding.stream import Choice, Stream
from adaptive_spec.errors import (
    AdaptiveSpecError,
    BusyError,
    DeadlineError,
    OwnDeadlineError,
    RequestError,
    UnavailableError,
)
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import DecoderSettings, VerificationSettings

logger = logging.getLogger(__name__)

_STOPPING = "The service is shutting down. Send the request again once it is back, or elsewhere."


@dataclass(slots=True)
class Pauses:
    """How long decoding stood still while releases were exchanged.  Read from other threads, number by number."""

    num_swaps: int = 0
    last_seconds: float = 0.0
    longest_seconds: float = 0.0
    total_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.num_swaps += 1
        self.last_seconds = seconds
        self.longest_seconds = max(self.longest_seconds, seconds)
        self.total_seconds += seconds


class Engine:
    """One thread, one decoder, a bounded queue in front."""

    def __init__(
        self,
        pair: ModelPair,
        settings: DecoderSettings,
        listeners: Listeners | None = None,
        seed: int = 0,
        verification: VerificationSettings | None = None,
    ) -> None:
        self.pair = pair
        self.settings = settings
        self.decoder = Decoder(pair, settings, listeners or Listeners(), seed, verification)
        self.answers = AnswerCache(settings.answer_cache_tokens, pair.hashes["target"])
        self.pauses = Pauses()
        self._waiting = FairQueue()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._drained_by = math.inf  # finite once the engine stops: when the running requests are ended
        self._ended = False  # nobody does jobs any more
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def release(self) -> Release:
        return self.decoder.release

    @property
    def canary(self) -> Release | None:
        """The release that serves a share of the requests."""
        canary = self.decoder.lineup.canary
        return None if canary is None else canary.release

    @property
    def canary_share(self) -> float:
        """Its share of the requests; 0: there is none."""
        return self.decoder.lineup.share

    @property
    def tripped(self) -> tuple[int, str] | None:
        """The canary that this decoder ended last by itself, and why."""
        return self.decoder.tripped

    @property
    def num_active(self) -> int:
        return self.decoder.num_active

    @property
    def queue_depth(self) -> int:
        return len(self._waiting)

    @property
    def num_recalled_tokens(self) -> int:
        return self.decoder.prefixes.num_recalled

    @property
    def budgets(self) -> Mapping[str, Budget]:
        return self.decoder.rules.budgets

    @property
    def num_listener_failures(self) -> int:
        return self.decoder.listeners.num_failures

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        return self._drained_by < math.inf

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def drain(self) -> None:
        """Begin to stop, and return at once: refuse what waits or comes, let running requests go on for so long as
        ``drain_seconds`` allow, then cancel them."""
        with self._changed:
            self._drained_by = min(self._drained_by, time.perf_counter() + self.settings.drain_seconds)
            self._changed.notify()

    def stop(self) -> None:
        """Drain, and end the thread."""
        self.drain()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._finish()

    def submit(self, request: Request) -> Stream:
        """Queue a request; one whose answer is cached is answered at once.

        Raises:
            RequestError: parameters that cannot be served.
            BusyError: the queue is full.
            UnavailableError: the engine is stopping.
        """
        self.decoder.check(request)
        stream = Stream(self._unrecorded(self._bounded(request)), self.cancel)
        found = [(choice, self._known_answer(choice.request)) for choice in stream.choices]
        new = [choice for choice, answer in found if answer is None]
        with self._changed:
            if self.stopping:
                raise UnavailableError(_STOPPING)
            if len(new) > self.settings.queue_limit:
                raise RequestError(f"n must not exceed the queue's limit of {self.settings.queue_limit} requests.")
            if new and len(self._waiting) + len(new) > self.settings.queue_limit:
                raise BusyError(f"{len(self._waiting)} requests are waiting already; try again in a few seconds.")
            if any(choice.request.request_id in self._waiting for choice in new):
                raise RequestError(f"A request {request.request_id!r} is waiting already; give each its own id.")
            for choice in new:
                self._waiting.push(choice)
            self._changed.notify()
        for choice, answer in found:
            if answer is not None:
                self._repeat(choice, answer)
        return stream

    def cancel(self, request_id: str) -> None:
        """Cancel a waiting or a running request."""
        with self._changed:
            choice = self._waiting.remove(request_id)
        if choice is not None:
            self._end_undecoded(choice, "cancelled")
        else:
            self.call(lambda: self.decoder.end(request_id, "cancelled"))

    def swap(self, loaded: LoadedRelease) -> "Future[float]":
        """Put a release live between two steps.  The future gives the pause of decoding in seconds.

        Its drafts are made here, on the caller's thread, beside those that decode.

        Raises:
            ReleaseError: it does not fit the draft; nothing has changed.
        """
        drafts = self.decoder.weights.prepare(loaded)
        return self._exchange(lambda: self.decoder.swap(drafts))

    def begin_canary(self, loaded: LoadedRelease, share: float) -> "Future[float]":
        """Let a release serve a share of the requests to come.  As ``swap``."""
        drafts = self.decoder.weights.prepare(loaded)
        return self._exchange(lambda: self.decoder.begin_canary(drafts, share))

    def end_canary(self, *, promote: bool) -> "Future[float]":
        """Let the canary serve every request, or none.  As ``swap``."""
        return self._exchange(lambda: self.decoder.end_canary(promote=promote))

    def _exchange(self, change: Callable[[], None]) -> "Future[float]":
        def timed() -> float:
            began = time.perf_counter()
            change()
            self.pauses.add(time.perf_counter() - began)
            return self.pauses.last_seconds

        return self.call(timed)

    def override(self, overrides: Overrides) -> "Future[None]":
        """Draft under these overrides, and no others, from the next step on."""
        return self.call(lambda: setattr(self.decoder.lineup, "overrides", overrides))

    def measure_cost(self, key: str, repeats: int = 5) -> CostModel:
        """Measure what steps of this engine cost, by the number of rows; while no request is decoded."""
        decoder, settings = self.decoder, self.settings
        cost: CostModel = self.call(
            lambda: measure_cost(
                decoder.time_draft,
                decoder.time_verify,
                settings.max_chain_length,
                key,
                settings.slots,
                repeats,
                decoder.cost_contexts,
            )
        ).result()
        return cost

    @property
    def cost(self) -> CostModel | None:
        """What a step costs, as the policies have it now."""
        return self.decoder.proposer.cost

    def price(self, cost: CostModel) -> None:
        """Tell the policies what a step costs."""
        self.call(lambda: self.decoder.price(cost)).result()

    def call(self, job: Callable[[], Any]) -> "Future[Any]":
        """Run a function on the engine thread between two steps; UnavailableError when there will be none."""
        future: Future[Any] = Future()
        with self._changed:
            if self._ended:
                future.set_exception(UnavailableError(_STOPPING))
            else:
                self._jobs.append((job, future))
                self._changed.notify()
        return future

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            logger.critical("the engine's thread ends; nothing can be decoded any more", exc_info=True)
            raise
        finally:
            self._finish()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._jobs or self._waiting or self.decoder.num_active or self.stopping):
                    self._changed.wait()
            self._do_jobs()
            if self.stopping:
                self._refuse_waiting()
                if not self.decoder.num_active or time.perf_counter() >= self._drained_by:
                    return
            self._end_late()
            self._admit()
            self._advance()

    def _do_jobs(self) -> None:
        with self._changed:
            jobs = list(self._jobs)
            self._jobs.clear()
        for job, future in jobs:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)

    def _end_late(self) -> None:
        """End every request whose deadline has passed, in the queue or in a row."""
        now = time.perf_counter()
        with self._changed:
            expired = self._waiting.expired(now)
        for choice in expired:
            self._end_undecoded(choice, "deadline", self._too_late(choice.request, "before it began"))
        for slot in (*self.decoder.slots, *self.decoder.filling):
            if slot.deadline <= now:
                error = self._too_late(slot.request, f"after {slot.num_emitted} tokens")
                self.decoder.end(slot.request.request_id, "deadline", error)

    def _admit(self) -> None:
        while self.decoder.has_room:
            with self._changed:
                choice = self._waiting.pop()
            if choice is None:
                return
            try:
                put = choice.put
                if self.decoder.rules.is_exact(choice.request, self._release_for(choice.request)):
                    put = self.answers.listening(choice.request, put)
                self.decoder.admit(choice.request, put, choice.submitted)
            except Exception as error:
                its = choice.request.request_id
                logger.exception("request %s could not be admitted", its, extra={"completion_id": its})
                self._end_undecoded(choice, "error", failure(error))

    def _advance(self) -> None:
        """Prefill so much that live rows never wait for a long prompt, then let them take a step."""
        budget = self.settings.prefill_chunk_tokens
        while self.decoder.filling and budget > 0:
            first = self.decoder.filling[0]
            try:
                budget -= self.decoder.fill(budget)
            except Exception as error:
                waits = any(slot is first for slot in self.decoder.filling)
                self._end_failed(error, first if waits else None)
                break
        if self.decoder.slots:
            try:
                self.decoder.step()
            except Exception as error:
                self._end_failed(error, None)

    def _end_failed(self, error: Exception, filling: Slot | None) -> None:
        """End what a failed forward must end.

        When memory ran out, what the prefix caches hold goes first, then the request whose prompt was being filled or
        the youngest one.  A prompt that fails in another way ends alone; after a step that does, none can go on.
        """
        if is_out_of_memory(error) and self.decoder.forget_prefixes():
            logger.warning("memory ran out; the prefix caches are emptied and the step is tried again")
            failure(error)  # frees what the device can spare
            return
        victim = filling
        if victim is None and is_out_of_memory(error) and self.decoder.slots:
            victim = max(self.decoder.slots, key=lambda slot: slot.decode_started)
        if victim is None:
            logger.exception("a decoding step failed; its requests are ended with an error")
            self.decoder.end_all("error", failure(error))
        else:
            its = victim.request.request_id
            logger.exception("request %s is ended with an error", its, extra={"completion_id": its})
            self.decoder.end(victim.request.request_id, "error", failure(error))

    def _finish(self) -> None:
        """Answer everything that still waits for this thread; afterwards nothing is taken any more."""
        with self._changed:
            self._drained_by = -math.inf
            self._ended = True
        self._refuse_waiting()
        self.decoder.end_all("cancelled", UnavailableError(_STOPPING))
        self._do_jobs()

    def _refuse_waiting(self) -> None:
        while True:
            with self._changed:
                choice = self._waiting.pop()
            if choice is None:
                return
            self._end_undecoded(choice, "error", UnavailableError(_STOPPING))

    def _known_answer(self, request: Request) -> Answer | None:
        exact = self.decoder.rules.is_exact(request, self._release_for(request))
        return self.answers.find(request) if exact else None

    def _release_for(self, request: Request) -> Release:
        return self.decoder.lineup.release_for(request.request_id)

    def _repeat(self, choice: Choice, answer: Answer) -> None:
        """Answer out of the cache."""
        prompt, completion = len(choice.request.prompt_ids), len(answer.token_ids)
        release = self._release_for(choice.request).version
        usage = Usage(prompt, completion, 0, 0, 0, (release,), cached=True)
        choice.put(Delta(answer.text, list(answer.token_ids), answer.finish_reason, usage, log_probs=answer.log_probs))
        finished = undecoded(
            choice.request, answer.finish_reason, choice.submitted, completion_tokens=completion, release=release
        )
        self.decoder.listeners.on_finish(finished)

    def _end_undecoded(self, choice: Choice, reason: str, error: AdaptiveSpecError | None = None) -> None:
        usage = Usage(len(choice.request.prompt_ids), 0, 0, 0, 0, ())
        choice.put(Delta("", [], reason, usage, error))
        self.decoder.listeners.on_finish(undecoded(choice.request, reason, choice.submitted))

    def _bounded(self, request: Request) -> Request:
        """The request under the deadline that holds for it: its own, but no later than the setting's."""
        own, longest = request.params.deadline_seconds, self.settings.request_timeout_seconds
        if not longest or (own is not None and own <= longest):
            return request
        return replace(request, params=replace(request.params, deadline_seconds=longest))

    def _too_late(self, request: Request, when: str) -> DeadlineError:
        seconds, longest = request.params.deadline_seconds, self.settings.request_timeout_seconds
        kind, name = (
            (DeadlineError, "decoder.request_timeout_seconds")
            if seconds == longest
            else (OwnDeadlineError, "deadline_seconds")
        )
        return kind(f"The request's time of {seconds:g} seconds was up {when}. Ask for fewer tokens, or raise {name}.")

    def _unrecorded(self, request: Request) -> Request:
        """The request as its domain wants it recorded."""
        if request.domain not in self.decoder.listeners.untraced_domains:
            return request
        return replace(request, params=replace(request.params, record=False))
