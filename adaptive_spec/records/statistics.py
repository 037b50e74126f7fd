"""What speculation achieved, per domain.  Read by the CLI, the HTTP API, the metrics and the dashboard.

The sums are the database's work; a query returns one row per domain and outcome, however many steps there are.  They
come from rollups, and from raw rows where those are too coarse or not made yet: the figures are those of all raw rows.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Executable, Row, and_, case, distinct, false, func, select, true
from sqlalchemy.orm import aliased

from adaptive_spec.records.database import Database
from adaptive_spec.records.rollups import STEP_SUMS
from adaptive_spec.records.slices import Slice
from adaptive_spec.records.spans import Window, window
from adaptive_spec.records.tables import RequestCountRow, RequestRollupRow, RequestRow, StepRollupRow, StepRow

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
        num_steps = int(row.num_steps)  # PostgreSQL adds up to decimals
        for position in range(row.num_reached):
            self.reached[position] += num_steps
        for position in range(row.num_reached_accepted):
            self.accepted[position] += num_steps


@dataclass(slots=True)
class _Requests:
    """Running totals of one domain's finished requests."""

    num_cached: int = 0
    timed_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, row: Row[Any]) -> None:
        self.num_cached += int(row.num_requests) if row.policy == "cache" else 0
        self.timed_tokens += int(row.timed_tokens)
        self.decode_seconds += float(row.decode_seconds)


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
        since: only steps and finishes at or after this time; where raw rows are deleted, from the beginning of the
            minute, hour or day on in which it lies, the finest that is kept.
        policy: only requests under "policy", "fixed", "off" or "cache".
        drafter: only steps whose chain "model" or "ngram" proposed, which leaves out cached answers; the speed is of
            whole requests all the same.
        verifier: only steps that were judged by it; the same holds.
    """
    about = Slice(domain, release, policy, drafter, verifier)
    sums: dict[str, _Sums] = defaultdict(_Sums)
    num_requests: Counter[str] = Counter()
    finished: dict[str, _Requests] = defaultdict(_Requests)
    with database.session_scope(read_only=True) as session:
        seen = window(session, since)
        for query in _step_sums(about, seen):
            for row in session.execute(query):
                sums[row.domain].add(row)
        for query in _request_counts(about, seen):
            for row in session.execute(query):
                num_requests[row.domain] += int(row.num_requests)
        for query in _finished(about, seen):
            for row in session.execute(query):
                finished[row.domain].add(row)
    with_cached = drafter is None and verifier is None
    cached = {name: totals.num_cached for name, totals in finished.items() if with_cached and totals.num_cached}
    return [
        _statistics(name, sums[name], num_requests[name], cached.get(name, 0), finished[name])
        for name in sorted({*sums, *cached})
    ]


def _step_sums(about: Slice, seen: Window) -> Iterator[Executable]:
    """Queries that give rows of ``_Sums``, each of other steps."""
    for conditions in _raw_steps(seen):
        raw = [value.label(name) for name, value in STEP_SUMS.items()]
        yield _by_outcome(StepRow, raw, [*conditions, *about.of_steps(StepRow)])
    rolled_up = [func.sum(getattr(StepRollupRow, name)).label(name) for name in STEP_SUMS]
    yield _by_outcome(StepRollupRow, rolled_up, [seen.rolled_up(StepRollupRow), *about.of_steps(StepRollupRow)])


def _by_outcome(table: Any, columns: list[Any], conditions: list[Any]) -> Executable:
    outcome = (table.domain, table.num_reached, table.num_reached_accepted)
    return select(*outcome, *columns).where(*conditions).group_by(*outcome)


def _raw_steps(seen: Window, table: Any = StepRow) -> Iterator[list[Any]]:
    """Steps that are not rolled up, then those that stand for rollups at the beginning."""
    yield [table.id > seen.last_step, *seen.fresh(table.at)]
    if seen.has_edge:
        yield [table.id <= seen.last_step, *seen.edge(table.at)]


def _request_counts(about: Slice, seen: Window) -> Iterator[Executable]:
    """Queries that count requests with such steps, each of other requests.

    A request belongs to its last such step that is rolled up; to those that are not, if it has none.
    """
    for place, conditions in enumerate(_raw_steps(seen)):
        other = aliased(StepRow)
        same = and_(other.request_id == StepRow.request_id, other.domain == StepRow.domain)
        later = seen.fresh(other.at) if place == 0 else [other.at >= seen.aligned]
        elsewhere = select(other.id).where(same, other.id <= seen.last_step, *later, *about.of_steps(other))
        yield (
            select(StepRow.domain, func.count(distinct(StepRow.request_id)).label("num_requests"))
            .where(*conditions, *about.of_steps(StepRow), ~elsewhere.exists() if seen.last_step else true())
            .group_by(StepRow.domain)
        )
    yield (
        select(RequestCountRow.domain, func.sum(RequestCountRow.num_requests).label("num_requests"))
        .where(seen.rolled_up(RequestCountRow), *about.of_counts())
        .group_by(RequestCountRow.domain)
    )


def _finished(about: Slice, seen: Window) -> Iterator[Executable]:
    """Queries that give rows of ``_Requests``, each of other requests."""
    raw, timed = RequestRow, RequestRow.decode_seconds > 0
    columns = (
        func.count().label("num_requests"),
        func.sum(case((timed, raw.completion_tokens), else_=0)).label("timed_tokens"),
        func.sum(case((timed, raw.decode_seconds), else_=0.0)).label("decode_seconds"),
    )
    parts = [[~raw.rolled_up, *seen.fresh(raw.finished_at)]]
    if seen.has_edge:
        parts.append([raw.rolled_up != false(), *seen.edge(raw.finished_at)])
    for conditions in parts:
        chosen = select(raw.domain, raw.policy, *columns).where(*conditions, *about.of_requests())
        yield chosen.group_by(raw.domain, raw.policy)
    table = RequestRollupRow
    names = ("num_requests", "timed_tokens", "decode_seconds")
    rolled_up = [func.sum(getattr(table, name)).label(name) for name in names]
    conditions = [seen.rolled_up(table), *about.of(table, "domain", "release", "policy")]
    yield select(table.domain, table.policy, *rolled_up).where(*conditions).group_by(table.domain, table.policy)


def _statistics(
    domain: str, sums: _Sums, num_requests: int, num_cached_requests: int, finished: _Requests
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
        tokens_per_second=finished.timed_tokens / finished.decode_seconds if finished.decode_seconds else 0.0,
        num_divergent_tokens=divergent,
        divergence_share=divergent / max(1, sums.totals["num_emitted_tokens"]),
        mean_total_variation=sums.sums["total_variation"] / max(1, divergent),
        mean_given_up_nats=sums.sums["given_up_nats"] / max(1, divergent),
    )
