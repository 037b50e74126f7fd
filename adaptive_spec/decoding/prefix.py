"""The prefix cache: keys and values of prompts seen before, for the next prompts that begin alike.

Kept in blocks of a few tokens.  A block is named by all tokens up to its end, so equal names mean equal contents
whoever asked; the block least recently used makes room.  One cache per model: the draft's is forgotten when its weights
change.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from adaptive_spec.decoding.cache import RaggedCache

BLOCK_TOKENS = 32


class PrefixCache:
    """Blocks of one model's cache, at most ``max_tokens`` tokens of them."""

    def __init__(self, cache: RaggedCache, max_tokens: int) -> None:
        self._cache = cache
        self._room = max_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, tuple[tuple[int, ...], Tensor]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return len(self._blocks) * BLOCK_TOKENS

    def recall(self, row: int, tokens: Sequence[int]) -> int:
        """Copy the longest known beginning of ``tokens`` into a row; return its length."""
        length = 0
        for name, block in _blocks(tokens):
            found = self._blocks.get(name)
            if found is None or found[0] != block:
                break
            self._blocks.move_to_end(name)
            self._cache.write(row, length, found[1])
            length += BLOCK_TOKENS
        return length

    def remember(self, row: int, tokens: Sequence[int]) -> None:
        """Keep the blocks of a row that holds ``tokens``."""
        if not self._room:
            return
        for index, (name, block) in enumerate(_blocks(tokens)):
            if index >= self._room:
                return
            if name not in self._blocks:
                start = index * BLOCK_TOKENS
                self._blocks[name] = (block, self._cache.copy(row, start, start + BLOCK_TOKENS))
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._room:
            self._blocks.popitem(last=False)

    def forget(self) -> None:
        """The model has other weights now."""
        self._blocks.clear()


def _blocks(tokens: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each whole block with its name, a hash of everything up to its end."""
    name = 0
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = tuple(tokens[start : start + BLOCK_TOKENS])
        name = hash((name, block))
        yield name, block
