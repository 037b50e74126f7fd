"""The frozen dataclasses that cross rooms.  No behaviour beyond derived properties, no I/O, no torch.

Who makes what: the decoder makes ``Step``, ``ChainEvidence`` and ``Trace``; records stores them; calibration turns
steps and evidence into ``Thresholds``; learning turns traces into an adapter; releases bind both into a ``Release``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any

DEFAULT_DOMAIN = "default"
DOMAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}")
DRAFTERS = ("model", "ngram", "combined")  # combined: n-gram where a long enough suffix matches, else the model
VERIFIERS = ("exact", "ngram", "logits", "hybrid", "typical", "topk_relaxed")  # all but exact are relaxed
CALIBRATED_VERIFIERS = ("ngram", "logits", "hybrid")  # whose thresholds are fitted to evidence
SIMILARITIES = ("cosine", "kl", "reverse_kl", "js", "tv")
_NUMBERS = {
    "ngram": ("ngram_size", "min_overlap"),
    "logits": ("similarity", "min_similarity"),
    "hybrid": ("ngram_size", "min_overlap", "similarity", "min_similarity"),
    "typical": ("typical_epsilon", "typical_delta"),
    "topk_relaxed": ("relaxed_top_k", "relaxed_delta"),
}
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.01, 10.0  # far beyond, logits divided by it overflow
POOLED = "*"  # key of the thresholds that serve every domain without its own


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request wants its tokens.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.  repetition_penalty divides or multiplies the logits
    of tokens in prompt or output (1: off); presence_penalty and frequency_penalty are taken off the logits of tokens in
    the output, once and per occurrence (0: off).  logprobs asks for the log-prob of every emitted token and of so many
    of the most probable ones, in the target's own distribution: temperature 1, before penalties and truncation.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1  # answers to the same prompt, each with a seed of its own
    logprobs: int | None = None
    deadline_seconds: float | None = None  # from submission; None: the decoder's setting
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    drafter: str | None = None  # one of DRAFTERS; None: the decoder's setting
    adapter: str | None = None  # the domain whose adapter drafts; None: the request's own; "shared": the shared one
    chain_length: int | None = None  # None: the length policy decides; a number: exactly that; 0: no speculation
    verifier: str | None = None  # one of VERIFIERS that the operator allows; None: the domain's
    record: bool = True  # False: statistics only, no trace is kept of this request

    @property
    def greedy(self) -> bool:
        """Temperatures so small that logits divided by them overflow are greedy too."""
        return self.temperature < 1e-5

    @property
    def warmth(self) -> float:
        """The temperature that tokens are drawn at; 0 for every greedy request."""
        return 0.0 if self.greedy else self.temperature

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine sees it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    domain: str = DEFAULT_DOMAIN
    traceparent: str = ""  # the span that asks, as W3C Trace Context writes it; empty: none


@dataclass(frozen=True, slots=True)
class Position:
    """One reached position of a chain: what the draft believed, and whether the target kept it.

    confidence: the draft model's largest probability before the calibration temperature, softmax of its raw logits
    (the request's sampling processing is *not* applied); of an n-gram chain, the acceptance expected of its match.
    overlap: sum of min(target, draft) as verified.
    """

    confidence: float
    overlap: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one step of one request.  ``positions``: reached ones only, all accepted but the last.

    The first step of a request is its prefill: no chain, one token.

    verifier: the one in force; "exact" also where a relaxed one had spent its domain's divergence budget.
    num_divergent: emitted tokens that exact verification would have refused.  total_variation: between target and
    draft, summed over them; given_up_nats: log-prob of the target's best token less theirs, summed over them.
    """

    request_id: str
    domain: str
    release: int
    step_index: int
    drafter: str  # who proposed the chain: model or ngram; empty when nothing was proposed
    chain_length: int  # tokens proposed
    num_accepted: int
    num_emitted: int
    explored: bool  # drafted at full length regardless of the policy
    draft_seconds: float
    verify_seconds: float
    batch_size: int
    positions: tuple[Position, ...]
    at: datetime
    verifier: str = "exact"
    num_divergent: int = 0
    total_variation: float = 0.0
    given_up_nats: float = 0.0
    match_length: int = 0  # of an n-gram chain: tokens of the suffix that it continues
    request_temperature: float = 0.0  # 0: greedy
    policy: str = "policy"  # as of the FinishedRequest


@dataclass(frozen=True, slots=True)
class ChainEvidence:
    """A chain measured whole, also past the token where verification stopped, so that any threshold can be replayed.

    chain, target_tokens: what was proposed, and the target's argmax at the same positions, after penalties.
    strict: exact verification's verdict on each position, the tokens before taken as given; of a sampled row, with the
    uniforms that the step drew.  measure, similarities: one of SIMILARITIES, and target to draft at each position.
    greedy, temperature: of a sampled request similarities compare what was drawn from, the draft's logits divided by
    the domain's sampling temperature beside the request's own; of a greedy one the plain distributions, so 1.
    most_emitted: tokens that the step emits when it keeps all: chain and bonus token, or up to what ends the answer.
    """

    request_id: str
    domain: str
    release: int
    step_index: int
    drafter: str
    chain: tuple[int, ...]
    target_tokens: tuple[int, ...]
    strict: tuple[bool, ...]
    measure: str
    similarities: tuple[float, ...]
    greedy: bool
    temperature: float
    most_emitted: int
    at: datetime


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The summary of a request, written once when it ends.

    Its time from submission to end is queue_seconds, until it took a row or ended without one, and then decode_seconds,
    its prompt included.  time_to_first_token_seconds counts from submission, too.
    """

    request_id: str
    domain: str
    prompt_tokens: int
    completion_tokens: int
    num_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    finish_reason: str  # stop | length | cancelled | deadline | error
    releases: tuple[int, ...]
    started_at: datetime
    finished_at: datetime
    time_to_first_token_seconds: float
    decode_seconds: float
    policy: str  # "policy" when the length policy chose, "fixed" or "off" when the request did, "cache": no decoding
    queue_seconds: float = 0.0  # not recorded, as the next
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A finished request kept for distillation.

    tokens: prompt and completion ids.  top_ids / top_log_probs: numpy arrays [completion_tokens, top_k], the target's
    distribution (temperature 1, unprocessed) from which each completion token was chosen.
    tail_mass: [completion_tokens].
    """

    request_id: str
    domain: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    top_ids: Any
    top_log_probs: Any
    tail_mass: Any
    release: int
    at: datetime


@dataclass(frozen=True, slots=True)
class Rule:
    """Which verifier judges a chain, and the numbers of all of them; each reads its own.

    ngram_size, min_overlap: of ``ngram`` and ``hybrid``, the tokens of an n-gram and the smallest share of a chain's
    n-grams that the target's own tokens must hold.  similarity, min_similarity: of ``logits`` and ``hybrid``, how two
    distributions are compared and how alike they must be.  typical_epsilon, typical_delta: of ``typical``.
    relaxed_top_k, relaxed_delta: of ``topk_relaxed``.
    """

    verifier: str = "exact"
    ngram_size: int = 2
    min_overlap: float = 0.5
    similarity: str = "tv"
    min_similarity: float = 0.7
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    relaxed_top_k: int = 10
    relaxed_delta: float = 0.3

    @property
    def numbers(self) -> dict[str, float | int | str]:
        """Those that its verifier reads, by name."""
        return {name: getattr(self, name) for name in _NUMBERS.get(self.verifier, ())}


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a confidence is read as a probability of acceptance.

    It is sigmoid(logit(confidence) / temperature + offset + warmth x the request's own temperature): a token that is
    drawn at random is refused more often than the most probable one that a greedy request gets.
    """

    temperature: float = 1.0
    offset: float = 0.0
    warmth: float = 0.0


@dataclass(frozen=True, slots=True)
class LengthRule:
    """When to stop drafting in a batch of so many rows; the two numbers are those of ``Thresholds``."""

    rows: int
    stop_below: float
    max_chain_length: int


@dataclass(frozen=True, slots=True)
class MatchAcceptance:
    """How n-gram tokens fared whose match had a length: of ``num_reached``, ``num_accepted``."""

    match_length: int
    num_accepted: int
    num_reached: int


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The numbers of one domain.

    temperature, offset, warmth: what the draft's top probability says of acceptance, see ``Scaling``.
    stop_below: drafting goes on while the product of calibrated confidences so far is at least this.  0 never stops.
    max_chain_length: 0 turns speculation off, save for exploring steps.
    rule: how chains of the domain are verified; None: as the settings say.
    sampling_temperature: what the draft's logits are divided by beside a request's own temperature before a token is
        drawn; greedy requests never notice.
    larger_batches: when to stop in batches of more rows, ascending; ``stop_below``, ``max_chain_length`` are for one.
    ngram_acceptance: of the n-gram drafter, by match length, ascending.
    """

    temperature: float = 1.0
    stop_below: float = 0.4
    max_chain_length: int = 4
    survival: tuple[float, ...] = ()  # P(position accepted | reached), as measured
    num_observations: int = 0
    rule: Rule | None = None
    offset: float = 0.0
    warmth: float = 0.0
    sampling_temperature: float = 1.0
    larger_batches: tuple[LengthRule, ...] = ()
    ngram_acceptance: tuple[MatchAcceptance, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Thresholds":
        """Read back what ``dataclasses.asdict`` made, as JSON keeps it; what is missing has its default.

        Raises:
            TypeError: an unknown name, or a value of the wrong shape.
        """
        rule = values.get("rule")
        made = {
            "survival": tuple(values.get("survival", ())),
            "rule": None if rule is None else Rule(**rule),
            "larger_batches": tuple(LengthRule(**entry) for entry in values.get("larger_batches", ())),
            "ngram_acceptance": tuple(MatchAcceptance(**entry) for entry in values.get("ngram_acceptance", ())),
        }
        return cls(**{**values, **made})

    def lengths_at(self, rows: int) -> LengthRule:
        """When to stop in a batch: the rule of the nearest batch that is no larger."""
        fitting = [entry for entry in self.larger_batches if entry.rows <= rows]
        return fitting[-1] if fitting else LengthRule(1, self.stop_below, self.max_chain_length)

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.temperature, self.offset, self.warmth)


@dataclass(frozen=True, slots=True)
class ThresholdOverride:
    """Numbers of a domain's ``Thresholds`` that a person has set; one that is None stays as the release has it.

    Those that the length policy alone reads: any value is lossless, and none biases what calibration learns from raw
    confidences and exploring steps.
    stop_below: decides in place of optimal stopping, too.  max_chain_length: of n-gram chains as well.
    """

    temperature: float | None = None
    offset: float | None = None
    warmth: float | None = None
    stop_below: float | None = None
    max_chain_length: int | None = None

    @property
    def numbers(self) -> dict[str, Any]:
        """Those that are set, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def over(self, thresholds: Thresholds) -> Thresholds:
        """The thresholds with these numbers in place of their own, at every batch size."""
        lengths = {name: value for name, value in self.numbers.items() if name in ("stop_below", "max_chain_length")}
        batches = tuple(replace(entry, **lengths) for entry in thresholds.larger_batches)
        return replace(thresholds, **self.numbers, larger_batches=batches)


@dataclass(frozen=True, slots=True)
class Release:
    """An immutable version.  Version 0 is the untouched draft with default thresholds; it has no folder."""

    version: int = 0
    thresholds: Mapping[str, Thresholds] = field(default_factory=lambda: MappingProxyType({}))
    adapter: str | None = None  # folder of the shared peft adapter, None: the base draft
    parent: int | None = None
    vocabulary: tuple[int, ...] | None = None  # the only tokens that the draft proposes, ascending; None: all
    domain_adapters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # folders, by domain

    def for_domain(self, domain: str) -> Thresholds:
        """The domain's thresholds, else the pooled ones, else the defaults."""
        return self.thresholds.get(domain) or self.thresholds.get(POOLED) or Thresholds()


@dataclass(frozen=True, slots=True)
class StepCost:
    """Measured cost of one decoder step on this machine.

    draft_seconds: per drafted token.  verify_seconds[n]: one target forward over n + 1 tokens, n = 0 … len - 1.
    """

    draft_seconds: float
    verify_seconds: tuple[float, ...]
    key: str  # hardware, models, dtype, threads, batch size
