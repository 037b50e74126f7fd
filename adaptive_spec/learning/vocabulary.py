"""Which tokens a draft needs a head for: those that traffic uses."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from adaptive_spec.core import Trace


def choose_vocabulary(traces: Sequence[Trace], size: int, vocab_size: int) -> list[int] | None:
    """Return the ``size`` tokens that the target most often says in these traces, or None where that is all of them.

    Ranked by the target's most probable token at each position, then by use in prompts, which answers quote; what is
    left is filled with the lowest ids: merges of byte-pair tokenizers are numbered by frequency.
    """
    if not size or size >= vocab_size:
        return None
    said: Counter[int] = Counter()
    quoted: Counter[int] = Counter()
    for trace in traces:
        said.update(np.asarray(trace.top_ids)[:, 0].tolist())
        quoted.update(trace.tokens)
    ranked = dict.fromkeys(token for counts in (said, quoted) for token, _ in counts.most_common())
    ranked.update(dict.fromkeys(range(vocab_size)))
    return sorted(list(ranked)[:size])
