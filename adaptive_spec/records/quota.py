"""How many traces a domain may have, and which: the newest, and a fair sample of all that were before them.

The sample is a reservoir without a state: of the traces that are no longer among the newest those stay whose digests
are smallest.  Digests are SHA-256, as good as random, so at any time this is a uniform sample of all older ones
(bottom-k sampling: Cohen & Kaplan, PODC 2007), whoever adds, in whatever batches, and however often it is applied.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import CursorResult, and_, delete, func, select
from sqlalchemy.orm import Session

from adaptive_spec.records.tables import TraceRow
from adaptive_spec.settings import RecordSettings


@dataclass(frozen=True, slots=True)
class Quota:
    """The quota of each domain.

    Traces to train on and held-out ones share it as prompts are shared, so that neither can displace the other.

    num_traces, own: of a domain, and of those for which it is another number.
    recent_share: of it, for the newest traces.
    held_out_share: of it, for held-out ones.
    """

    num_traces: int
    recent_share: float
    held_out_share: float
    own: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: RecordSettings) -> "Quota":
        return cls(settings.trace_quota, settings.recent_share, settings.held_out_share, settings.domain_quotas)

    def size(self, domain: str, *, held_out: bool) -> int:
        """The traces that one side of a domain may have."""
        total = self.own.get(domain, self.num_traces)
        tested = min(total - 1, max(1, round(total * self.held_out_share)))
        return tested if held_out else total - tested


def enforce(session: Session, quota: Quota, domain: str, *, held_out: bool) -> int:
    """Delete the rows of one side of a domain that its quota does not hold, and return how many."""
    size = quota.size(domain, held_out=held_out)
    side = and_(TraceRow.domain == domain, TraceRow.held_out == held_out)
    if (session.scalar(select(func.count()).select_from(TraceRow).where(side)) or 0) <= size:
        return 0
    num_recent = round(size * quota.recent_share)
    recent = select(TraceRow.id).where(side).order_by(TraceRow.id.desc()).limit(num_recent)
    older = select(TraceRow.id).where(side, TraceRow.id.not_in(recent)).order_by(TraceRow.digest)
    beyond = older.offset(size - num_recent)
    result = session.execute(
        delete(TraceRow).where(TraceRow.id.in_(beyond)).execution_options(synchronize_session=False)
    )
    assert isinstance(result, CursorResult)
    return result.rowcount
