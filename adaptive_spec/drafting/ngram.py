"""The n-gram drafter: what followed the last time these words stood here.

A chain is the continuation of the longest suffix that was seen before, in the request's own prompt and output or in
past outputs of its domain.  (Prompt lookup decoding, Saxena 2023; REST, arXiv 2311.08252.)  No model runs, so a chain
costs its verification only.

The chain's draft distribution is one-hot: token x is kept with probability target(x), else the recovered token comes
from the target without x, so sampling stays exact.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_FIRST_RATE = 0.3  # acceptance of n-gram tokens while nothing is known
_PRIOR_TOKENS = 8.0  # how many tokens a belief weighs against what was counted
_MEMORY = 512  # tokens of a match length; then its counts are halved, so that they follow the traffic


@dataclass(frozen=True, slots=True)
class Match:
    """A chain, the length of the suffix that it continues, and the acceptance to expect of each of its tokens."""

    chain: tuple[int, ...]
    match_length: int
    rate: float = 0.0


NOTHING = Match((), 0)


class SuffixIndex:
    """The tokens of one request, and where each n-gram in them last went on.

    Args:
        shortest, longest: lengths of the suffixes that are looked up.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> place of the token that followed it

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            for gram in _suffixes(self._tokens, self._lengths):
                self._next[gram] = len(self._tokens)
            self._tokens.append(token)

    def propose(self, limit: int) -> Match:
        """Return up to ``limit`` tokens that followed the longest known suffix; a chain may run into itself."""
        for gram in _suffixes(self._tokens, reversed(self._lengths)):
            place = self._next.get(gram)
            if place is not None:
                period = len(self._tokens) - place
                chain = [self._tokens[place + offset % period] for offset in range(limit)]
                return Match(tuple(chain), len(gram))
        return NOTHING

    def suffix(self) -> list[int]:
        """The latest tokens, as many as a lookup can use."""
        return self._tokens[-self._lengths[-1] :]


class OutputStore:
    """Past outputs of one domain, the newest ``max_tokens`` tokens of them."""

    def __init__(self, shortest: int, longest: int, max_tokens: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._max_tokens = max_tokens
        self._outputs: dict[int, tuple[int, ...]] = {}  # oldest first
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}  # n-gram -> output, place of the token after it
        self._added = 0
        self.num_tokens = 0

    def add(self, output: Sequence[int]) -> None:
        """Remember an output; the oldest ones make room."""
        kept = tuple(output)[-self._max_tokens :] if self._max_tokens else ()
        if len(kept) <= self._lengths[0]:
            return
        name, self._added = self._added, self._added + 1
        self._outputs[name] = kept
        self.num_tokens += len(kept)
        for gram, place in self._grams(kept):
            self._places[gram] = (name, place)
        while self.num_tokens > self._max_tokens:
            self._forget(next(iter(self._outputs)))

    def propose(self, suffix: Sequence[int], limit: int) -> Match:
        """Return up to ``limit`` tokens that followed the longest suffix of ``suffix`` in the newest such output."""
        for gram in _suffixes(suffix, reversed(self._lengths)):
            found = self._places.get(gram)
            if found is not None:
                name, place = found
                return Match(self._outputs[name][place : place + limit], len(gram))
        return NOTHING

    def _forget(self, name: int) -> None:
        output = self._outputs.pop(name)
        self.num_tokens -= len(output)
        for gram, _ in self._grams(output):
            found = self._places.get(gram)
            if found is not None and found[0] == name:
                del self._places[gram]

    def _grams(self, output: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
        for place in range(self._lengths[0], len(output)):
            for length in self._lengths:
                if length <= place:
                    yield output[place - length : place], place


@dataclass(slots=True)
class AcceptanceByMatch:
    """P(accepted | reached) of n-gram tokens of one domain, by match length.

    A length that was seldom seen is believed to fare as all of them together do, and those, at first, modestly: a
    chain that is refused costs every row of the batch.
    """

    accepted: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    reached: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, match_length: int, num_accepted: int, num_reached: int) -> None:
        """Count the outcome of one chain."""
        self.accepted[match_length] += num_accepted
        self.reached[match_length] += num_reached
        while self.reached[match_length] >= _MEMORY:
            self.accepted[match_length] /= 2
            self.reached[match_length] /= 2

    def rate(self, match_length: int) -> float:
        """Return the acceptance to expect of each token of a chain."""
        overall = _blended(sum(self.accepted.values()), sum(self.reached.values()), _FIRST_RATE)
        return _blended(self.accepted.get(match_length, 0.0), self.reached.get(match_length, 0.0), overall)


def _blended(accepted: float, reached: float, belief: float) -> float:
    return (accepted + _PRIOR_TOKENS * belief) / (reached + _PRIOR_TOKENS)


def _suffixes(tokens: Sequence[int], lengths: "range | Iterator[int]") -> Iterator[tuple[int, ...]]:
    for length in lengths:
        if length <= len(tokens):
            yield tuple(tokens[len(tokens) - length :])
