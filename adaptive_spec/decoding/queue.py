"""The requests that wait for a row.  Domains take turns, so that one which floods the queue delays none but itself.

Within a domain the first comes first.  ``push``, ``pop`` and ``remove`` take the same time however many wait.  Not
safe between threads: the engine holds its lock.
"""

import math
from collections import OrderedDict

from adaptive_spec.decoding.stream import Choice


class FairQueue:
    """Round-robin over domains, first in first out within each."""

    def __init__(self) -> None:
        self._domains: OrderedDict[str, OrderedDict[str, Choice]] = OrderedDict()  # the front one is served next
        self._domain_of: dict[str, str] = {}  # by request id
        self._first_deadline = math.inf  # no choice that waits ends earlier

    def __len__(self) -> int:
        return len(self._domain_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._domain_of

    def push(self, choice: Choice) -> None:
        """Add a choice at the end of its domain."""
        request = choice.request
        self._domains.setdefault(request.domain, OrderedDict())[request.request_id] = choice
        self._domain_of[request.request_id] = request.domain
        self._first_deadline = min(self._first_deadline, choice.deadline)

    def pop(self) -> Choice | None:
        """Take the first choice of the domain whose turn it is; None when nothing waits."""
        if not self._domains:
            return None
        domain = next(iter(self._domains))
        choice = self.remove(next(iter(self._domains[domain])))
        if domain in self._domains:
            self._domains.move_to_end(domain)
        return choice

    def remove(self, request_id: str) -> Choice | None:
        """Take a choice out wherever it stands; None when it does not wait."""
        domain = self._domain_of.pop(request_id, None)
        if domain is None:
            return None
        choice = self._domains[domain].pop(request_id)
        if not self._domains[domain]:
            del self._domains[domain]
        return choice

    def expired(self, now: float) -> list[Choice]:
        """Take out every choice whose deadline has passed.  Looks at them all, but only when one may have."""
        if now < self._first_deadline:
            return []
        waiting = [choice for domain in self._domains.values() for choice in domain.values()]
        late = [choice for choice in waiting if choice.deadline <= now]
        for choice in late:
            self.remove(choice.request.request_id)
        self._first_deadline = min((choice.deadline for choice in waiting if choice.deadline > now), default=math.inf)
        return late
