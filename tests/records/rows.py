"""Makers of the things that the decoder reports, with numbers that are easy to check by hand."""

from datetime import UTC, datetime, timedelta

import numpy
from sqlalchemy.orm import Session

from adaptive_spec.core import ChainEvidence, FinishedRequest, Position, Step, Trace
from adaptive_spec.records.database import Database
from adaptive_spec.records.outcomes import in_bulk
from adaptive_spec.records.trace_statistics import trace_statistics

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def make_step(
    request_id: str = "a",
    step_index: int = 0,
    *,
    domain: str = "code",
    release: int = 0,
    drafter: str | None = None,
    chain_length: int = 3,
    positions: tuple[tuple[float, float, bool], ...] = ((0.9, 0.8, True), (0.5, 0.4, False)),
    num_emitted: int | None = None,
    explored: bool = False,
    policy: str = "policy",
) -> Step:
    accepted = sum(position[2] for position in positions)
    return Step(
        request_id=request_id,
        domain=domain,
        release=release,
        step_index=step_index,
        drafter=("model" if chain_length else "") if drafter is None else drafter,
        chain_length=chain_length,
        num_accepted=accepted,
        num_emitted=accepted + 1 if num_emitted is None else num_emitted,
        explored=explored,
        draft_seconds=0.01,
        verify_seconds=0.02,
        batch_size=1,
        positions=tuple(Position(*position) for position in positions),
        at=START + timedelta(seconds=step_index),
        policy=policy,
    )


def make_finish(
    request_id: str = "a",
    *,
    domain: str = "code",
    completion_tokens: int = 6,
    num_steps: int = 2,
    num_draft_tokens: int = 6,
    num_accepted_draft_tokens: int = 4,
    releases: tuple[int, ...] = (0,),
    decode_seconds: float = 2.0,
    policy: str = "policy",
    finish_reason: str = "length",
    finished_after_seconds: float = 10.0,
) -> FinishedRequest:
    return FinishedRequest(
        request_id=request_id,
        domain=domain,
        prompt_tokens=5,
        completion_tokens=completion_tokens,
        num_steps=num_steps,
        num_draft_tokens=num_draft_tokens,
        num_accepted_draft_tokens=num_accepted_draft_tokens,
        finish_reason=finish_reason,
        releases=releases,
        started_at=START,
        finished_at=START + timedelta(seconds=finished_after_seconds),
        time_to_first_token_seconds=0.1,
        decode_seconds=decode_seconds,
        policy=policy,
    )


def make_trace(
    seed: int = 0,
    *,
    domain: str = "code",
    prompt: tuple[int, ...] | None = None,
    completion: tuple[int, ...] | None = None,
    request_id: str | None = None,
    at: datetime = START,
) -> Trace:
    generator = numpy.random.default_rng(seed)
    drawn = tuple(generator.integers(0, 1000, 5).tolist())
    prompt = drawn if prompt is None else prompt
    if completion is None:
        completion = tuple(generator.integers(0, 1000, 7).tolist())
    shape = (len(completion), 4)
    return Trace(
        request_id=request_id or f"request-{seed}",
        domain=domain,
        tokens=prompt + completion,
        prompt_tokens=len(prompt),
        top_ids=generator.integers(0, 1000, shape),
        top_log_probs=-generator.random(shape).astype(numpy.float32),
        tail_mass=generator.random(len(completion)).astype(numpy.float32),
        release=3,
        at=at,
    )


def make_evidence(
    request_id: str = "a",
    step_index: int = 0,
    *,
    domain: str = "code",
    release: int = 0,
    chain: tuple[int, ...] = (1, 2),
    target_tokens: tuple[int, ...] | None = None,
    strict: tuple[bool, ...] = (True, False),
    measure: str = "tv",
    similarities: tuple[float, ...] = (0.75, 0.25),
    greedy: bool = True,
    temperature: float = 1.0,
    most_emitted: int | None = None,
) -> ChainEvidence:
    return ChainEvidence(
        request_id=request_id,
        domain=domain,
        release=release,
        step_index=step_index,
        drafter="model" if chain else "",
        chain=chain,
        target_tokens=target_tokens or tuple(token if its else 9 for token, its in zip(chain, strict, strict=True)),
        strict=strict,
        measure=measure,
        similarities=similarities,
        greedy=greedy,
        temperature=temperature,
        most_emitted=len(chain) + 1 if most_emitted is None else most_emitted,
        at=START + timedelta(seconds=step_index),
    )


def record(database: Database, *items: Step | ChainEvidence | FinishedRequest) -> None:
    """Store through the writer's own rows, without its thread."""
    with database.session_scope() as session:
        insert(database, session, *items)


def insert(database: Database, session: Session, *items: Step | ChainEvidence | FinishedRequest) -> None:
    """Do so in a transaction that somebody else ends."""
    for table, columns in in_bulk(items):
        database.insert_many(session, table, columns)


def drop_counts(database: Database) -> dict[tuple[str, str], int]:
    """The counters of dropped traces, by domain and reason."""
    return {
        (row.domain, reason): number for row in trace_statistics(database) for reason, number in row.dropped.items()
    }
