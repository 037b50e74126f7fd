"""A calibration as a line of a table: what changed, and what later requests said of it."""

from collections.abc import Mapping
from typing import Any

from adaptive_spec.core import POOLED

_SOURCES = {
    "own": "own",
    "own_scaling": "own scaling, pooled lengths",
    "pooled": "pooled",
    "kept": "kept: too little data",
}


def row(calibration: Mapping[str, Any]) -> dict[str, str]:
    """Sum up one entry of ``GET /api/calibrations``.

    Errors and goodput are those of the numbers that the earlier requests taught, on the later ones.
    """
    report = calibration["report"]
    told = {
        "domain": "all together" if calibration["domain"] == POOLED else calibration["domain"],
        "release": str(calibration["release"]),
        "numbers": _SOURCES.get(report["source"], report["source"]),
        "observations": str(report.get("num_observations", 0)),
    }
    if "old" not in report:
        return told | dict.fromkeys(
            ("temperature", "offset", "warmth", "calibration error", "stop below × longest", "goodput"), ""
        )
    old, new, later = report["old"], report["new"], report["later"]
    told |= {
        "temperature": f"{old['temperature']:.2f} → {new['temperature']:.2f}",
        "offset": f"{old['offset']:+.2f} → {new['offset']:+.2f}",
        "calibration error": "too few later requests",
        "stop below × longest": f"{_lengths(old)} → {_lengths(new)}",
        "goodput": "too few later requests",
    }
    if later is not None:
        errors, goodput, ratio = later["calibration"], later["goodput"], later["goodput_ratio"]
        told["calibration error"] = (
            f"{errors['now']['error']:.1%} → {errors['new']['error']:.1%} (raw {errors['uncalibrated']['error']:.1%}, "
            f"chance {errors['new']['by_chance']:.1%})"
        )
        told["goodput"] = (
            f"{goodput['now']:.1f} → {goodput['new']:.1f} tokens/s [{ratio['low'] - 1:+.1%}, {ratio['high'] - 1:+.1%}]"
        )
    return told


def _lengths(numbers: Mapping[str, Any]) -> str:
    longest = numbers["max_chain_length"]
    return f"{numbers['stop_below']:.2f} × {longest}" if longest else "off"
