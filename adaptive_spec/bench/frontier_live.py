"""Some points of the frontier decoded for real, beside plain decoding and exact speculation.

Three things are measured: seconds, with the ways to decode taking turns at the same prompts; what the answers diverge
and how probable the target finds them, on all prompts in larger batches; and tasks whose answers can be checked.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from adaptive_spec.bench.compare import order
from adaptive_spec.bench.frontier_replay import Point
from adaptive_spec.bench.lossless import answer_logits
from adaptive_spec.bench.ours import decode_phase, start_engine
from adaptive_spec.bench.sides import DecodePhase
from adaptive_spec.bench.tasks import TaskCase, TaskSet
from adaptive_spec.core import Release, Request, SamplingParams, Step
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import DecoderSettings, VerificationSettings

BATCH = 8  # rows where seconds are not what is measured
_WARM_UP_TOKENS = 4
_LEAST_CONTEXT_TOKENS = 64

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Contest:
    """What the ways to decode of one domain are given."""

    domain: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    timed_prompts: int  # the first so many are timed
    batch: int  # rows of a timed turn
    task_sets: tuple[TaskSet, ...] = ()

    @property
    def context_tokens(self) -> int:
        """The most that any request needs."""
        tasks = [len(case.prompt_ids) + its.max_tokens for its in self.task_sets for case in its.cases]
        return max(_LEAST_CONTEXT_TOKENS, *(len(ids) + self.max_tokens for ids in self.prompts), *tasks)


@dataclass(slots=True)
class Quality:
    """Checked answers of one set."""

    num_right: int = 0
    num_cases: int = 0
    num_divergent: int = 0
    num_emitted: int = 0


@dataclass(slots=True)
class Live:
    """One way to decode and what it showed.

    point: whose rule it runs; None is plain decoding.
    num_tokens, seconds: of the timed turns, after the first token.
    num_emitted, num_divergent, num_steps: of the answers to all prompts; steps of each row with a whole chain, as they
    are recorded.  log_prob_nats: the target's, summed over the
    ``num_scored`` tokens of the answers to all prompts.
    """

    name: str
    domain: str
    point: Point | None
    num_tokens: int = 0
    seconds: float = 0.0
    num_emitted: int = 0
    num_divergent: int = 0
    num_steps: int = 0
    log_prob_nats: float = 0.0
    num_scored: int = 0
    tasks: dict[str, Quality] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_tokens / self.seconds if self.seconds else None

    @property
    def tokens_per_step(self) -> float | None:
        return self.num_emitted / self.num_steps if self.num_steps else None

    @property
    def divergence_share(self) -> float | None:
        return self.num_divergent / self.num_emitted if self.num_emitted else None

    @property
    def mean_log_prob_nats(self) -> float | None:
        return self.log_prob_nats / self.num_scored if self.num_scored else None


class _Side:
    """One engine, listened to."""

    def __init__(
        self, live: Live, pair: ModelPair, settings: DecoderSettings, release: Release, contest: Contest
    ) -> None:
        self.live = live
        self._domain = contest.domain
        self._heard: list[tuple[float, Step]] = []
        self._num_requests = 0
        self._chain_length = live.point.chain_length if live.point else 0
        rule = asdict(live.point.rule) if live.point else {}
        changes = {
            "slots": max(contest.batch, BATCH),
            "max_context_tokens": contest.context_tokens,
            "max_chain_length": max(1, self._chain_length),
            "prefix_cache_tokens": 0,  # turns repeat their prompts
            "answer_cache_tokens": 0,
            "drafter": "model",
        }
        listeners = Listeners(on_step=lambda step: self._heard.append((time.perf_counter(), step)))
        verification = VerificationSettings(divergence_budget=1.0, **rule)
        self._engine = start_engine(pair, settings, changes, listeners, verification)
        self._engine.swap(LoadedRelease(release)).result()  # its weights are in the draft already

    def answer(
        self, prompts: Sequence[tuple[int, ...]], max_tokens: int, stop: tuple[str, ...] = ()
    ) -> list[tuple[str, list[int]]]:
        """Text and tokens of each answer; all prompts are submitted at once."""
        self._heard.clear()
        params = SamplingParams(
            max_tokens=max_tokens, stop=stop, drafter="model", chain_length=self._chain_length, record=False
        )
        streams = []
        for ids in prompts:
            self._num_requests += 1
            name = f"{self.live.name}-{self._num_requests}"
            streams.append(self._engine.submit(Request(name, tuple(ids), params, self._domain)))
        answers = [stream.collect()[:2] for stream in streams]
        self._engine.call(lambda: None).result()  # comes after the last step, so that all of it has been heard
        return answers

    def phase(self, num_rows: int) -> DecodePhase:
        """Of the last answers, if they were one batch: what came after every row's first token."""
        return decode_phase(self._heard, num_rows)

    def counted(self) -> tuple[int, int, int]:
        """(diverging tokens, emitted tokens, steps) of the last answers; of steps with a whole chain."""
        steps = [step for _, step in self._heard if step.step_index and step.chain_length == self._chain_length]
        return sum(step.num_divergent for step in steps), sum(step.num_emitted for step in steps), len(steps)

    def close(self) -> None:
        self._engine.stop()


def decode_live(
    pair: ModelPair,
    settings: DecoderSettings,
    release: Release,
    contest: Contest,
    points: Sequence[Point],
    tell: Tell = lambda text: None,
) -> list[Live]:
    """Decode plainly and with every point.  ``points``: exact speculation among them."""
    lives = [Live("plain", contest.domain, None)]
    lives += [Live(f"{point.rule.verifier} {place}", contest.domain, point) for place, point in enumerate(points)]
    sides: list[_Side] = []
    try:
        for live in lives:
            sides.append(_Side(live, pair, settings, release, contest))
        _take_turns(sides, contest, tell)
        for side in sides:
            _judge_answers(side, pair, contest, tell)
            for task_set in contest.task_sets:
                if side.live.point is not None:  # plain decoding says what exact speculation says
                    tell(f"{side.live.name}: {task_set.name}")
                    side.live.tasks[task_set.name] = _quality(side, task_set)
    finally:
        for side in sides:
            side.close()
    return lives


def _take_turns(sides: Sequence[_Side], contest: Contest, tell: Tell) -> None:
    timed = contest.prompts[: contest.timed_prompts]
    turns = [timed[first : first + contest.batch] for first in range(0, len(timed), contest.batch)]
    for side in sides:
        side.answer(turns[0], _WARM_UP_TOKENS)
    for number, prompts in enumerate(turns):
        for index in order(list(map(str, range(len(sides)))), number):
            side = sides[int(index)]
            tell(f"turn {number + 1} of {len(turns)}: {side.live.name}")
            side.answer(prompts, contest.max_tokens)
            phase = side.phase(len(prompts))
            side.live.num_tokens += phase.num_tokens
            side.live.seconds += phase.seconds


def _judge_answers(side: _Side, pair: ModelPair, contest: Contest, tell: Tell) -> None:
    if side.live.point is None:
        return
    tell(f"{side.live.name}: all prompts")
    answers = side.answer(contest.prompts, contest.max_tokens)
    side.live.num_divergent, side.live.num_emitted, side.live.num_steps = side.counted()
    for prompt, (_, tokens) in zip(contest.prompts, answers, strict=True):
        side.live.log_prob_nats += _log_prob(pair, prompt, tokens)
        side.live.num_scored += len(tokens)


def _quality(side: _Side, task_set: TaskSet) -> Quality:
    cases: tuple[TaskCase, ...] = task_set.cases
    answers = side.answer([case.prompt_ids for case in cases], task_set.max_tokens, task_set.stop)
    num_divergent, num_emitted, _ = side.counted()
    right = [case.is_right(text) for case, (text, _) in zip(cases, answers, strict=True)]
    return Quality(sum(right), len(right), num_divergent, num_emitted)


@torch.inference_mode()
def _log_prob(pair: ModelPair, prompt: tuple[int, ...], tokens: list[int]) -> float:
    """What the target gives an answer, in nats, summed over its tokens."""
    log_probs = answer_logits(pair.target, prompt, tokens).log_softmax(-1)
    return float(log_probs.gather(1, torch.tensor(tokens, device=pair.device)[:, None]).sum())
