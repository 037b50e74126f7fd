"""One pass of exact decoding that keeps, at every chain position, all that any verifier would ask.

The target's logits are there at every position of a chain, also past the one where exact verification stops, and there
they follow the drafted tokens, as they would had a relaxed rule kept them.  Greedy only.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptive_spec.core import SIMILARITIES, Release, Request, SamplingParams
from adaptive_spec.decoding.decoder import Decoder
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.decoding.propose import Chains
from adaptive_spec.decoding.rules import Relaxation
from adaptive_spec.decoding.sampling import Sampling
from adaptive_spec.decoding.slot import Delta
from adaptive_spec.decoding.verdict import Verdict
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import DecoderSettings
from adaptive_spec.verification.divergence import given_up_nats
from adaptive_spec.verification.exact import accepts_greedy
from adaptive_spec.verification.similarity import similarity

Prompts = Mapping[str, Sequence[tuple[int, ...]]]  # domain -> prompt ids


@dataclass(frozen=True, slots=True)
class Recording:
    """The chains of one domain, all of the same length.

    chain, target_tokens: [chains, length] int64, what was drafted and the target's own token there.
    lengths: [chains] int64, tokens up to the first that ends the answer, itself included.
    strict: [chains, length] bool, exact verification's verdict on each position, the tokens before taken as given.
    similarity: by measure, [chains, length] float32 in [0, 1].
    token_probs, best_probs: [chains, length] float32, the target's, of the drafted token and of its best one.
    num_better: [chains, length] int64, tokens that the target finds more probable than the drafted one.
    entropy_nats, given_up_nats: [chains, length] float32, of the target; its best log-prob less the drafted token's.
    """

    chain: NDArray[Any]
    target_tokens: NDArray[Any]
    lengths: NDArray[Any]
    strict: NDArray[Any]
    similarity: Mapping[str, NDArray[Any]]
    token_probs: NDArray[Any]
    best_probs: NDArray[Any]
    num_better: NDArray[Any]
    entropy_nats: NDArray[Any]
    given_up_nats: NDArray[Any]

    def __len__(self) -> int:
        return len(self.chain)

    @property
    def chain_length(self) -> int:
        return int(self.chain.shape[1])

    @property
    def total_variation(self) -> NDArray[Any]:
        """Between target and draft: [chains, length]"""
        return 1 - self.similarity["tv"]


def observe(chain: Tensor, target_logits: Tensor, draft_log_probs: Tensor, ends: Sequence[int] = ()) -> Recording:
    """Measure chains at every position.

    Args:
        chain: [chains, length].
        target_logits: [chains, length + 1, vocab], after the token before the chain and after each of it.
        draft_log_probs: [chains, length, vocab] float32, what relaxed rules compare with the target's.
        ends: tokens that end an answer.
    """
    own = target_logits.argmax(-1)
    log_probs = target_logits[:, :-1].float().log_softmax(-1)
    of_token = log_probs.gather(-1, chain[..., None])
    entropy = -log_probs.exp().mul(log_probs).nan_to_num_(0.0).sum(-1)
    is_end = torch.isin(chain, torch.tensor(list(ends), dtype=chain.dtype, device=chain.device)).long()
    found = {
        "chain": chain,
        "target_tokens": own[:, :-1],
        "lengths": (is_end.cumsum(-1) - is_end == 0).sum(-1),
        "strict": accepts_greedy(own, chain),
        "token_probs": of_token.squeeze(-1).exp(),
        "best_probs": log_probs.amax(-1).exp(),
        "num_better": (log_probs > of_token).sum(-1),
        "entropy_nats": entropy,
        "given_up_nats": given_up_nats(target_logits[:, :-1], chain),
    }
    alike = {name: similarity(log_probs, draft_log_probs, name).cpu().numpy() for name in SIMILARITIES}
    return Recording(similarity=alike, **{name: value.cpu().numpy() for name, value in found.items()})


def joined(parts: Sequence[Recording]) -> Recording:
    """The chains of several recordings in one."""
    names = [column.name for column in fields(Recording) if column.name != "similarity"]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    alike = {name: np.concatenate([part.similarity[name] for part in parts]) for name in parts[0].similarity}
    return Recording(similarity=alike, **columns)


class RecordingDecoder(Decoder):
    """A decoder that measures every chain of full length before it judges it."""

    compares = True

    def __init__(self, pair: ModelPair, settings: DecoderSettings, release: Release) -> None:
        super().__init__(pair, settings, Listeners())
        self.swap(self.weights.prepare(LoadedRelease(release)))  # its weights are in the draft already
        self.parts: dict[str, list[Recording]] = {}

    def judge_step(
        self, logits: Tensor, chains: Chains, sampling: Sampling | None, relaxation: Relaxation | None
    ) -> Verdict:
        """Measure, then verify."""
        assert sampling is None and chains.log_probs is not None
        by_domain: dict[str, list[int]] = {}
        for row, length in enumerate(chains.lengths.tolist()):
            if length == self.settings.max_chain_length:  # near an answer's end chains are cut short
                by_domain.setdefault(self.slots[row].request.domain, []).append(row)
        for domain, rows in by_domain.items():
            seen = observe(chains.ids[rows], logits[rows], chains.log_probs[rows], self.pair.eos_token_ids)
            self.parts.setdefault(domain, []).append(seen)
        return super().judge_step(logits, chains, sampling, relaxation)


@dataclass(slots=True)
class Pass:
    """What the pass gave: the recording of each domain."""

    recordings: dict[str, Recording] = field(default_factory=dict)
    num_tokens: int = 0
    seconds: float = 0.0


def record(
    pair: ModelPair,
    settings: DecoderSettings,
    release: Release,
    prompts: Prompts,
    max_tokens: int,
    chain_length: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Pass:
    """Decode all prompts greedily with exact verification and chains of fixed length from the draft model.

    Args:
        settings: of the decoder; ``slots`` is the batch.
        max_tokens: about so many of each answer are covered by chains.
    """
    longest = max(len(ids) for rows in prompts.values() for ids in rows) + max_tokens + chain_length
    changes = {"max_chain_length": chain_length, "max_context_tokens": max(64, longest), "drafter": "model"}
    decoder = RecordingDecoder(pair, DecoderSettings(**{**settings.model_dump(), **changes}), release)
    params = SamplingParams(max_tokens=max_tokens + chain_length, chain_length=chain_length, drafter="model")
    waiting = [
        Request(f"record-{domain}-{row}", tuple(ids), params, domain)
        for domain, rows in prompts.items()
        for row, ids in enumerate(rows)
    ]
    made, total, began = Pass(), len(waiting), time.perf_counter()
    errors: list[Exception] = []

    def emit(delta: Delta) -> None:
        made.num_tokens += len(delta.token_ids)
        if delta.error is not None:
            errors.append(delta.error)

    while waiting or decoder.num_active:
        while waiting and decoder.has_room:
            decoder.admit(waiting.pop(0), emit, time.perf_counter())
        while decoder.filling:
            decoder.fill(decoder.settings.prefill_chunk_tokens)
        if decoder.slots:
            decoder.step()
        if errors:
            raise errors[0]
        left = len(waiting) + decoder.num_active
        tell(f"{total - left} of {total} prompts, {made.num_tokens} tokens")
    made.seconds = time.perf_counter() - began
    made.recordings = {domain: joined(decoder.parts[domain]) for domain in prompts if domain in decoder.parts}
    return made
