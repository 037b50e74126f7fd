"""Thresholds that a person has set, as a decoder holds them: each ends at its time, also when nobody says so.

Of the engine's thread; whoever reads the database makes a new one when something has changed.
"""

import time
from collections.abc import Mapping

from adaptive_spec.core import POOLED, ThresholdOverride


class Overrides:
    """Those of each domain.

    Args:
        by_domain: the override and how many seconds it still has; that of ``POOLED`` serves domains without their own.
    """

    def __init__(self, by_domain: Mapping[str, tuple[ThresholdOverride, float]] | None = None) -> None:
        now = time.monotonic()
        self._by_domain = {name: (override, now + left) for name, (override, left) in (by_domain or {}).items()}

    def of(self, domain: str) -> ThresholdOverride | None:
        """The one in force for a domain now."""
        if not self._by_domain:  # asked for every row of every step
            return None
        for name in (domain, POOLED):
            override, ends = self._by_domain.get(name, (None, 0.0))
            if override is not None and time.monotonic() < ends:
                return override
        return None
