"""What the gate said of a candidate: named checks, each with its verdict, its reason in a sentence and its figures.

Written into the bundle's provenance and the release's row, and shown as it is by ``releases show`` and over HTTP.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

INTEGRITY = "integrity"  # the only check over which nobody can publish


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer.  figures: numbers behind it, in JSON types; what is not finite becomes None."""

    name: str
    passed: bool
    reason: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {"name": self.name, "passed": self.passed, "reason": self.reason, "figures": _finite(self.figures)}


@dataclass(frozen=True, slots=True)
class GateReport:
    """The verdict.  domains: flat records, all requests first under ``POOLED``."""

    checks: tuple[Check, ...]
    domains: tuple[Mapping[str, Any], ...] = ()

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def reasons(self) -> list[str]:
        """Why it did not pass; empty when it did."""
        return [f"{check.name}: {check.reason}" for check in self.checks if not check.passed]

    def with_checks(self, more: Sequence[Check]) -> "GateReport":
        """The same with further checks before its own."""
        return GateReport((*more, *self.checks), self.domains)

    def to_dict(self) -> dict[str, Any]:
        """Return what the database and the API show."""
        return {
            "passed": self.passed,
            "reasons": self.reasons,
            "checks": [check.to_dict() for check in self.checks],
            "domains": [_finite(row) for row in self.domains],
        }


def failed_checks(report: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The checks of a stored report that did not pass."""
    return (check for check in report.get("checks", ()) if not check["passed"])


def verdict(report: Mapping[str, Any]) -> str:
    """What became of a release at the gate, in a few words; ``report`` as it is stored in its row."""
    if not report.get("checks"):
        return str(report.get("kind") or {True: "passed", False: "refused"}.get(report.get("passed", ""), ""))
    failed = ", ".join(str(check["name"]) for check in failed_checks(report))
    if override := report.get("override"):
        return f"forced over {', '.join(override['checks'])}: {override['reason']}"
    return f"refused: {failed}" if failed else "passed"


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
