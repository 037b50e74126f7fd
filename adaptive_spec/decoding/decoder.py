"""The step loop: draft a chain, verify it in one target forward, emit.  One thread calls it, an engine's or a script's.

Reads like this: ``admit`` gives a request a row, ``fill`` brings prompts into the cache chunk by chunk and makes their
first token, ``step`` lets ``propose`` draft, ``judge`` verify and ``_emit`` hand out, over all live rows at once.  Rows
0 … are live, those after them are filling.  It tells listeners of outcomes and never learns who listens.  ``decode`` is
the three in a loop, for who has no engine.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.calibration.cost import CostKeeper, CostModel
from adaptive_spec.core import Position, Release, Request, Step
from adaptive_spec.decoding.cache import RaggedCache
from adaptive_spec.decoding.check import check_request
from adaptive_spec.decoding.evidence import EvidenceTaker
from adaptive_spec.decoding.failures import failure, is_out_of_memory
from adaptive_spec.decoding.listeners import GuardedListeners, Listeners
from adaptive_spec.decoding.prefix import PrefixCache
from adaptive_spec.decoding.propose import Chains, Proposer, no_chains
from adaptive_spec.decoding.rules import Relaxation, Rules
from adaptive_spec.decoding.sampling import Sampling, sampling_of
from adaptive_spec.decoding.served import Lineup
from adaptive_spec.decoding.slot import Delta, Slot, TokenLogProb
from adaptive_spec.decoding.text import TextStream
from adaptive_spec.decoding.verdict import Verdict, judge
from adaptive_spec.decoding.walk import walk
from adaptive_spec.drafting.memory import longest_match
from adaptive_spec.drafting.ngram import SuffixIndex
from adaptive_spec.errors import AdaptiveSpecError, BusyError
from adaptive_spec.models.attention import group_queries
from adaptive_spec.models.linear import exchange_linears
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import Drafts, DraftWeights, LoadedRelease
from adaptive_spec.settings import DecoderSettings, VerificationSettings
from adaptive_spec.verification.distribution import log_probs_of, sparse_log_probs
from adaptive_spec.verification.transfer import on_device, read

logger = logging.getLogger(__name__)

_NEAR_TOKENS, _FAR_TOKENS = 160, 1024  # contexts where costs are measured: a short prompt and some output; a long one


class Decoder:
    """Owns both models' caches and their rows."""

    compares = False  # whether chains keep what they were drawn from although no relaxed rule asks for it

    def __init__(
        self,
        pair: ModelPair,
        settings: DecoderSettings | None = None,
        listeners: Listeners | None = None,
        seed: int = 0,
        verification: VerificationSettings | None = None,
    ) -> None:
        self.pair = pair
        self.settings = settings = settings or DecoderSettings()
        self.verification = verification or VerificationSettings()
        self.listeners = GuardedListeners(listeners or Listeners())
        self.rules = Rules(self.verification, self.listeners.on_event)
        self.tripped: tuple[int, str] | None = None  # the last canary that ended itself, and why
        self.slots: list[Slot] = []  # live: the whole prompt is in the cache
        self.filling: list[Slot] = []
        self._random = random.Random(seed)
        self._eos = frozenset(pair.eos_token_ids)
        self.evidence = EvidenceTaker(self.verification, self.rules, self._eos, seed)
        for model in (pair.target, pair.draft):
            exchange_linears(model)
            group_queries(model)
        self.target_cache = self._cache(pair.target)
        self.draft_cache = self._cache(pair.draft)
        looks = pair.device.type == "cpu" and not self.target_cache.static  # there looking is free
        self._judge = walk if looks else judge
        self.prefixes = PrefixCache(self.target_cache, settings.prefix_cache_tokens)
        self.weights = DraftWeights(pair.draft)
        self.lineup = Lineup(self.weights.prepare(LoadedRelease()))
        self.proposer = Proposer(self.lineup, self.draft_cache, settings, self._random)

    def _cache(self, model: PreTrainedModel) -> RaggedCache:
        settings = self.settings
        device, compiled = self.pair.device.type != "cpu", settings.compile != "off"
        return RaggedCache(
            model,
            settings.slots,
            capacity=settings.max_context_tokens + settings.max_chain_length + 1,
            widest=max(settings.prefill_chunk_tokens, settings.max_chain_length + 1),
            static=settings.static_shapes == "on" or (settings.static_shapes == "auto" and (device or compiled)),
            compile_mode=settings.compile if compiled else None,
        )

    @property
    def release(self) -> Release:
        """The live one."""
        return self.lineup.live.release

    @property
    def has_room(self) -> bool:
        return self.num_active < self.settings.slots

    @property
    def num_active(self) -> int:
        return len(self.slots) + len(self.filling)

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that cannot be served as asked."""
        check_request(request, self.settings, self.verification, self.pair.vocab_size)

    def decode(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Delta]]:
        """Decode requests to their ends, as many at once as there are rows; yield what each says as it says it.

        On the caller's thread, and never beside an engine.  Choices (``n``) and deadlines are the engine's: here every
        request has one answer and all the time that it needs.  Who stops reading cancels what is not finished.

        Raises:
            RequestError: parameters that cannot be served, before anything is decoded.
        """
        waiting = deque(requests)
        for request in waiting:
            self.check(request)
        said: deque[tuple[Request, Delta]] = deque()

        def put(request: Request, delta: Delta) -> None:
            said.append((request, delta))

        try:
            while waiting or self.num_active:
                while waiting and self.has_room:
                    request = waiting.popleft()
                    self.admit(request, partial(put, request), time.perf_counter())
                while self.filling:
                    self.fill(self.settings.prefill_chunk_tokens)
                if self.slots:
                    self.step()
                while said:
                    yield said.popleft()
        finally:
            if self.num_active:
                self.end_all("cancelled")

    def admit(self, request: Request, emit: Callable[[Delta], None], submitted: float) -> None:
        """Give a request the next free row."""
        seed, settings = request.params.seed, self.settings
        slot = Slot(
            request=request,
            tokens=list(request.prompt_ids),
            text=TextStream(self.pair.tokenizer, request.params.stop),
            emit=emit,
            random=random.Random(seed if seed is not None else self._random.getrandbits(64)),
            submitted=submitted,
            started_at=datetime.now(UTC),
            decode_started=time.perf_counter(),
            release=self.lineup.release_for(request.request_id),
            drafter=request.params.drafter or settings.domain_drafters.get(request.domain, settings.drafter),
            adapter=request.params.adapter or request.domain,
        )
        if slot.drafter != "model":
            slot.suffixes = SuffixIndex(settings.ngram_min_match, longest_match(settings))
            slot.suffixes.extend(slot.tokens)
        self.filling.append(slot)

    @torch.inference_mode()
    def fill(self, budget: int) -> int:
        """Prefill at most ``budget`` tokens of the first prompt that is not whole; return how many it took.

        With the last of them comes the first token, and the row goes live.
        """
        slot, row, began = self.filling[0], len(self.slots), time.perf_counter()
        if not slot.target_length:
            slot.target_length = self.prefixes.recall(row, slot.tokens[:-1])
        start = slot.target_length
        stop = min(start + budget, len(slot.tokens))
        whole = stop == len(slot.tokens)
        logits = self.target_cache.prefill(row, slot.tokens, start, stop, budget, wants_logits=whole)
        slot.target_length = stop
        if logits is not None:
            sampling = self._sampling([slot])
            chains = no_chains(1, self.pair.device, None if sampling is None else self.pair.vocab_size)
            verdict = self._judge([slot], logits[:, None], chains, sampling)
            self.slots.append(self.filling.pop(0))
            self._remember(row, slot.tokens[:stop])
            self._emit([slot], chains, verdict, time.perf_counter() - began)
            if slot.finish_reason:
                self._leave(row)
        return stop - start

    @torch.inference_mode()
    def step(self) -> None:
        """Run one step for every live row."""
        sampling, relaxation = self._sampling(self.slots), self.rules.plan(self.slots)
        measured = self.evidence.choose(self.slots) if self.listeners.wants_evidence else {}
        compares = self.compares or relaxation is not None or bool(measured)
        chains = self._propose(sampling, compares)
        began = time.perf_counter()
        last = on_device([[slot.tokens[-1]] for slot in self.slots], self.pair.device)
        rows, starts = list(range(len(self.slots))), [slot.target_length for slot in self.slots]
        logits = self.target_cache.forward(rows, torch.cat([last, chains.ids], dim=1), starts)
        verdict = self.judge_step(logits, chains, sampling, relaxation)
        seconds = time.perf_counter() - began
        self.proposer.note_cost(chains, max(starts), seconds)
        taken = self.evidence.take(measured, self.slots, logits, chains, sampling) if measured else ()
        self._emit(self.slots, chains, verdict, seconds, relaxation)
        for evidence in taken:
            self.listeners.on_evidence(evidence)
        for row in reversed([row for row, slot in enumerate(self.slots) if slot.finish_reason]):
            self._leave(row)
        self._heed_the_wire()

    def _propose(self, sampling: Sampling | None, compares: bool) -> Chains:
        """The chains of all live rows.  Drafting that fails beside a canary ends the canary, and there are none."""
        try:
            return self.proposer.propose(self.slots, sampling, compares)
        except Exception as error:
            canary, wire = self.lineup.canary, self.lineup.wire
            takes_part = canary is not None and any(slot.release is canary.release for slot in self.slots)
            if wire is None or not takes_part or is_out_of_memory(error):
                raise
            logger.exception("drafting failed beside a canary, which is ended; this step goes on without chains")
            wire.trip(f"drafting failed: {type(error).__name__}: {error}")
            self._heed_the_wire()
            for slot in self.slots:
                slot.draft_length = 0  # what a failed forward has written is not known
            return no_chains(len(self.slots), self.pair.device, None if sampling is None else self.pair.vocab_size)

    def judge_step(
        self, logits: Tensor, chains: Chains, sampling: Sampling | None, relaxation: Relaxation | None
    ) -> Verdict:
        """Verify the chains of the live rows; who measures them overrides this."""
        return self._judge(self.slots, logits, chains, sampling, relaxation)

    def _sampling(self, slots: list[Slot]) -> Sampling | None:
        return sampling_of(slots, self.settings.max_chain_length, self.pair.device)

    def end(self, request_id: str, reason: str, error: AdaptiveSpecError | None = None) -> None:
        """End a request between two steps; no other row is touched."""
        for row, slot in enumerate(self.slots):
            if slot.request.request_id == request_id:
                slot.end(reason, error)
                self._leave(row)
                return
        for index, slot in enumerate(self.filling):
            if slot.request.request_id == request_id:
                self._end_filling(index, reason, error)
                return

    def end_all(self, reason: str, error: AdaptiveSpecError | None = None) -> None:
        """End every request; what the caches hold need not be trusted."""
        for slot in (*self.slots, *self.filling):
            slot.end(reason, error)
            self.listeners.on_finish(slot.finished())
        self.slots.clear()
        self.filling.clear()
        self.forget_prefixes()

    def forget_prefixes(self) -> bool:
        """Empty the prefix caches; tell whether they held anything."""
        held = self.prefixes.num_tokens + self.proposer.prefixes.num_tokens > 0
        self.prefixes.forget()
        self.proposer.prefixes.forget()
        return held

    def swap(self, drafts: Drafts) -> None:
        """Put a release live, between steps.  Requests of a canary of another version stay with it."""
        self._exchange(lambda: self.lineup.swap(drafts))
        self.proposer.memories.begin_with(drafts.release)

    def begin_canary(self, drafts: Drafts, share: float) -> None:
        """Let a release serve a share of the requests to come; those that run stay with theirs.

        Raises:
            ReleaseError: it is live already.
        """
        self._exchange(lambda: self.lineup.begin(drafts, share))
        self.tripped = None

    def end_canary(self, *, promote: bool) -> None:
        """End the canary, between steps: all requests, those that run included, get it or the old live release."""
        self._exchange(lambda: self.lineup.end(promote=promote))
        self.proposer.memories.begin_with(self.release)

    def _exchange(self, change: Callable[[], None]) -> None:
        """Change the line-up.  Rows whose draft has changed forget its cache and rebuild it when they next draft."""
        slots = (*self.slots, *self.filling)
        before = [self.lineup.draft_of(slot) for slot in slots]
        change()
        for slot, draft in zip(slots, before, strict=True):
            slot.release = self.lineup.of(slot.release).release
            if self.lineup.draft_of(slot) is not draft:
                slot.draft_length = 0

    def _heed_the_wire(self) -> None:
        wire = self.lineup.wire
        if wire is not None and wire.reason is not None:
            logger.warning("canary %d is ended: %s", wire.version, wire.reason)
            self.tripped = (wire.version, wire.reason)
            self.end_canary(promote=False)

    def price(self, cost: CostModel | None) -> None:
        """Tell the policies what a step costs; from then on they keep it up to date."""
        self.proposer.costs = CostKeeper(cost) if cost else None

    @property
    def cost_contexts(self) -> tuple[int, ...]:
        """The contexts at which to measure costs, as far as there is room."""
        far = min(_FAR_TOKENS, self.settings.max_context_tokens)
        return (_NEAR_TOKENS, far) if far >= 2 * _NEAR_TOKENS else (_NEAR_TOKENS,)

    @torch.inference_mode()
    def time_draft(self, rows: int = 1, context: int = _NEAR_TOKENS) -> float:
        """Seconds of one draft forward of one token in each of so many rows.  Between steps, while no row is live."""
        ids = torch.zeros(rows, 1, dtype=torch.long, device=self.pair.device)
        return self._timed(self.draft_cache, ids, context, self.lineup.live.drafts.head)

    @torch.inference_mode()
    def time_verify(self, rows: int, chain_length: int, context: int = _NEAR_TOKENS) -> float:
        """Seconds of one target forward over so many rows with such chains.  Between steps, while no row is live."""
        ids = torch.zeros(rows, chain_length + 1, dtype=torch.long, device=self.pair.device)
        return self._timed(self.target_cache, ids, context)

    def _timed(self, cache: RaggedCache, ids: Tensor, context: int, head: torch.nn.Module | None = None) -> float:
        if self.num_active:
            raise BusyError("Requests are being decoded; measure costs while none is.")
        rows, num_tokens = ids.shape
        start = max(0, min(context, cache.capacity - num_tokens))
        began = time.perf_counter()
        logits = cache.forward(list(range(rows)), ids, [start] * rows, head=head)
        read(logits.argmax(-1))  # waits for the device
        return time.perf_counter() - began

    def _emit(
        self,
        slots: Sequence[Slot],
        chains: Chains,
        verdict: Verdict,
        verify_seconds: float,
        relaxation: Relaxation | None = None,
    ) -> None:
        for row, slot in enumerate(slots):
            verifier = relaxation.verifier(row) if relaxation else "exact"
            try:
                self._emit_row(slot, row, chains, verdict, verify_seconds, verifier)
            except Exception as error:
                logger.exception("request %s is ended with an error; the others go on", slot.request.request_id)
                slot.end("error", failure(error))
                if self.lineup.wire is not None:
                    self.lineup.wire.note_error(slot.release.version)

    def _emit_row(
        self, slot: Slot, row: int, chains: Chains, verdict: Verdict, verify_seconds: float, verifier: str
    ) -> None:
        length, accepted = verdict.lengths[row], verdict.num_accepted[row]
        before = len(slot.tokens)
        kept = slot.accept([*verdict.chains[row][:accepted], verdict.next_tokens[row]], self._eos)
        slot.target_length = before + accepted
        drafter = chains.drafter(row) if length else ""
        if drafter == "model":
            slot.draft_length = min(before + length - 1, before + accepted)
        self.proposer.learn(slot, chains, row, length, accepted)
        if slot.suffixes is not None:
            slot.suffixes.extend(slot.tokens[before:])
        slot.num_steps += 1
        slot.num_draft_tokens += length
        slot.num_accepted += accepted
        gave_up = verdict.gave_up(row, kept)
        slot.num_divergent += gave_up.num_divergent
        self.rules.count(slot, kept, gave_up.num_divergent, gave_up.wanted_more)
        version = slot.release.version
        if version not in slot.releases:
            slot.releases.append(version)
        if self._keeps_trace(slot):
            slot.keep_targets(*sparse_log_probs(verdict.logits[row, :kept], self.listeners.trace_top_k))
        step = Step(
            request_id=slot.request.request_id,
            domain=slot.request.domain,
            release=version,
            step_index=slot.num_steps - 1,
            drafter=drafter,
            chain_length=length,
            num_accepted=accepted,
            num_emitted=kept,
            explored=chains.explored[row],
            draft_seconds=chains.seconds,
            verify_seconds=verify_seconds,
            batch_size=len(chains.lengths),
            positions=tuple(
                Position(verdict.confidences[row][index], verdict.overlaps[row][index], index < accepted)
                for index in range(min(accepted + 1, length))
            ),
            at=datetime.now(UTC),
            verifier=verifier,
            num_divergent=gave_up.num_divergent,
            total_variation=gave_up.total_variation,
            given_up_nats=gave_up.given_up_nats,
            match_length=chains.matches[row].match_length if drafter == "ngram" else 0,
            request_temperature=slot.request.params.warmth,
            policy=slot.policy,
        )
        if self.lineup.wire is not None:
            self.lineup.wire.note(step)
        slot.send(slot.tokens[before:], self._log_probs(slot, verdict.logits[row, :kept]))
        self.listeners.on_step(step)

    def _log_probs(self, slot: Slot, logits: Tensor) -> tuple[TokenLogProb, ...]:
        """Those of the tokens just kept, where they were asked for.  logits: [kept, vocab], as the target gave them."""
        if slot.request.params.logprobs is None:
            return ()
        kept = slot.tokens[-len(logits) :]
        found = log_probs_of(logits, on_device(kept, logits.device), slot.request.params.logprobs)
        log_probs, ids, of_ids = (values.tolist() for values in read(*found))
        return tuple(
            TokenLogProb(token, log_prob, tuple(zip(top, of_top, strict=True)))
            for token, log_prob, top, of_top in zip(kept, log_probs, ids, of_ids, strict=True)
        )

    def _keeps_trace(self, slot: Slot) -> bool:
        listeners = self.listeners
        if not listeners.trace_top_k or not slot.request.params.record:
            return False
        share = random.Random(slot.request.request_id).random()
        return share < listeners.trace_share

    def _leave(self, row: int) -> None:
        self._report(self.slots[row], row)
        moved = self.slots.pop()
        hole = len(self.slots)
        if row < hole:
            self._move(moved, hole, row)
            self.slots[row] = moved
        for index, waiting in enumerate(self.filling):  # in order of arrival; few have begun
            self._move(waiting, hole + 1 + index, hole + index)

    def _report(self, slot: Slot, row: int) -> None:
        """Tell of a request that has left, and remember what it said.  Its answer is out: what fails here is lost."""
        self.listeners.on_finish(slot.finished())
        if slot.finish_reason not in ("stop", "length"):
            return
        self._remember(row, slot.tokens[: slot.target_length])
        try:
            if (trace := slot.trace()) is not None:
                self.listeners.on_trace(trace)
            if slot.suffixes is not None and slot.request.params.record:
                self.proposer.memories[slot.request.domain].store.add(slot.tokens[slot.prompt_tokens :])
        except Exception:
            logger.exception("request %s leaves no trace", slot.request.request_id)

    def _remember(self, row: int, tokens: Sequence[int]) -> None:
        try:
            self.prefixes.remember(row, tokens)
        except Exception:  # memory ran out: what is kept helps others, it must not cost this request
            logger.exception("the prefix cache is emptied")
            self.prefixes.forget()

    def _end_filling(self, index: int, reason: str, error: AdaptiveSpecError | None = None) -> None:
        slot = self.filling[index]
        slot.end(reason, error)
        self.listeners.on_finish(slot.finished())
        del self.filling[index]
        first = len(self.slots)
        for behind in range(index, len(self.filling)):
            self._move(self.filling[behind], first + behind + 1, first + behind)

    def _move(self, slot: Slot, source: int, destination: int) -> None:
        self.target_cache.move(source, destination, slot.target_length)
        self.draft_cache.move(source, destination, slot.draft_length)
