"""What speculation achieved, per domain.  Read by the CLI, the HTTP API, the metrics and the dashboard.

The sums are the database's work; a query returns one row per domain and outcome, however many steps there are.
"""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Executable, Row, case, distinct, func, select

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import RequestRow, StepRow

_COUNTS = (
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_emitted_tokens",
    "num_divergent_tokens",
)
_SUMS = ("overlap_sum", "total_variation", "given_up_nats")


@dataclass(frozen=True, slots=True)
class DomainStatistics:
    """One domain's counters and the rates made of them.  A rate without observations is 0.

    num_spec_steps: steps that drafted at least one token.  num_emitted_tokens: of all steps, drafting or not.
    mean_acceptance_length: 1 + accepted / spec steps.  acceptance_per_position: accepted / reached.
    expected_acceptance: mean over reached positions of sum of min(target, draft).
    num_divergent_tokens: emitted tokens that exact verification would have refused; divergence_share is their share.
    mean_total_variation: between target and draft, and mean_given_up_nats: log-prob of the target's best token less the
    kept one's; both over divergent tokens.
    num_cached_requests: answered out of the cache; no other number counts them.
    tokens_per_second: completion tokens / decode seconds, over finished requests.
    """

    domain: str
    num_requests: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_emitted_tokens: int
    num_cached_requests: int
    draft_acceptance_rate: float
    mean_acceptance_length: float
    acceptance_per_position: tuple[float, ...]
    expected_acceptance: float
    tokens_per_second: float
    num_divergent_tokens: int
    divergence_share: float
    mean_total_variation: float
    mean_given_up_nats: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "acceptance_per_position": list(self.acceptance_per_position)}


@dataclass(slots=True)
class _Sums:
    """Running totals of one domain; ``reached`` and ``accepted`` count by position."""

    totals: Counter[str] = field(default_factory=Counter)
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    reached: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def add(self, row: Row[Any]) -> None:
        for name in _COUNTS:
            self.totals[name] += int(getattr(row, name))
        for name in _SUMS:
            self.sums[name] += float(getattr(row, name))
        for position in range(row.num_reached):
            self.reached[position] += row.num_steps
        for position in range(row.num_reached_accepted):
            self.accepted[position] += row.num_steps


def domain_statistics(
    database: Database,
    *,
    domain: str | None = None,
    release: int | None = None,
    since: datetime | None = None,
    policy: str | None = None,
    drafter: str | None = None,
    verifier: str | None = None,
) -> list[DomainStatistics]:
    """Return one entry per domain with at least one step or cached answer, sorted by domain.

    Args:
        domain: only this one.
        release: only steps of this release; the speed then counts requests that it alone served.
        since: only steps and finishes at or after this time.
        policy: only requests under "policy", "fixed", "off" or "cache"; leaves out requests still running.
        drafter: only steps whose chain "model" or "ngram" proposed, which leaves out cached answers; the speed is of
            whole requests all the same.
        verifier: only steps that were judged by it; the same holds.
    """
    with database.session_scope(read_only=True) as session:
        steps = _steps(domain, release, since, policy, drafter, verifier)
        sums: dict[str, _Sums] = defaultdict(_Sums)
        for row in session.execute(_step_sums(steps)):
            sums[row.domain].add(row)
        num_requests = {row[0]: int(row[1]) for row in session.execute(_request_counts(steps))}
        speeds = {row[0]: float(row[1]) for row in session.execute(_speeds(domain, release, since, policy))}
        cached: Counter[str] = Counter()
        if drafter is None and verifier is None:
            cached.update({row[0]: int(row[1]) for row in session.execute(_cached(domain, release, since, policy))})
    return [
        _statistics(name, sums[name], num_requests.get(name, 0), cached[name], speeds.get(name))
        for name in sorted({*sums, *cached})
    ]


def request_series(database: Database, domain: str | None = None, limit: int = 500) -> list[dict[str, Any]]:
    """Return the newest finished requests, oldest first: request_id, domain, finished_at, mean_acceptance_length,
    releases.  Requests without a drafted token are left out."""
    query = (
        select(RequestRow)
        .where(RequestRow.num_draft_tokens > 0)
        .order_by(RequestRow.finished_at.desc(), RequestRow.request_id.desc())
        .limit(limit)
    )
    if domain is not None:
        query = query.where(RequestRow.domain == domain)
    with database.session_scope(read_only=True) as session:
        rows = list(session.scalars(query))
    return [
        {
            "request_id": row.request_id,
            "domain": row.domain,
            "finished_at": row.finished_at,
            "mean_acceptance_length": 1 + row.num_accepted_draft_tokens / max(1, row.num_steps),
            "releases": list(row.releases),
        }
        for row in reversed(rows)
    ]


def _steps(
    domain: str | None,
    release: int | None,
    since: datetime | None,
    policy: str | None,
    drafter: str | None,
    verifier: str | None,
) -> list[Any]:
    conditions: list[Any] = []
    if domain is not None:
        conditions.append(StepRow.domain == domain)
    if release is not None:
        conditions.append(StepRow.release == release)
    if since is not None:
        conditions.append(StepRow.at >= since)
    if drafter is not None:
        conditions.append(StepRow.drafter == drafter)
    if verifier is not None:
        conditions.append(StepRow.verifier == verifier)
    if policy is not None:
        conditions.append(StepRow.request_id.in_(select(RequestRow.request_id).where(RequestRow.policy == policy)))
    return conditions


def _step_sums(conditions: list[Any]) -> Executable:
    outcome = (StepRow.domain, StepRow.num_reached, StepRow.num_reached_accepted)
    return (
        select(
            *outcome,
            func.count().label("num_steps"),
            func.sum(case((StepRow.chain_length > 0, 1), else_=0)).label("num_spec_steps"),
            func.sum(StepRow.chain_length).label("num_draft_tokens"),
            func.sum(StepRow.num_accepted).label("num_accepted_draft_tokens"),
            func.sum(StepRow.num_emitted).label("num_emitted_tokens"),
            func.sum(StepRow.num_divergent).label("num_divergent_tokens"),
            *(func.sum(getattr(StepRow, name)).label(name) for name in _SUMS),
        )
        .where(*conditions)
        .group_by(*outcome)
    )


def _request_counts(conditions: list[Any]) -> Executable:
    return select(StepRow.domain, func.count(distinct(StepRow.request_id))).where(*conditions).group_by(StepRow.domain)


def _speeds(domain: str | None, release: int | None, since: datetime | None, policy: str | None) -> Executable:
    speed = func.sum(RequestRow.completion_tokens) * 1.0 / func.sum(RequestRow.decode_seconds)
    conditions = _requests(domain, release, since, policy)
    return (
        select(RequestRow.domain, speed).where(RequestRow.decode_seconds > 0, *conditions).group_by(RequestRow.domain)
    )


def _cached(domain: str | None, release: int | None, since: datetime | None, policy: str | None) -> Executable:
    conditions = _requests(domain, release, since, policy)
    return (
        select(RequestRow.domain, func.count())
        .where(RequestRow.policy == "cache", *conditions)
        .group_by(RequestRow.domain)
    )


def _requests(domain: str | None, release: int | None, since: datetime | None, policy: str | None) -> list[Any]:
    conditions: list[Any] = []
    if domain is not None:
        conditions.append(RequestRow.domain == domain)
    if release is not None:
        conditions += [RequestRow.first_release == release, RequestRow.last_release == release]
    if since is not None:
        conditions.append(RequestRow.finished_at >= since)
    if policy is not None:
        conditions.append(RequestRow.policy == policy)
    return conditions


def _statistics(
    domain: str, sums: _Sums, num_requests: int, num_cached_requests: int, speed: float | None
) -> DomainStatistics:
    accepted, divergent = sums.totals["num_accepted_draft_tokens"], sums.totals["num_divergent_tokens"]
    return DomainStatistics(
        domain=domain,
        num_requests=num_requests,
        num_spec_steps=sums.totals["num_spec_steps"],
        num_draft_tokens=sums.totals["num_draft_tokens"],
        num_accepted_draft_tokens=accepted,
        num_emitted_tokens=sums.totals["num_emitted_tokens"],
        num_cached_requests=num_cached_requests,
        draft_acceptance_rate=accepted / max(1, sums.totals["num_draft_tokens"]),
        mean_acceptance_length=1 + accepted / max(1, sums.totals["num_spec_steps"]),
        acceptance_per_position=tuple(sums.accepted[i] / sums.reached[i] for i in sorted(sums.reached)),
        expected_acceptance=sums.sums["overlap_sum"] / max(1, sums.reached.total()),
        tokens_per_second=speed or 0.0,
        num_divergent_tokens=divergent,
        divergence_share=divergent / max(1, sums.totals["num_emitted_tokens"]),
        mean_total_variation=sums.sums["total_variation"] / max(1, divergent),
        mean_given_up_nats=sums.sums["given_up_nats"] / max(1, divergent),
    )
