"""What a release would have made of recorded traffic, whichever one served it: its drafts judged on the same traces.

Called by ``run``, ``own`` and ``bench.evaluation``; ``contest`` decides on what several releases or adapters show here.
"""

from collections.abc import Sequence

from adaptive_spec.core import Release, Trace
from adaptive_spec.learning.evaluate import JudgedTrace, judge
from adaptive_spec.models.weights import DraftWeights
from adaptive_spec.releases.adapter import load_release


def judged_under(
    weights: DraftWeights, release: Release, traces: Sequence[Trace], heats: Sequence[float] = (1.0,)
) -> list[JudgedTrace]:
    """Judge a release as it drafts: domains under their own adapters, proposing only tokens of its vocabulary.

    In the order of the traces, each of which must have a completion.  An adapter
    alone is judged as ``Release(adapter=folder)``.  heats: temperatures at which ``overlap_at`` is wanted.

    Raises:
        ReleaseError: an adapter does not fit the draft.
    """
    drafts = weights.prepare(load_release(release, weights.base))
    by_trace = {}
    for domain in sorted({trace.domain for trace in traces}):
        its = [trace for trace in traces if trace.domain == domain]
        for row in judge(drafts.of(domain).model, its, vocabulary=release.vocabulary, heats=heats):
            by_trace[id(row.trace)] = row
    return [by_trace[id(trace)] for trace in traces]
