"""``adaptive-spec bench-verifiers``: what deciding costs beside the forward that it judges.

A step is a draft, one target forward over batch x (chain + 1) tokens, and the verify decision: ``walk`` on the logits,
to the last number that the host needs.  Forward and decisions take turns in one run, and the decision's share is that
of forward plus decision: the draft's time is left out, which makes it stricter.

Chains are what a draft that agrees with the target at about half of the positions proposes, because what is looked at
depends on what is kept.  Cases named "all kept" are the costliest there are: nothing ends a chain early.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from adaptive_spec.bench.corpora import DOMAINS, prompts
from adaptive_spec.core import SIMILARITIES, Request, Rule, SamplingParams
from adaptive_spec.decoding.cache import RaggedCache
from adaptive_spec.decoding.propose import Chains
from adaptive_spec.decoding.rules import Relaxation
from adaptive_spec.decoding.sampling import sampling_of
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.decoding.text import TextStream
from adaptive_spec.decoding.walk import walk
from adaptive_spec.drafting.ngram import NOTHING
from adaptive_spec.models.linear import exchange_linears
from adaptive_spec.models.loading import load_pair
from adaptive_spec.settings import Settings
from adaptive_spec.verification.distribution import processed_probs, sample
from adaptive_spec.verification.transfer import on_device

VOCABS = (49_152, 151_936)  # of SmolLM2 and of Qwen2.5
RANDOM_TARGET = "random weights in the shape of Qwen2.5-0.5B"
_PROMPT_TOKENS = 160
_AGREEMENT = 0.5
_BEST_PROB = 0.5  # of a random target, by scaling its logits: about that of the quickstart target
_EVICTED_FLOATS = 1 << 24  # 64 MiB: a step's weights push everything else out of the caches

_EXACT = Rule()
_GREEDY, _SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
_NUCLEUS = SamplingParams(temperature=1.0, top_p=0.95)


@dataclass(frozen=True, slots=True)
class Case:
    """One verifier on one kind of request.  agrees: the draft is the target itself, so that exact keeps everything."""

    name: str
    params: SamplingParams = _GREEDY
    rule: Rule = _EXACT
    agrees: bool = False


CASES = (
    Case("exact greedy"),
    Case("exact greedy, all kept", agrees=True),
    Case("exact sampled", _SAMPLED),
    Case("exact sampled, all kept", _SAMPLED, agrees=True),
    Case("exact sampled, top-p .95", _NUCLEUS),
    Case("exact sampled, top-p .95, all kept", _NUCLEUS, agrees=True),
    Case("ngram", rule=Rule("ngram")),
    *[Case(f"logits {measure}", rule=Rule("logits", similarity=measure)) for measure in SIMILARITIES],
    *[
        Case(f"logits {measure}, all kept", rule=Rule("logits", similarity=measure, min_similarity=0.0))
        for measure in SIMILARITIES
    ],
    Case("logits tv, sampled, all kept", _SAMPLED, Rule("logits", min_similarity=0.0)),
    Case("hybrid, screen passes all", rule=Rule("hybrid", min_overlap=0.0)),
    Case("hybrid, screen passes none", rule=Rule("hybrid", min_overlap=1.0)),
    Case("typical", rule=Rule("typical")),
    Case("typical, all kept", rule=Rule("typical", typical_epsilon=0.0)),
    Case("topk_relaxed", rule=Rule("topk_relaxed")),
    Case("topk_relaxed, all kept", rule=Rule("topk_relaxed", relaxed_top_k=1 << 20, relaxed_delta=1.0)),
)


@dataclass(slots=True)
class Cost:
    """What one case took, round by round, beside the forwards of the same rounds."""

    case: Case
    num_kept: int = 0
    decision_seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)

    @property
    def shares(self) -> list[float]:
        """The decision's share of forward plus decision."""
        pairs = zip(self.decision_seconds, self.forward_seconds, strict=True)
        return [decision / (decision + forward) for decision, forward in pairs]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one target, their logits, and the draft's: [rows, chain + 1, vocab], [rows, chain, vocab] raw."""

    slots: list[Slot]
    logits: Tensor
    draft_logits: Tensor

    @property
    def width(self) -> int:
        return self.draft_logits.shape[1]


@dataclass(frozen=True, slots=True)
class Measured:
    """One vocabulary: on which target, and what its cases cost."""

    vocab: int
    target: str
    costs: list[Cost]


def measure_all(
    settings: Settings,
    vocabs: Sequence[int],
    chain_length: int,
    batch: int,
    rounds: int,
    tell: Callable[[str, str], None] = lambda title, text: None,
) -> list[Measured]:
    """Measure each vocabulary: on the configured target where it is its own, else on random weights."""
    torch.set_num_threads(settings.model.threads or torch.get_num_threads())
    tell("bench-verifiers", "loading the models")
    pair, found = load_pair(settings.model), []
    for vocab in vocabs:
        own = vocab == pair.vocab_size
        target = pair.target if own else random_target(vocab)
        texts = texts_of(pair.tokenizer if own else None, vocab, batch)
        costs = measure(target, texts, chain_length, rounds, tell=partial(tell, f"vocabulary {vocab:,}"))
        found.append(Measured(vocab, settings.model.target if own else RANDOM_TARGET, costs))
    return found


def random_target(vocab: int) -> PreTrainedModel:
    """Random weights in the shape of Qwen2.5-0.5B, float32."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


@torch.inference_mode()
def measure(
    target: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    chain_length: int,
    rounds: int,
    *,
    cases: Sequence[Case] = CASES,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Cost]:
    """Measure the cases in alternation.

    Args:
        texts: token ids of the rows' prompts.
        rounds: counted ones; one that warms up goes before.
    """
    exchange_linears(target)
    capacity = max(map(len, texts)) + chain_length + 1
    cache = RaggedCache(target, len(texts), capacity, max(256, chain_length + 1))
    slots = [_slot(row, ids) for row, ids in enumerate(texts)]
    for row, slot in enumerate(slots):
        tell(f"prompt {row + 1} of {len(slots)}")
        cache.prefill(row, slot.tokens, 0, len(slot.tokens) - 1, 256)
    forward = _greedy_chain(cache, slots, chain_length)
    logits = _realistic(forward())
    batch = Batch(slots, logits, _noisy(logits[:, :-1], seed))
    costs = [Cost(case) for case in cases]
    prepared = [_decision(batch, case, seed) for case in cases]
    evicted = torch.zeros(_EVICTED_FLOATS)
    for number in range(rounds + 1):
        began = perf_counter()
        forward()
        seconds = perf_counter() - began
        for place in range(len(cases)):
            index = (place + number) % len(cases)
            tell(f"round {number} of {rounds}: {cases[index].name}")
            decide = prepared[index]()
            evicted.add_(1)
            began = perf_counter()
            num_kept = decide()
            if number:
                costs[index].decision_seconds.append(perf_counter() - began)
                costs[index].forward_seconds.append(seconds)
                costs[index].num_kept = num_kept
    return costs


def texts_of(tokenizer: Any, vocab: int, batch: int, seed: int = 0) -> list[list[int]]:
    """Prompts of the packaged domains, or random tokens where there is no tokenizer."""
    if tokenizer is None:
        rng = random.Random(seed)
        return [[rng.randrange(vocab) for _ in range(_PROMPT_TOKENS)] for _ in range(batch)]
    texts = [prompts(domain)[row].text for row in range(batch) for domain in DOMAINS][:batch]
    return [tokenizer.encode(text)[-_PROMPT_TOKENS:] for text in texts]


def _slot(row: int, ids: Sequence[int]) -> Slot:
    return Slot(
        request=Request(f"row-{row}", tuple(ids), _GREEDY),
        tokens=list(ids),
        text=TextStream(None, ()),
        emit=lambda delta: None,
        random=random.Random(row),
        submitted=0.0,
        started_at=datetime.now(UTC),
    )


def _greedy_chain(cache: RaggedCache, slots: list[Slot], length: int) -> Callable[[], Tensor]:
    """The forward of a step in which the target reads its own greedy continuation."""
    rows, starts = list(range(len(slots))), [len(slot.tokens) - 1 for slot in slots]
    ids = on_device([[slot.tokens[-1]] for slot in slots], cache.model.device)
    for _ in range(length):
        following = cache.forward(rows, ids, starts)[:, -1:].argmax(-1)
        ids = torch.cat([ids, following], dim=1)
    return lambda: cache.forward(rows, ids, starts)


def _realistic(logits: Tensor) -> Tensor:
    """Random weights give flat distributions: their logits are scaled until the best token is as probable as usual."""
    if float(logits.softmax(-1).amax(-1).mean()) > _BEST_PROB / 10:
        return logits
    scale = _bisect(lambda scale: float((logits * scale).softmax(-1).amax(-1).mean()) < _BEST_PROB, 1.0, 100.0)
    return logits * scale


def _noisy(logits: Tensor, seed: int) -> Tensor:
    """The draft's: the target's with noise, by which its best token moves at half of the positions.

    Then a coin decides where it agrees: values are exchanged so that the best token is the target's best or its second.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(logits.shape, generator=generator)
    two = logits.topk(2, dim=-1).indices

    def agrees(scale: float) -> bool:
        return float(((logits + scale * noise).argmax(-1) == two[..., 0]).float().mean()) > _AGREEMENT

    noisy = logits + _bisect(agrees, 0.0, 10.0) * noise
    coin = torch.rand(logits.shape[:-1], generator=generator) < _AGREEMENT
    wanted, best = torch.where(coin, two[..., 0], two[..., 1])[..., None], noisy.argmax(-1, keepdim=True)
    largest, other = noisy.gather(-1, best), noisy.gather(-1, wanted)
    return noisy.scatter(-1, best, other).scatter(-1, wanted, largest)


def _bisect(below: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low


def _decision(batch: Batch, case: Case, seed: int) -> Callable[[], Callable[[], int]]:
    """Called before the clock starts, it prepares what propose and the decoder would hand over."""

    def prepare() -> Callable[[], int]:
        slots = [replace(slot, request=replace(slot.request, params=case.params)) for slot in batch.slots]
        for row, slot in enumerate(slots):
            slot.random = random.Random(seed + row)
        sampling = sampling_of(slots, batch.width, batch.logits.device)
        draft = batch.logits[:, :-1] if case.agrees else batch.draft_logits
        relaxed, rows = case.rule.verifier != "exact", list(range(len(slots)))
        probs = None if sampling is None else processed_probs(draft, sampling.processing)
        ids = draft.argmax(-1) if probs is None or sampling is None else sample(probs, sampling.draft)
        log_probs = None if not relaxed else draft.log_softmax(-1) if probs is None else probs.log()
        lengths = torch.full((len(slots),), batch.width)
        none = [False] * len(slots)
        chains = Chains(ids, lengths, torch.ones(ids.shape), probs, log_probs, none, none, [NOTHING] * len(slots), 0.0)
        relaxation = Relaxation(((case.rule, rows),), [batch.width] * len(slots)) if relaxed else None
        return lambda: sum(walk(slots, batch.logits, chains, sampling, relaxation).num_accepted)

    return prepare
