"""What a trace's tokens alone decide: on which side of the split it falls, whether it is known, whether it loops.

Pure functions; the store asks them of every trace before it keeps one.
"""

import hashlib
from collections.abc import Sequence

import numpy

from adaptive_spec.core import Trace

_LOOP_TOKENS = 64  # the end of a completion that is looked at for a loop
_LOOP_SHARE = 0.25  # of distinct tokens in it, at or under which it is one
_LOOP_MIN_TOKENS = 16
_LONGEST_CYCLE = 32  # tokens that, repeated to the end, are a loop however many are distinct
_CYCLE_REPEATS = 4


def is_held_out(tokens: Sequence[int], prompt_tokens: int, share: float) -> bool:
    """Say whether a prompt belongs to the held-out set.

    The prompt alone decides, by SHA-256 of its ids: the same prompt falls on the same side today, tomorrow and on
    every machine, and no completion of a training prompt is ever held out.
    """
    digest = hashlib.sha256(_id_bytes(tokens[:prompt_tokens])).digest()
    return int.from_bytes(digest[:8], "little") < share * 2**64


def is_degenerate(completion: Sequence[int]) -> bool:
    """Say whether a completion ends in a loop: few tokens over and over, or a short cycle several times.

    Loops are easy to draft and teach a draft nothing but looping.
    """
    end = completion[-_LOOP_TOKENS:]
    if len(end) < _LOOP_MIN_TOKENS:
        return False
    return len(set(end)) <= _LOOP_SHARE * len(end) or any(
        _repeats(completion, period) for period in range(1, _LONGEST_CYCLE + 1)
    )


def digest_of(trace: Trace) -> str:
    """Return what tells a trace from others: SHA-256 of its prompt and completion, as hexadecimal."""
    return hashlib.sha256(f"{trace.prompt_tokens}:".encode() + _id_bytes(trace.tokens)).hexdigest()


def _repeats(completion: Sequence[int], period: int) -> bool:
    """Whether the completion ends in one cycle of so many tokens, over and over."""
    length = max(_CYCLE_REPEATS * period, _LOOP_MIN_TOKENS)
    end = completion[-length:]
    return len(end) == length and end[period:] == end[:-period]


def _id_bytes(tokens: Sequence[int]) -> bytes:
    return numpy.asarray(tokens, dtype="<i8").tobytes()
