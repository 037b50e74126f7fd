"""What a query of statistics is about, as conditions on each of the tables that it reads."""

from dataclasses import dataclass
from typing import Any

from adaptive_spec.records.rollups import ANY, ANY_RELEASE
from adaptive_spec.records.tables import RequestCountRow, RequestRow


@dataclass(frozen=True, slots=True)
class Slice:
    """Which steps and requests; None: all."""

    domain: str | None = None
    release: int | None = None
    policy: str | None = None
    drafter: str | None = None
    verifier: str | None = None

    def of(self, table: Any, *names: str) -> list[Any]:
        """The conditions on these columns."""
        wanted = {name: getattr(self, name) for name in names}
        return [getattr(table, name) == value for name, value in wanted.items() if value is not None]

    def of_steps(self, table: Any) -> list[Any]:
        return self.of(table, "domain", "release", "policy", "drafter", "verifier")

    def of_counts(self) -> list[Any]:
        """The kind of step by which requests are counted."""
        counts = RequestCountRow
        return [
            *self.of(counts, "domain", "policy"),
            counts.release == (ANY_RELEASE if self.release is None else self.release),
            counts.drafter == (ANY if self.drafter is None else self.drafter),
            counts.verifier == (ANY if self.verifier is None else self.verifier),
        ]

    def of_requests(self) -> list[Any]:
        """Raw requests, of which the release is the only one."""
        conditions = self.of(RequestRow, "domain", "policy")
        if self.release is not None:
            conditions += [RequestRow.first_release == self.release, RequestRow.last_release == self.release]
        return conditions
