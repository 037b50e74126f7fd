"""The step loop: draft a chain, verify it in one target forward, emit.  Called by the engine thread only.

Reads like this: ``admit`` gives a request a row, ``fill`` brings prompts into the cache chunk by chunk, ``step`` runs
``_draft``, ``_verify`` and ``_emit`` over all live rows at once.  Rows 0 … are live, those after them are filling.  It
calls ``on_step``, ``on_finish`` and ``on_trace`` and never learns who listens.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.calibration.cost import CostModel
from adaptive_spec.core import DRAFTERS, FinishedRequest, Position, Release, Request, Step, Trace
from adaptive_spec.decoding.cache import RaggedCache
from adaptive_spec.decoding.propose import Chains, Proposer
from adaptive_spec.decoding.sampling import penalised, uniforms
from adaptive_spec.decoding.slot import Delta, Slot
from adaptive_spec.decoding.text import TextStream
from adaptive_spec.drafting.memory import longest_match
from adaptive_spec.drafting.ngram import SuffixIndex
from adaptive_spec.errors import BusyError, RequestError
from adaptive_spec.models.linear import exchange_linears
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import Deltas, DraftWeights
from adaptive_spec.settings import DecoderSettings
from adaptive_spec.verification.distribution import Processing, processed_probs, sparse_log_probs
from adaptive_spec.verification.exact import verify_greedy, verify_sampled
from adaptive_spec.verification.transfer import on_device, read

_COST_CONTEXT_TOKENS = 160  # where costs are measured: a short prompt and some output


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears of outcomes.  ``trace_top_k`` 0 keeps no traces."""

    on_step: Callable[[Step], None] = lambda _: None
    on_finish: Callable[[FinishedRequest], None] = lambda _: None
    on_trace: Callable[[Trace], None] = lambda _: None
    trace_top_k: int = 0
    trace_share: float = 1.0


@dataclass(slots=True)
class _Outcome:
    """What a step showed, on the host.  logits stay on the device: [rows, chain + 1, vocab], before penalties."""

    logits: Tensor
    chains: list[list[int]]
    lengths: list[int]
    confidences: list[list[float]]
    num_accepted: list[int]
    next_tokens: list[int]
    overlaps: list[list[float]]


class Decoder:
    """Owns both models' caches and their rows."""

    def __init__(self, pair: ModelPair, settings: DecoderSettings, listeners: Listeners, seed: int = 0) -> None:
        self.pair = pair
        self.settings = settings
        self.listeners = listeners
        self.slots: list[Slot] = []  # live: the whole prompt is in the cache
        self.filling: list[Slot] = []
        self._random = random.Random(seed)
        self._eos = frozenset(pair.eos_token_ids)
        for model in (pair.target, pair.draft):
            exchange_linears(model)
        self.target_cache = self._cache(pair.target)
        self.draft_cache = self._cache(pair.draft)
        self.proposer = Proposer(DraftWeights(pair.draft), self.draft_cache, settings, self._random)

    def _cache(self, model: PreTrainedModel) -> RaggedCache:
        settings = self.settings
        static = settings.static_shapes
        return RaggedCache(
            model,
            settings.slots,
            capacity=settings.max_context_tokens + settings.max_chain_length + 1,
            widest=max(settings.prefill_chunk_tokens, settings.max_chain_length + 1),
            static=self.pair.device.type != "cpu" if static is None else static,
            compile_mode=None if settings.compile == "off" else settings.compile,
        )

    @property
    def release(self) -> Release:
        return self.proposer.release

    @property
    def has_room(self) -> bool:
        return self.num_active < self.settings.slots

    @property
    def num_active(self) -> int:
        return len(self.slots) + len(self.filling)

    def check(self, request: Request) -> None:
        """Raise RequestError for a request that cannot be served as asked."""
        params, limit = request.params, self.settings.max_context_tokens
        if not request.prompt_ids:
            raise RequestError("The prompt is empty; send at least one token.")
        if len(request.prompt_ids) + params.max_tokens > limit:
            raise RequestError(
                f"Prompt ({len(request.prompt_ids)} tokens) plus max_tokens ({params.max_tokens}) exceeds the context "
                f"of {limit} tokens. Shorten one of them or raise decoder.max_context_tokens."
            )
        if not all(0 <= token < self.pair.vocab_size for token in request.prompt_ids):
            raise RequestError(f"Prompt token ids must lie in [0, {self.pair.vocab_size}).")
        if params.max_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < 0:
            raise RequestError(
                "Need max_tokens >= 1, temperature >= 0, 0 < top_p <= 1 and top_k >= 0; correct the request."
            )
        if not 0 <= params.min_p <= 1 or not 0 < params.repetition_penalty <= 10:
            raise RequestError("Need 0 <= min_p <= 1 and 0 < repetition_penalty <= 10; correct the request.")
        if not (-2 <= params.presence_penalty <= 2 and -2 <= params.frequency_penalty <= 2):
            raise RequestError("presence_penalty and frequency_penalty must lie in [-2, 2]; correct the request.")
        if params.chain_length is not None and not 0 <= params.chain_length <= self.settings.max_chain_length:
            raise RequestError(f"chain_length must lie in [0, {self.settings.max_chain_length}] or be left out.")
        if params.drafter is not None and params.drafter not in DRAFTERS:
            raise RequestError(f"drafter {params.drafter!r} is unknown; choose one of {', '.join(DRAFTERS)}.")

    def admit(self, request: Request, emit: Callable[[Delta], None], submitted: float) -> None:
        """Give a request the next free row."""
        seed = request.params.seed
        slot = Slot(
            request=request,
            tokens=list(request.prompt_ids),
            text=TextStream(self.pair.tokenizer, request.params.stop),
            emit=emit,
            random=random.Random(seed if seed is not None else self._random.getrandbits(64)),
            submitted=submitted,
            started_at=datetime.now(UTC),
            decode_started=time.perf_counter(),
            drafter=request.params.drafter or self.settings.drafter,
            adapter=request.params.adapter or request.domain,
        )
        if slot.drafter != "model":
            slot.suffixes = SuffixIndex(self.settings.ngram_min_match, longest_match(self.settings))
            slot.suffixes.extend(slot.tokens)
        self.filling.append(slot)

    @torch.inference_mode()
    def fill(self) -> None:
        """Prefill at most ``prefill_chunk_tokens`` prompt tokens, so that live rows never wait for a long prompt.

        A row goes live when all but the last token of its prompt is in the target's cache.
        """
        budget = self.settings.prefill_chunk_tokens
        while self.filling and budget > 0:
            slot, row = self.filling[0], len(self.slots)
            stop = min(slot.target_length + budget, len(slot.tokens) - 1)
            self.target_cache.prefill(row, slot.tokens, slot.target_length, stop, self.settings.prefill_chunk_tokens)
            budget -= stop - slot.target_length
            slot.target_length = stop
            if stop == len(slot.tokens) - 1:
                self.slots.append(self.filling.pop(0))

    def fail_filling(self, message: str) -> None:
        """End the request whose prompt could not be prefilled; no other row was touched."""
        self._end_filling(0, "error", message)

    @torch.inference_mode()
    def step(self) -> None:
        """Run one step for every live row."""
        params = [slot.request.params for slot in self.slots]
        greedy = all(p.temperature <= 0 for p in params)
        processing = None if greedy else Processing.of(params, self.pair.device)
        chains = self.proposer.propose(self.slots, processing)
        began = time.perf_counter()
        outcome = self._verify(chains, processing)
        self._emit(chains, outcome, time.perf_counter() - began)
        for row in reversed([row for row, slot in enumerate(self.slots) if slot.finish_reason]):
            self._leave(row)

    def cancel(self, request_id: str) -> None:
        """End a request between two steps."""
        for row, slot in enumerate(self.slots):
            if slot.request.request_id == request_id:
                slot.finish_reason = "cancelled"
                slot.send([])
                self._leave(row)
                return
        for index, slot in enumerate(self.filling):
            if slot.request.request_id == request_id:
                self._end_filling(index, "cancelled")
                return

    def fail_all(self, message: str) -> None:
        """End every live request with an error: the caches can no longer be trusted."""
        for slot in (*self.slots, *self.filling):
            slot.finish_reason = "error"
            slot.emit(Delta("", [], "error", slot.usage(), error=message))
            self.listeners.on_finish(slot.finished())
        self.slots.clear()
        self.filling.clear()

    def swap(
        self,
        release: Release,
        deltas: Deltas,
        own: Mapping[str, Deltas] | None = None,
        vocabulary: Sequence[int] | None = None,
    ) -> None:
        """Put a release live, between steps.  The arguments are those of ``DraftWeights.merge``.

        The draft's cache was computed by other weights: rows forget theirs and rebuild it when they next draft.
        """
        self.proposer.weights.merge(deltas, own, vocabulary)
        self.proposer.memories.draft_changed()
        self.proposer.release = release
        for slot in (*self.slots, *self.filling):
            slot.draft_length = 0

    def price(self, cost: CostModel | None) -> None:
        """Tell the policies what a step costs."""
        self.proposer.cost = cost

    @torch.inference_mode()
    def time_draft(self, rows: int = 1) -> float:
        """Seconds of one draft forward of one token in each of so many rows.  Between steps, while no row is live."""
        weights = self.proposer.weights
        head = None if weights.trimmed is None else weights.trimmed.head
        ids = torch.zeros(rows, 1, dtype=torch.long, device=self.pair.device)
        return self._timed(self.draft_cache, ids, head)

    @torch.inference_mode()
    def time_verify(self, num_tokens: int) -> float:
        """Seconds of one target forward over so many tokens of one row.  Between steps, while no row is live."""
        return self._timed(self.target_cache, torch.zeros(1, num_tokens, dtype=torch.long, device=self.pair.device))

    def _timed(self, cache: RaggedCache, ids: Tensor, head: torch.nn.Module | None = None) -> float:
        if self.num_active:
            raise BusyError("Requests are being decoded; measure costs while none is.")
        rows, num_tokens = ids.shape
        start = max(0, min(_COST_CONTEXT_TOKENS, cache.capacity - num_tokens))
        began = time.perf_counter()
        logits = cache.forward(list(range(rows)), ids, [start] * rows, head=head)
        read(logits.argmax(-1))  # waits for the device
        return time.perf_counter() - began

    def _verify(self, chains: Chains, processing: Processing | None) -> _Outcome:
        """One target forward over last token and chain, what the verifier makes of it, and the step's one read."""
        rows, width = chains.ids.shape
        device = self.pair.device
        last = on_device([[slot.tokens[-1]] for slot in self.slots], device)
        starts = [slot.target_length for slot in self.slots]
        logits = self.target_cache.forward(list(range(rows)), torch.cat([last, chains.ids], dim=1), starts)
        adjusted = penalised(self.slots, logits, chains.ids, 0)
        if processing is None:
            num_accepted, next_tokens = verify_greedy(adjusted.argmax(-1), chains.ids, chains.lengths)
            overlaps = (torch.arange(width, device=device) < num_accepted[:, None]).float()
        else:
            assert chains.probs is not None
            target = processed_probs(adjusted, processing)
            accept, recover = uniforms(self.slots, device, width), uniforms(self.slots, device)
            num_accepted, next_tokens = verify_sampled(
                target, chains.probs, chains.ids, chains.lengths, accept, recover
            )
            overlaps = torch.minimum(target[:, :-1], chains.probs).sum(-1)
        found = read(chains.ids, chains.lengths, chains.confidences, num_accepted, next_tokens, overlaps)
        return _Outcome(logits, *(values.tolist() for values in found))

    def _emit(self, chains: Chains, outcome: _Outcome, verify_seconds: float) -> None:
        batch_size = len(self.slots)
        for row, slot in enumerate(self.slots):
            length, accepted = outcome.lengths[row], outcome.num_accepted[row]
            before = len(slot.tokens)
            kept = slot.accept([*outcome.chains[row][:accepted], outcome.next_tokens[row]], self._eos)
            slot.target_length = before + accepted
            match = chains.matches[row]
            drafter = "ngram" if match.chain else "model" if length else ""
            if drafter == "model":
                slot.draft_length = min(before + length - 1, before + accepted)
            memory = self.proposer.memories[slot.request.domain]
            if chains.fair[row] and length:
                memory.survival.add(length, accepted)
            if match.chain:
                memory.acceptance.add(match.match_length, accepted, min(accepted + 1, length))
            if slot.suffixes is not None:
                slot.suffixes.extend(slot.tokens[before:])
            slot.num_steps += 1
            slot.num_draft_tokens += length
            slot.num_accepted += accepted
            if self.release.version not in slot.releases:
                slot.releases.append(self.release.version)
            if self._keeps_trace(slot):
                slot.keep_targets(*sparse_log_probs(outcome.logits[row, :kept], self.listeners.trace_top_k))
            slot.send(slot.tokens[before:])
            self.listeners.on_step(
                Step(
                    request_id=slot.request.request_id,
                    domain=slot.request.domain,
                    release=self.release.version,
                    step_index=slot.num_steps - 1,
                    drafter=drafter,
                    chain_length=length,
                    num_accepted=accepted,
                    num_emitted=kept,
                    explored=chains.explored[row],
                    draft_seconds=chains.seconds,
                    verify_seconds=verify_seconds,
                    batch_size=batch_size,
                    positions=tuple(
                        Position(outcome.confidences[row][index], outcome.overlaps[row][index], index < accepted)
                        for index in range(min(accepted + 1, length))
                    ),
                    at=datetime.now(UTC),
                )
            )

    def _keeps_trace(self, slot: Slot) -> bool:
        listeners = self.listeners
        if not listeners.trace_top_k or not slot.request.params.record:
            return False
        share = random.Random(slot.request.request_id).random()
        return share < listeners.trace_share

    def _leave(self, row: int) -> None:
        slot = self.slots[row]
        self.listeners.on_finish(slot.finished())
        whole = slot.finish_reason in ("stop", "length")
        trace = slot.trace() if whole else None
        if trace is not None:
            self.listeners.on_trace(trace)
        if whole and slot.suffixes is not None and slot.request.params.record:
            self.proposer.memories[slot.request.domain].store.add(slot.tokens[slot.prompt_tokens :])
        moved = self.slots.pop()
        hole = len(self.slots)
        if row < hole:
            self._move(moved, hole, row)
            self.slots[row] = moved
        if self.filling:
            moved = self.filling.pop()
            self._move(moved, hole + 1 + len(self.filling), hole)
            self.filling.insert(0, moved)

    def _end_filling(self, index: int, reason: str, message: str | None = None) -> None:
        slot = self.filling[index]
        slot.finish_reason = reason
        slot.emit(Delta("", [], reason, slot.usage(), error=message))
        self.listeners.on_finish(slot.finished())
        moved = self.filling.pop()
        if index < len(self.filling):
            first = len(self.slots)
            self._move(moved, first + len(self.filling), first + index)
            self.filling[index] = moved

    def _move(self, slot: Slot, source: int, destination: int) -> None:
        self.target_cache.move(source, destination, slot.target_length)
        self.draft_cache.move(source, destination, slot.draft_length)
