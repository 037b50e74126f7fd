"""How far chains of the draft model live in a domain, counted while decoding.

Counted on steps whose length was fixed beforehand, by the request or by exploring: where a policy looked at confidences
before it went on, positions reached are no fair sample.
"""

from collections.abc import Sequence

_ENOUGH = 16  # chains; with fewer nothing is known
_MEMORY = 512  # chains; then all counts are halved, so that what is counted follows the traffic


class SurvivalCounter:
    """P(position accepted | reached), by position."""

    def __init__(self) -> None:
        self._reached: list[float] = []
        self._accepted: list[float] = []

    def add(self, chain_length: int, num_accepted: int) -> None:
        """Count one chain of a length that was fixed beforehand."""
        missing = chain_length - len(self._reached)
        self._reached += [0] * missing
        self._accepted += [0] * missing
        for position in range(min(num_accepted + 1, chain_length)):
            self._reached[position] += 1
            self._accepted[position] += position < num_accepted
        if self._reached and self._reached[0] >= _MEMORY:
            self._reached = [count / 2 for count in self._reached]
            self._accepted = [count / 2 for count in self._accepted]

    def curve(self, belief: Sequence[float] = ()) -> tuple[float, ...]:
        """Return the survival of each position; those that hardly any chain reached live as the one before.

        Empty while nothing is known.

        Args:
            belief: what was thought before counting; it weighs as much as ``_ENOUGH`` chains.
        """
        if not self._reached or self._reached[0] < _ENOUGH:
            return ()
        curve: list[float] = []
        for place, (reached, accepted) in enumerate(zip(self._reached, self._accepted, strict=True)):
            if place < len(belief):
                curve.append((accepted + _ENOUGH * belief[place]) / (reached + _ENOUGH))
            else:
                curve.append(accepted / reached if reached >= _ENOUGH // 2 else curve[-1])
        return tuple(curve)
