"""The reader's end of a request: its choices on the way in, their deltas on the way out."""

import queue
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from adaptive_spec.core import Request
from adaptive_spec.decoding.slot import Delta, deadline_of


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers that a request wants, as a request of its own, before it has a row."""

    request: Request
    put: Callable[[Delta], None]
    submitted: float

    @property
    def deadline(self) -> float:
        return deadline_of(self.request, self.submitted)


class Stream:
    """What a submitter reads.  Deltas of several choices come as they are decoded, each with its index."""

    def __init__(self, request: Request, cancel: Callable[[str], None]) -> None:
        self.request = request
        self.submitted = time.perf_counter()
        self.choices = [
            Choice(one, self._putter(index), self.submitted) for index, one in enumerate(_requests(request))
        ]
        self._cancel = cancel
        self._ended: set[int] = set()
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()

    def events(self) -> Iterator[Delta]:
        """Yield deltas until every choice has had the one with its finish reason; blocks between them."""
        left = len(self.choices)
        while left:
            delta = self._deltas.get()
            yield delta
            left -= delta.finish_reason is not None

    def collect(self) -> tuple[str, list[int], Delta]:
        """Wait for the end; return the text, the tokens and the last delta of the first choice."""
        return self.collect_all()[0]

    def collect_all(self) -> list[tuple[str, list[int], Delta]]:
        """Wait for the end; return text, tokens and last delta of every choice."""
        deltas: list[list[Delta]] = [[] for _ in self.choices]
        for delta in self.events():
            deltas[delta.index].append(delta)
        return [
            ("".join(delta.text for delta in own), [token for delta in own for token in delta.token_ids], own[-1])
            for own in deltas
        ]

    def cancel(self) -> None:
        """Stop the request between two steps; what has not ended yet ends with reason ``cancelled``."""
        for index, choice in enumerate(self.choices):
            if index not in self._ended:
                self._cancel(choice.request.request_id)

    def _putter(self, index: int) -> Callable[[Delta], None]:
        """The engine's end of one choice."""

        def put(delta: Delta) -> None:
            if delta.finish_reason is not None:
                self._ended.add(index)
            self._deltas.put(replace(delta, index=index))

        return put


def _requests(request: Request) -> list[Request]:
    """One request per choice.  The first keeps the request's seed, the others' are derived from it."""
    params = request.params
    if params.n == 1:
        return [request]
    return [
        replace(
            request,
            request_id=f"{request.request_id}-{index}",
            params=replace(params, n=1, seed=_seed(params.seed, index)),
        )
        for index in range(params.n)
    ]


def _seed(seed: int | None, index: int) -> int | None:
    if seed is None or index == 0:
        return seed
    return random.Random(f"{seed}/{index}").getrandbits(63)
