"""The prefix cache: keys and values of texts seen before, for the next prompts that begin alike.

Kept in blocks of a few tokens.  A block is named by a digest of all tokens up to its end, so equal names mean equal
contents whoever asked; the block least recently used makes room.  One cache per model, under names of its weights where
these change: what other weights have computed is not found any more, and makes room in its turn.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile

from torch import Tensor

from adaptive_spec.decoding.cache import RaggedCache

BLOCK_TOKENS = 32


class PrefixCache:
    """Blocks of one model's cache, at most ``max_tokens`` tokens of them."""

    def __init__(self, cache: RaggedCache, max_tokens: int) -> None:
        self._cache = cache
        self._room = max_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_recalled = 0  # tokens that were not computed again

    @property
    def num_tokens(self) -> int:
        return len(self._blocks) * BLOCK_TOKENS

    def recall(self, row: int, tokens: Sequence[int], weights: str = "") -> int:
        """Copy the longest known beginning of ``tokens`` into a row; return its length.

        Args:
            weights: names whose keys and values they are, where a cache serves several models.
        """
        names = takewhile(self._blocks.__contains__, _names(tokens, weights) if self._blocks else ())
        found = list(names)
        for index, name in enumerate(found):
            self._cache.write(row, index * BLOCK_TOKENS, self._blocks[name])
        self._used(found)
        self.num_recalled += len(found) * BLOCK_TOKENS
        return len(found) * BLOCK_TOKENS

    def remember(self, row: int, tokens: Sequence[int], weights: str = "") -> None:
        """Keep the blocks of a row that holds ``tokens``."""
        names = list(_names(tokens, weights) if self._room else ())[: self._room]
        for index, name in enumerate(names):
            if name not in self._blocks:
                start = index * BLOCK_TOKENS
                self._blocks[name] = self._cache.copy(row, start, start + BLOCK_TOKENS)
        self._used(names)
        while len(self._blocks) > self._room:
            self._blocks.popitem(last=False)

    def _used(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):  # a block is of use only with those before it, so they go last
            self._blocks.move_to_end(name)

    def forget(self) -> None:
        """What is kept is of other weights, or cannot be trusted."""
        self._blocks.clear()


def _names(tokens: Sequence[int], weights: str) -> Iterator[bytes]:
    """The names of the whole blocks that ``tokens`` begin with."""
    name = weights.encode()
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        name = blake2b(name + array("q", tokens[start : start + BLOCK_TOKENS]).tobytes(), digest_size=16).digest()
        yield name
