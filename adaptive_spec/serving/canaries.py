"""A canary in words: how it does beside the live release."""

from collections.abc import Mapping
from typing import Any

from adaptive_spec.core import POOLED


def told(canary: Mapping[str, Any]) -> str:
    """Tell of ``running`` of ``GET /api/canary``."""
    head = f"Release {canary['release']} serves {canary['share']:.0%} of requests beside release {canary['live']}"
    report = canary["report"]
    if not report:
        return f"{head}; no request of it has ended yet."
    lines = [
        f"{head}: {report['num_canary_requests']} requests against {report['num_live_requests']}. {report['reason']}."
    ]
    for one in report["comparisons"]:
        where = "all domains" if one["domain"] == POOLED else one["domain"]
        lines.append(
            f"  {where}: {one['number'].replace('_', ' ')} {one['live']:.3g} -> {one['canary']:.3g} "
            f"({one['num_pairs']} pairs, difference in [{one['low']:+.3f}, {one['high']:+.3f}])"
        )
    return "\n".join(lines)
