"""Older traces beside fresh ones, so that learning new traffic forgets none of the old.

Fresh is what came after the run that made the live draft began.  Called by ``run`` and ``distil``.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime

from adaptive_spec.core import Trace
from adaptive_spec.learning.batches import completion_length


def divide(
    traces: Sequence[Trace], learned_until: datetime | None, replay_share: float | None
) -> tuple[list[Trace], list[Trace]]:
    """Divide traces into those to train on and older ones to replay.

    All are trained on alike when no share is set, or nothing is fresh, or nothing is older.
    """
    if replay_share is None or learned_until is None:
        return list(traces), []
    fresh = [trace for trace in traces if trace.at >= learned_until]
    older = [trace for trace in traces if trace.at < learned_until]
    return (fresh, older) if fresh and older else (list(traces), [])


def replayed(older: Sequence[Trace], fresh: Sequence[Trace], replay_share: float, seed: int) -> list[Trace]:
    """Draw older traces until they make ``replay_share`` of an epoch's completion tokens, domains in turn.

    Each domain gives as many as another, as far as it has them; none is drawn twice.
    """
    wanted = replay_share / (1 - replay_share) * sum(map(completion_length, fresh))
    chance = random.Random(seed)
    by_domain: dict[str, list[Trace]] = defaultdict(list)
    for trace in older:
        by_domain[trace.domain].append(trace)
    waiting = [chance.sample(rows, len(rows)) for _, rows in sorted(by_domain.items())]
    chance.shuffle(waiting)
    drawn: list[Trace] = []
    while waiting and wanted > 0:
        rows = waiting.pop(0)
        drawn.append(rows.pop())
        wanted -= completion_length(drawn[-1])
        if rows:
            waiting.append(rows)
    return drawn
