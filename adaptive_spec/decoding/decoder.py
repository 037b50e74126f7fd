"""The step loop: draft a chain, verify it in one target forward, emit.  Called by the engine thread only.

Reads like this: ``admit`` gives a request a row, ``fill`` brings prompts into the cache chunk by chunk, ``step`` runs
``_draft``, ``_verify`` and ``_emit`` over all live rows at once.  Rows 0 … are live, those after them are filling.  It
calls ``on_step``, ``on_finish`` and ``on_trace`` and never learns who listens.
"""

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from adaptive_spec.core import DRAFTERS, Position, Release, Request, Step, StepCost
from adaptive_spec.decoding.cache import RaggedCache
from adaptive_spec.decoding.failures import failure
from adaptive_spec.decoding.listeners import GuardedListeners, Listeners
from adaptive_spec.decoding.slot import Delta, Slot, TokenLogProb
from adaptive_spec.decoding.text import TextStream
from adaptive_spec.drafting.ngram import NOTHING, DomainMemory, Match, SuffixIndex
from adaptive_spec.drafting.policy import ChainBudget, best_length, chain_budget
from adaptive_spec.errors import AdaptiveSpecError, BusyError, RequestError
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.settings import DecoderSettings
from adaptive_spec.verification.distribution import (
    log_probs_of,
    penalised_logits,
    processed_probs,
    sample,
    sparse_log_probs,
)
from adaptive_spec.verification.exact import verify_greedy, verify_sampled

logger = logging.getLogger(__name__)

_MOST_LOGPROBS = 20  # as many as OpenAI's API gives
_MOST_CHOICES = 8
_MOST_DOMAINS = 64  # whose past outputs are remembered; the domain least recently served makes room
_COST_CONTEXT_TOKENS = 160  # where costs are measured: a short prompt and some output


@dataclass(slots=True)
class _Chains:
    """What one draft phase produced, for all rows.

    probs is None when every row is greedy: then the chain alone decides.
    """

    ids: Tensor  # [rows, chain]
    lengths: list[int]
    confidences: list[list[float]]
    probs: Tensor | None  # [rows, chain, vocab]
    explored: list[bool]
    matches: list[Match]  # of n-gram chains; NOTHING where the model drafted
    seconds: float

    def drafter(self, row: int) -> str:
        return "ngram" if self.matches[row].chain else "model" if self.lengths[row] else ""


@dataclass(slots=True)
class _Verdict:
    """What one verification said.  logits: [rows, chain + 1, vocab], as the target gave them and after penalties."""

    logits: Tensor
    penalised: Tensor
    num_accepted: list[int]
    next_tokens: list[int]


class Decoder:
    """Owns both models' caches and their rows."""

    def __init__(self, pair: ModelPair, settings: DecoderSettings, listeners: Listeners, seed: int = 0) -> None:
        self.pair = pair
        self.settings = settings
        self.listeners = GuardedListeners(listeners)
        self.release = Release()
        self.cost: StepCost | None = None  # once measured, n-gram chains are as long as pays
        self.slots: list[Slot] = []  # live: the whole prompt is in the cache
        self.filling: list[Slot] = []
        self._random = random.Random(seed)
        self._memories: OrderedDict[str, DomainMemory] = OrderedDict()
        self._eos = frozenset(pair.eos_token_ids)
        capacity = settings.max_context_tokens + settings.max_chain_length + 1
        self.target_cache = RaggedCache(pair.target, settings.slots, capacity)
        self.draft_cache = RaggedCache(pair.draft, settings.slots, capacity)

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
        if not 1 <= params.n <= _MOST_CHOICES:
            raise RequestError(f"n must lie in [1, {_MOST_CHOICES}]; send several requests for more.")
        if params.logprobs is not None and not 0 <= params.logprobs <= min(_MOST_LOGPROBS, self.pair.vocab_size):
            raise RequestError(f"logprobs must lie in [0, {_MOST_LOGPROBS}] or be left out.")
        if params.deadline_seconds is not None and not params.deadline_seconds > 0:
            raise RequestError("deadline_seconds must be greater than 0, or left out for none.")

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
        )
        if slot.drafter != "model":
            slot.suffixes = SuffixIndex(self.settings.ngram_min_match, self._longest_match)
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
            self._prefill(self.target_cache, row, slot.tokens, slot.target_length, stop)
            budget -= stop - slot.target_length
            slot.target_length = stop
            if stop == len(slot.tokens) - 1:
                self.slots.append(self.filling.pop(0))

    def _prefill(self, cache: RaggedCache, row: int, tokens: list[int], start: int, stop: int) -> None:
        chunk = self.settings.prefill_chunk_tokens
        for begin in range(start, stop, chunk):
            ids = torch.tensor([tokens[begin : min(begin + chunk, stop)]], device=self.pair.device)
            last = torch.tensor([ids.shape[1] - 1], device=self.pair.device)
            cache.forward([row], ids, torch.tensor([begin], device=self.pair.device), last=last)

    @torch.inference_mode()
    def step(self) -> None:
        """Run one step for every live row."""
        chains = self._draft()
        began = time.perf_counter()
        verdict = self._verify(chains)
        self._emit(chains, verdict, time.perf_counter() - began)
        for row in reversed([row for row, slot in enumerate(self.slots) if slot.finish_reason]):
            self._leave(row)

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

    def draft_changed(self) -> None:
        """Forget the draft's cache: it was computed by other weights.  Rows rebuild theirs when they next draft."""
        for slot in self.slots:
            slot.draft_length = 0

    @torch.inference_mode()
    def time_draft(self) -> float:
        """Seconds of one draft forward of one token at the far end of a free row.  Between steps only."""
        return self._timed(self.draft_cache, 1)

    @torch.inference_mode()
    def time_verify(self, chain_length: int) -> float:
        """Seconds of one target forward over ``chain_length`` + 1 tokens.  Between steps only."""
        return self._timed(self.target_cache, chain_length + 1)

    def _timed(self, cache: RaggedCache, num_tokens: int) -> float:
        if not self.has_room:
            raise BusyError("Every slot is taken; measure costs while one is free.")
        ids = torch.zeros(1, num_tokens, dtype=torch.long, device=self.pair.device)
        start = min(_COST_CONTEXT_TOKENS, self.settings.max_context_tokens - num_tokens)
        began = time.perf_counter()
        logits = cache.forward([self.settings.slots - 1], ids, torch.tensor([start], device=self.pair.device))
        logits.argmax(-1).tolist()  # waits for the device
        return time.perf_counter() - began

    def _budgets(self) -> tuple[list[ChainBudget], list[bool]]:
        # One draw for all rows: a step costs what its longest chain costs, so exploring rows share a step.
        explores = self._random.random() < self.settings.explore_share
        explored = [explores and slot.request.params.chain_length is None for slot in self.slots]
        budgets = [
            chain_budget(
                self.release.for_domain(slot.request.domain),
                fixed=slot.request.params.chain_length,
                explore=explore,
                maximum=self.settings.max_chain_length,
                tokens_left=slot.tokens_left,
            )
            for slot, explore in zip(self.slots, explored, strict=True)
        ]
        return budgets, explored

    def _draft(self) -> _Chains:
        began = time.perf_counter()
        budgets, explored = self._budgets()
        matches = self._matches(budgets, explored)
        count = len(self.slots)
        width = max(len(match.chain) or budget.limit for match, budget in zip(matches, budgets, strict=True))
        greedy = all(slot.request.params.temperature <= 0 for slot in self.slots)
        ids = torch.zeros(count, width, dtype=torch.long, device=self.pair.device)
        probs = None if greedy else torch.zeros(count, width, self.pair.vocab_size, device=self.pair.device)
        confidences: list[list[float]] = [[] for _ in self.slots]
        for row, match in enumerate(matches):
            if not match.chain:
                continue
            length = len(match.chain)
            ids[row, :length] = torch.tensor(match.chain, device=ids.device)
            if probs is not None:
                probs[row, torch.arange(length), ids[row, :length]] = 1.0
            rate = self._memory(self.slots[row].request.domain).acceptance.rate(match.match_length)
            confidences[row] = [rate] * length
        for position in range(width):
            rows = [row for row, budget in enumerate(budgets) if budget.wants_more]
            if not rows:
                break
            logits = self._draft_logits(rows, ids, position)
            tops = logits.float().softmax(-1).amax(-1).tolist()
            logits = self._penalised(rows, logits[:, None], ids[rows, :position], position)[:, 0]
            if probs is None:
                drawn = logits.argmax(-1)
            else:
                probs[rows, position] = self._processed(rows, logits[:, None])[:, 0]
                drawn = sample(probs[rows, position], self._uniforms(rows))
            ids[rows, position] = drawn
            for row, top in zip(rows, tops, strict=True):
                budgets[row].drew(top)
                confidences[row].append(top)
        lengths = [len(match.chain) or budget.drawn for match, budget in zip(matches, budgets, strict=True)]
        width = max(lengths)
        return _Chains(
            ids[:, :width],
            lengths,
            confidences,
            None if probs is None else probs[:, :width],
            explored,
            matches,
            time.perf_counter() - began,
        )

    def _matches(self, budgets: list[ChainBudget], explored: list[bool]) -> list[Match]:
        """The n-gram chain of each row, NOTHING where the model is to draft; budgets of the others become 0."""
        matches = [NOTHING] * len(self.slots)
        for row, slot in enumerate(self.slots):
            if slot.suffixes is None:
                continue
            memory = self._memory(slot.request.domain)
            match = memory.propose(slot.suffixes, self._room(slot))
            if slot.drafter == "combined" and match.match_length < self.settings.ngram_trusted_match:
                continue
            budgets[row].limit = 0
            rate = memory.acceptance.rate(match.match_length)
            free = slot.request.params.chain_length is None and not explored[row]
            length = best_length([rate] * len(match.chain), self.cost) if free else len(match.chain)
            matches[row] = Match(match.chain[:length], match.match_length)
        return matches

    def _room(self, slot: Slot) -> int:
        """The longest chain that a step of this row may propose."""
        fixed = slot.request.params.chain_length
        longest = self.settings.max_chain_length if fixed is None else fixed
        return max(0, min(longest, slot.tokens_left - 1))

    def _memory(self, domain: str) -> DomainMemory:
        if domain not in self._memories:
            settings = self.settings
            memory = DomainMemory(settings.ngram_min_match, self._longest_match, settings.ngram_store_tokens)
            self._memories[domain] = memory
            if len(self._memories) > _MOST_DOMAINS:
                self._memories.popitem(last=False)
        self._memories.move_to_end(domain)
        return self._memories[domain]

    @property
    def _longest_match(self) -> int:
        return max(self.settings.ngram_min_match, self.settings.ngram_max_match)

    def _draft_logits(self, rows: list[int], ids: Tensor, position: int) -> Tensor:
        """Logits [rows, vocab] of the next draft token; feeds whatever the draft has not seen yet."""
        if position:
            fed = ids[rows, position - 1 : position]
            starts = torch.tensor([len(self.slots[row].tokens) + position - 1 for row in rows], device=self.pair.device)
            last = torch.zeros(len(rows), dtype=torch.long, device=self.pair.device)
            return self.draft_cache.forward(rows, fed, starts, last=last)
        for row in rows:
            slot = self.slots[row]
            if len(slot.tokens) - slot.draft_length > self.settings.max_chain_length + 1:
                self._prefill(self.draft_cache, row, slot.tokens, slot.draft_length, len(slot.tokens) - 1)
                slot.draft_length = len(slot.tokens) - 1
        pending = [self.slots[row].tokens[self.slots[row].draft_length :] for row in rows]
        padded, lengths = _padded(pending, self.pair.device)
        starts = torch.tensor([self.slots[row].draft_length for row in rows], device=self.pair.device)
        return self.draft_cache.forward(rows, padded, starts, last=lengths - 1)

    def _verify(self, chains: _Chains) -> _Verdict:
        """One target forward over last token and chain, and what the verifier makes of it."""
        rows = list(range(len(self.slots)))
        device = self.pair.device
        last = torch.tensor([[slot.tokens[-1]] for slot in self.slots], device=device)
        starts = torch.tensor([slot.target_length for slot in self.slots], device=device)
        logits = self.target_cache.forward(rows, torch.cat([last, chains.ids], dim=1), starts)
        penalised = self._penalised(rows, logits, chains.ids, 0)
        lengths = torch.tensor(chains.lengths, device=device)
        if chains.probs is None:
            num_accepted, next_tokens = verify_greedy(penalised.argmax(-1), chains.ids, lengths)
        else:
            width = chains.ids.shape[1]
            accept = torch.tensor(
                [[slot.random.random() for _ in range(width)] for slot in self.slots], device=device
            ).view(len(rows), width)
            num_accepted, next_tokens = verify_sampled(
                self._processed(rows, penalised), chains.probs, chains.ids, lengths, accept, self._uniforms(rows)
            )
        return _Verdict(logits, penalised, num_accepted.tolist(), next_tokens.tolist())

    def _emit(self, chains: _Chains, verdict: _Verdict, verify_seconds: float) -> None:
        chain_ids = chains.ids.tolist()
        for row, slot in enumerate(self.slots):
            emitted = [*chain_ids[row][: verdict.num_accepted[row]], verdict.next_tokens[row]]
            try:
                self._emit_row(row, emitted, chains, verdict, verify_seconds)
            except Exception as error:
                logger.exception("request %s is ended with an error; the others go on", slot.request.request_id)
                slot.end("error", failure(error))

    def _emit_row(
        self, row: int, emitted: list[int], chains: _Chains, verdict: _Verdict, verify_seconds: float
    ) -> None:
        slot = self.slots[row]
        length, accepted = chains.lengths[row], verdict.num_accepted[row]
        before = len(slot.tokens)
        kept = slot.accept(emitted, self._eos)
        slot.target_length = before + accepted
        drafter = chains.drafter(row)
        if drafter == "model":
            slot.draft_length = min(before + length - 1, before + accepted)
        if drafter == "ngram":
            reached = min(accepted + 1, length)
            memory = self._memory(slot.request.domain)
            memory.acceptance.add(chains.matches[row].match_length, accepted, reached)
        if slot.suffixes is not None:
            slot.suffixes.extend(slot.tokens[before:])
        slot.num_steps += 1
        slot.num_draft_tokens += length
        slot.num_accepted += accepted
        if self.release.version not in slot.releases:
            slot.releases.append(self.release.version)
        if self._keeps_trace(slot):
            slot.keep_targets(*sparse_log_probs(verdict.logits[row, :kept], self.listeners.trace_top_k))
        step = Step(
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
            batch_size=len(self.slots),
            positions=self._positions(chains, verdict.penalised, row, accepted),
            at=datetime.now(UTC),
        )
        slot.send(slot.tokens[before:], self._log_probs(slot, verdict.logits[row, :kept]))
        self.listeners.on_step(step)

    def _log_probs(self, slot: Slot, logits: Tensor) -> tuple[TokenLogProb, ...]:
        """Those of the tokens just kept, where they were asked for.  logits: [kept, vocab], as the target gave them."""
        if slot.request.params.logprobs is None:
            return ()
        kept = slot.tokens[-len(logits) :]
        tokens = torch.tensor(kept, device=logits.device)
        log_probs, ids, of_ids = (
            found.tolist() for found in log_probs_of(logits, tokens, slot.request.params.logprobs)
        )
        return tuple(
            TokenLogProb(token, log_prob, tuple(zip(top, of_top, strict=True)))
            for token, log_prob, top, of_top in zip(kept, log_probs, ids, of_ids, strict=True)
        )

    def _positions(self, chains: _Chains, logits: Tensor, row: int, accepted: int) -> tuple[Position, ...]:
        reached = min(accepted + 1, chains.lengths[row])
        if not reached:
            return ()
        if chains.probs is None:
            overlaps = [float(index < accepted) for index in range(reached)]
        else:
            target = self._processed([row], logits[row : row + 1, :reached])[0]
            overlaps = torch.minimum(target, chains.probs[row, :reached]).sum(-1).tolist()
        return tuple(
            Position(chains.confidences[row][index], overlaps[index], index < accepted) for index in range(reached)
        )

    def _keeps_trace(self, slot: Slot) -> bool:
        listeners = self.listeners
        if not listeners.trace_top_k or not slot.request.params.record:
            return False
        share = random.Random(slot.request.request_id).random()
        return share < listeners.trace_share

    def _leave(self, row: int) -> None:
        self._report(self.slots[row])
        moved = self.slots.pop()
        hole = len(self.slots)
        if row < hole:
            self._move(moved, hole, row)
            self.slots[row] = moved
        if self.filling:
            moved = self.filling.pop()
            self._move(moved, hole + 1 + len(self.filling), hole)
            self.filling.insert(0, moved)

    def _report(self, slot: Slot) -> None:
        """Tell of a request that has left, and remember what it said.  Its answer is out: what fails here is lost."""
        self.listeners.on_finish(slot.finished())
        if slot.finish_reason not in ("stop", "length"):
            return
        try:
            if (trace := slot.trace()) is not None:
                self.listeners.on_trace(trace)
            if slot.suffixes is not None and slot.request.params.record:
                self._memory(slot.request.domain).store.add(slot.tokens[slot.prompt_tokens :])
        except Exception:
            logger.exception("request %s leaves no trace", slot.request.request_id)

    def _end_filling(self, index: int, reason: str, error: AdaptiveSpecError | None = None) -> None:
        slot = self.filling[index]
        slot.end(reason, error)
        self.listeners.on_finish(slot.finished())
        moved = self.filling.pop()
        if index < len(self.filling):
            first = len(self.slots)
            self._move(moved, first + len(self.filling), first + index)
            self.filling[index] = moved

    def _move(self, slot: Slot, source: int, destination: int) -> None:
        self.target_cache.move(source, destination, slot.target_length)
        self.draft_cache.move(source, destination, slot.draft_length)

    def _penalised(self, rows: list[int], logits: Tensor, chain: Tensor, first: int) -> Tensor:
        """Apply each row's penalties.  logits: [rows, positions, vocab], of chain positions ``first`` …; chain:
        [rows, …], the tokens drafted before them."""
        concerned = [index for index, row in enumerate(rows) if self.slots[row].request.params.penalises]
        if not concerned:
            return logits
        logits = logits.clone()
        for index in concerned:
            slot, drafted = self.slots[rows[index]], chain[index].tolist()
            params = slot.request.params
            prompt, output = slot.tokens[: slot.prompt_tokens], slot.tokens[slot.prompt_tokens :]
            for position in range(logits.shape[1]):
                logits[index, position] = penalised_logits(
                    logits[index, position],
                    prompt,
                    output + drafted[: first + position],
                    params.repetition_penalty,
                    params.presence_penalty,
                    params.frequency_penalty,
                )
        return logits

    def _processed(self, rows: list[int], logits: Tensor) -> Tensor:
        params = [self.slots[row].request.params for row in rows]
        device = logits.device
        return processed_probs(
            logits,
            torch.tensor([p.temperature for p in params], device=device),
            torch.tensor([p.top_k for p in params], device=device),
            torch.tensor([p.top_p for p in params], device=device),
            torch.tensor([p.min_p for p in params], device=device),
        )

    def _uniforms(self, rows: list[int]) -> Tensor:
        return torch.tensor([self.slots[row].random.random() for row in rows], device=self.pair.device)


def _padded(rows: list[list[int]], device: Any) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    return ids, torch.tensor([len(row) for row in rows], device=device)
