"""Traffic for ``adaptive-spec bench-records``: requests of a recorded or a made-up shape, spread over a month.

The made-up shape, where no database gives one: four domains alike; an answer takes a prefill step and then, geometric
with mean 40, steps that draft 1 to 6 tokens; each token is accepted with the probability of its domain, .6 to .9; one
chain in ten is an n-gram's; one step in twenty drafts nothing.  Three releases take turns of ten days.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import numpy

from adaptive_spec.core import FinishedRequest, Position, Step

DAYS = 30
ACCEPTANCE = {"code": 0.9, "math": 0.8, "sql": 0.7, "tools": 0.6}
_TEMPLATES = 400
_MEAN_STEPS = 40
_MAX_CHAIN_LENGTH = 6
_RELEASE_DAYS = 10
_STEP_SECONDS = 0.05

Template = Sequence[Step]


def made_up(seed: int, at: datetime) -> list[Template]:
    """Return requests of the made-up shape; their times do not matter."""
    generator = numpy.random.default_rng(seed)
    return [_request(generator, domain, at) for _ in range(_TEMPLATES // len(ACCEPTANCE)) for domain in ACCEPTANCE]


def traffic(
    shape: Sequence[Template], num_tokens: int, end: datetime, seed: int
) -> Iterator[tuple[list[Step], FinishedRequest]]:
    """Yield requests in the order of time, the last at ``end``, until about so many tokens are emitted.

    Args:
        shape: requests to draw from, each as often as any other.
    """
    generator = numpy.random.default_rng(seed)
    mean = sum(step.num_emitted for steps in shape for step in steps) / len(shape)
    number = max(1, round(num_tokens / mean))
    begin = end - timedelta(days=DAYS)
    for index in range(number):
        at = begin + timedelta(days=DAYS) * ((index + 1) / number)
        template = shape[int(generator.integers(len(shape)))]
        yield again(template, f"chatcmpl-{seed:04x}{index:028x}", at)


def again(template: Template, request_id: str, at: datetime) -> tuple[list[Step], FinishedRequest]:
    """The request once more, with another id and at another time."""
    release = at.toordinal() // _RELEASE_DAYS
    steps = [
        replace(
            step,
            request_id=request_id,
            step_index=index,
            release=release,
            at=at + timedelta(seconds=_STEP_SECONDS * index),
        )
        for index, step in enumerate(template)
    ]
    seconds = sum(step.draft_seconds + step.verify_seconds for step in steps)
    return steps, FinishedRequest(
        request_id=request_id,
        domain=steps[0].domain,
        prompt_tokens=100,
        completion_tokens=sum(step.num_emitted for step in steps),
        num_steps=len(steps),
        num_draft_tokens=sum(step.chain_length for step in steps),
        num_accepted_draft_tokens=sum(step.num_accepted for step in steps),
        finish_reason="stop",
        releases=(release,),
        started_at=at,
        finished_at=steps[-1].at,
        time_to_first_token_seconds=seconds / len(steps),
        decode_seconds=seconds,
        policy=steps[0].policy,
    )


def _request(generator: numpy.random.Generator, domain: str, at: datetime) -> Template:
    drafted = [_step(generator, domain, at) for _ in range(int(generator.geometric(1 / _MEAN_STEPS)))]
    return [replace(drafted[0], drafter="", chain_length=0, num_accepted=0, num_emitted=1, positions=()), *drafted]


def _step(generator: numpy.random.Generator, domain: str, at: datetime) -> Step:
    length = 0 if generator.random() < 0.05 else int(generator.integers(1, _MAX_CHAIN_LENGTH + 1))
    refused = numpy.nonzero(generator.random(length) >= ACCEPTANCE[domain])[0]
    accepted = int(refused[0]) if len(refused) else length
    drafter = "" if not length else "ngram" if generator.random() < 0.1 else "model"
    reached = range(min(accepted + 1, length))
    confidences, overlaps = generator.beta(4, 1, len(reached)), generator.beta(4, 1, len(reached))
    return Step(
        request_id="",
        domain=domain,
        release=0,
        step_index=0,
        drafter=drafter,
        chain_length=length,
        num_accepted=accepted,
        num_emitted=accepted + 1,
        explored=bool(generator.random() < 0.02),
        draft_seconds=0.003 * length,
        verify_seconds=0.03,
        batch_size=4,
        positions=tuple(Position(float(confidences[i]), float(overlaps[i]), i < accepted) for i in reached),
        at=at,
    )
