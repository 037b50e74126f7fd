"""Which training traces are fitted, and which choose: the epoch, and whether a domain gets an adapter of its own.

A hash of the prompt decides, so that all of a prompt lies on one side, and on the same side in every run: no adapter
of an earlier run was fitted to what chooses now.  The gate's held-out traces are none of these.  Called by ``run``,
``offline`` and the benchmarks.
"""

import hashlib
from collections.abc import Sequence

from adaptive_spec.core import Trace

_SELECTION_SHARE = 0.15  # of prompts
_EPOCH_SHARE = 0.05  # of prompts, the part of the selection that chooses the epoch of a domain's own adapter


def split(traces: Sequence[Trace]) -> tuple[list[Trace], list[Trace]]:
    """Split traces to fit and traces that choose.

    Neither side is empty when there are two prompts or more.
    """
    places = [_place(trace) for trace in traces]
    distinct = sorted(set(places))
    selected = {place for place in distinct if place < _SELECTION_SHARE} or set(distinct[:1])
    if len(selected) == len(distinct):
        selected = set(distinct[:1])
    fitted = [trace for trace, place in zip(traces, places, strict=True) if place not in selected]
    return fitted, [trace for trace, place in zip(traces, places, strict=True) if place in selected]


def split_selection(selection: Sequence[Trace]) -> tuple[list[Trace], list[Trace]]:
    """Split the traces that choose into those for the epoch of an own adapter and those for its contest.

    The best epoch is best on what chose it, so that the same traces would flatter an adapter in its contest.
    """
    places = [_place(trace) for trace in selection]
    epoch = [trace for trace, place in zip(selection, places, strict=True) if place < _EPOCH_SHARE]
    return epoch, [trace for trace, place in zip(selection, places, strict=True) if place >= _EPOCH_SHARE]


def _place(trace: Trace) -> float:
    """Where the prompt lies in [0, 1), evenly."""
    prompt = ",".join(map(str, trace.tokens[: trace.prompt_tokens]))
    digest = hashlib.sha256(f"epoch selection {prompt}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48
