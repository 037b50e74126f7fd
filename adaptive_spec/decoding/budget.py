"""The divergence budget of a domain: how many of its tokens may be ones that exact verification would have refused.

A domain earns ``share`` of a token with every token it emits, from nothing, and pays one for every token that diverges;
what it does not have it cannot spend.  So at every moment, whatever the traffic, diverging tokens are at most ``share``
of emitted ones, and at most ``share`` of any stretch plus what was saved up before: ``share`` of ``window_tokens``.

A domain that spends everything is over its budget: its thresholds are too loose for its traffic.  It falls back to
exact verification altogether for half a window, and for twice as long each time that happens again soon.
"""

from dataclasses import dataclass

_LONGEST_WAIT = 64  # times half a window
_UNLIMITED = 1 << 30  # a budget of 1 lets every token diverge
_EPSILON = 1e-9  # sums of shares may miss a whole token by rounding


@dataclass(slots=True)
class Budget:
    """Of one domain.

    share: the budget.  num_emitted, num_divergent: tokens of requests under a relaxed verifier.  waits_for: tokens to
    go in the fallback; 0: relaxed verification is in force.
    """

    share: float
    window_tokens: int
    num_emitted: int = 0
    num_divergent: int = 0
    num_fallbacks: int = 0
    waits_for: int = 0
    _credit: float = 0.0
    _wait: int = 1  # of the last fallback, in half windows
    _since: int = 0  # tokens since the last fallback ended

    @property
    def fallen_back(self) -> bool:
        return self.waits_for > 0

    @property
    def allowance(self) -> int:
        """Tokens that may diverge now."""
        if self.share >= 1:
            return _UNLIMITED
        return 0 if self.fallen_back else int(self._credit + _EPSILON)

    def count(self, num_emitted: int, num_divergent: int, wanted_more: bool) -> str | None:
        """Count what a step emitted.

        Args:
            num_divergent: at most the allowance.
            wanted_more: a token was refused because the allowance was spent.

        Returns:
            "spent" where the fallback begins, "restored" where it ends, else None.
        """
        self.num_emitted += num_emitted
        self.num_divergent += num_divergent
        if self.share >= 1:
            return None
        left = self._credit - num_divergent
        full = max(1.0, self.share * self.window_tokens) if self.share else 0.0
        self._credit = min(full, left + self.share * num_emitted)
        if self.fallen_back:
            self.waits_for = max(0, self.waits_for - num_emitted)
            return None if self.fallen_back else "restored"
        self._since += num_emitted
        if not wanted_more or left + _EPSILON >= 1:
            return None
        soon = self.num_fallbacks and self._since < self.window_tokens
        self._wait = min(_LONGEST_WAIT, 2 * self._wait) if soon else 1
        self._since = 0
        self.num_fallbacks += 1
        self.waits_for = max(1, self._wait * self.window_tokens // 2)
        return "spent"
