"""Which rule judges each row, what its domain may still spend, and the account of what it spent."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from adaptive_spec.core import Release, Request, Rule
from adaptive_spec.decoding.budget import Budget
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.settings import VerificationSettings

OnEvent = Callable[[str, dict[str, Any], str], None]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The rows of one step that are judged by relaxed rules.

    groups: the rows of each rule.  allowance: of every row of the batch, tokens that may diverge in this step.
    """

    groups: tuple[tuple[Rule, list[int]], ...]
    allowance: list[int]

    @property
    def rows(self) -> list[int]:
        return sorted(row for _, rows in self.groups for row in rows)

    def verifier(self, row: int) -> str:
        """The verifier in force."""
        return next((rule.verifier for rule, rows in self.groups if row in rows), "exact")


class Rules:
    """Chooses rules and keeps the domains' budgets.  Of the engine's thread; others may read ``budgets``."""

    def __init__(self, settings: VerificationSettings, on_event: OnEvent) -> None:
        self.budgets: dict[str, Budget] = {}
        self._settings = settings
        self._on_event = on_event
        self._turn = 0
        self._choose = lru_cache(maxsize=1024)(settings.choice)  # asked for every row of every step

    def rule_of(self, request: Request, release: Release) -> Rule:
        """The rule that ``VerificationSettings.choice`` finds for a request."""
        return self._choose(request.domain, release.for_domain(request.domain).rule, request.params.verifier)

    def is_exact(self, request: Request, release: Release) -> bool:
        """Whether nothing but exact verification can judge a request."""
        return self.rule_of(request, release).verifier == "exact" or not self._settings.budget(request.domain)

    def plan(self, slots: Sequence[Slot]) -> Relaxation | None:
        """Say which rows may keep more than exact verification would; None when none may."""
        groups: dict[Rule, list[int]] = defaultdict(list)
        of_domain: dict[str, list[int]] = defaultdict(list)
        allowance = [0] * len(slots)
        for row, slot in enumerate(slots):
            if not self.is_exact(slot.request, slot.release):
                of_domain[slot.request.domain].append(row)
        self._turn += 1
        for domain, rows in of_domain.items():
            share, left = divmod(self._budget(domain).allowance, len(rows))
            first = self._turn % len(rows)  # what cannot be shared out goes to another row every time
            for place, row in enumerate([*rows[first:], *rows[:first]]):
                allowance[row] = share + (place < left)
                if allowance[row]:
                    groups[self.rule_of(slots[row].request, slots[row].release)].append(row)
        if not groups:
            return None
        return Relaxation(tuple((rule, sorted(rows)) for rule, rows in groups.items()), allowance)

    def count(self, slot: Slot, num_emitted: int, num_divergent: int, wanted_more: bool) -> None:
        """Account for what a step of a row emitted."""
        if self.is_exact(slot.request, slot.release):
            return
        domain = slot.request.domain
        budget = self._budget(domain)
        changed = budget.count(num_emitted, num_divergent, wanted_more)
        if changed is not None:
            detail = {
                "budget": budget.share,
                "divergence_share": budget.num_divergent / budget.num_emitted,
                "num_fallbacks": budget.num_fallbacks,
                "exact_for_tokens": budget.waits_for,
            }
            self._on_event(f"divergence_budget_{changed}", detail, domain)

    def _budget(self, domain: str) -> Budget:
        if domain not in self.budgets:
            settings = self._settings
            self.budgets[domain] = Budget(settings.budget(domain), settings.budget_window_tokens)
        return self.budgets[domain]
