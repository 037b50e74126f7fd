"""The state of one request while it decodes."""

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch

from adaptive_spec.core import FinishedRequest, Release, Request, Trace
from adaptive_spec.decoding.text import TextStream
from adaptive_spec.drafting.ngram import SuffixIndex
from adaptive_spec.errors import AdaptiveSpecError
from adaptive_spec.verification.transfer import read

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, on its last delta."""

    prompt_tokens: int
    completion_tokens: int
    num_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    releases: tuple[int, ...]
    cached: bool = False  # the answer of an earlier request; nothing was decoded
    num_divergent_tokens: int = 0  # that exact verification would have refused


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """An emitted token's log-prob, and the most probable tokens of its position with theirs, best first."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a stream.  The last one has the usage and a finish reason (stop | length | cancelled | deadline |
    error); ``error`` says why the answer is not whole.  ``log_probs``: one per token, empty unless asked for."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    usage: Usage | None = None
    error: AdaptiveSpecError | None = None
    log_probs: tuple[TokenLogProb, ...] = ()
    index: int = 0  # which of the request's choices


@dataclass(slots=True)
class Slot:
    """One row: its tokens, how much of them each cache holds, and what it has shown so far.

    The last token of ``tokens`` is never in the target's cache: the next step feeds it.
    """

    request: Request
    tokens: list[int]
    text: TextStream
    emit: Callable[[Delta], None]
    random: random.Random
    submitted: float
    started_at: datetime
    release: Release = field(default_factory=Release)  # that drafts for it from now on
    drafter: str = "model"
    adapter: str = ""  # the domain whose own adapter drafts, where it has one
    suffixes: SuffixIndex | None = None  # of the tokens, where n-gram chains are wanted
    target_length: int = 0
    draft_length: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_divergent: int = 0
    releases: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    first_token: float | None = None
    decode_started: float = 0.0
    targets: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def deadline(self) -> float:
        return deadline_of(self.request, self.submitted)

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def tokens_left(self) -> int:
        return self.request.params.max_tokens - self.num_emitted

    def accept(self, new_tokens: list[int], eos: frozenset[int]) -> int:
        """Append emitted tokens until one of them ends the request; return how many were kept."""
        params = self.request.params
        for kept, token in enumerate(new_tokens, start=1):
            self.tokens.append(token)
            if token in eos and not params.ignore_eos:
                self.finish_reason = "stop"
                return kept
            self.text.push(token)
            if self.text.stopped:
                self.finish_reason = "stop"
                return kept
            if self.tokens_left <= 0:
                self.finish_reason = "length"
                return kept
        return len(new_tokens)

    def send(self, kept: list[int], log_probs: tuple[TokenLogProb, ...] = ()) -> None:
        """Stream what this step added; with the finish reason and usage when it was the last."""
        if self.first_token is None and kept:
            self.first_token = time.perf_counter()
        final = self.finish_reason is not None
        usage = self.usage() if final else None
        self.emit(Delta(self.text.take(final=final), kept, self.finish_reason, usage, log_probs=log_probs))

    def end(self, reason: str, error: AdaptiveSpecError | None = None) -> None:
        """Stream the last delta of a request that ends between two steps, with the text that was held back."""
        self.finish_reason = reason
        try:
            rest = self.text.take(final=True)
        except Exception:
            its = self.request.request_id
            logger.exception("the last text of request %s is lost", its, extra={"completion_id": its})
            rest = ""
        self.emit(Delta(rest, [], reason, self.usage(), error))

    def usage(self) -> Usage:
        return Usage(
            self.prompt_tokens,
            self.num_emitted,
            self.num_steps,
            self.num_draft_tokens,
            self.num_accepted,
            tuple(self.releases),
            num_divergent_tokens=self.num_divergent,
        )

    @property
    def policy(self) -> str:
        """Who chooses the lengths of its chains, as recorded."""
        return _policy(self.request)

    def finished(self) -> FinishedRequest:
        """The row of the requests table."""
        now = time.perf_counter()
        return FinishedRequest(
            request_id=self.request.request_id,
            domain=self.request.domain,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.num_emitted,
            num_steps=self.num_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted,
            finish_reason=self.finish_reason or "error",
            releases=tuple(self.releases),
            started_at=self.started_at,
            finished_at=datetime.now(UTC),
            time_to_first_token_seconds=(self.first_token or now) - self.submitted,
            decode_seconds=now - self.decode_started,
            policy=self.policy,
            queue_seconds=self.decode_started - self.submitted,
            traceparent=self.request.traceparent,
        )

    def keep_targets(self, top_ids: torch.Tensor, top_log_probs: torch.Tensor, tail_mass: torch.Tensor) -> None:
        """Remember the target's distribution of the tokens just kept: [kept, top_k], [kept, top_k], [kept].

        They stay on the device until the request ends: a step reads back its outcome and nothing else.
        """
        self.targets.append((top_ids.to(torch.int32), top_log_probs, tail_mass))

    def trace(self) -> Trace | None:
        """The trace, when targets were kept."""
        if not self.targets:
            return None
        top_ids, top_log_probs, tail_mass = read(*(torch.cat(parts) for parts in zip(*self.targets, strict=True)))
        return Trace(
            request_id=self.request.request_id,
            domain=self.request.domain,
            tokens=tuple(self.tokens),
            prompt_tokens=self.prompt_tokens,
            top_ids=top_ids,
            top_log_probs=top_log_probs,
            tail_mass=tail_mass,
            release=self.releases[-1] if self.releases else 0,
            at=datetime.now(UTC),
        )


def undecoded(
    request: Request, reason: str, submitted: float, *, completion_tokens: int = 0, release: int | None = None
) -> FinishedRequest:
    """The row of the requests table of a request that took no slot: it ended while it waited, or its answer was there.

    Args:
        release: the live one, of an answer out of the cache.
    """
    now, waited = datetime.now(UTC), time.perf_counter() - submitted
    return FinishedRequest(
        request_id=request.request_id,
        domain=request.domain,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=completion_tokens,
        num_steps=0,
        num_draft_tokens=0,
        num_accepted_draft_tokens=0,
        finish_reason=reason,
        releases=() if release is None else (release,),
        started_at=now,
        finished_at=now,
        time_to_first_token_seconds=waited,
        decode_seconds=0.0,
        policy=_policy(request) if release is None else "cache",
        queue_seconds=waited,
        traceparent=request.traceparent,
    )


def deadline_of(request: Request, submitted: float) -> float:
    """When a request's time is up, on the clock of ``submitted``."""
    seconds = request.params.deadline_seconds
    return math.inf if seconds is None else submitted + seconds


def _policy(request: Request) -> str:
    fixed = request.params.chain_length
    return "policy" if fixed is None else "fixed" if fixed else "off"
