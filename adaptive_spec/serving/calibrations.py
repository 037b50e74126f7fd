"""A calibration in words: what changed, and what later requests said of it."""

from collections.abc import Iterator, Mapping
from typing import Any

from adaptive_spec.core import POOLED

_SOURCES = {
    "own": "its own numbers",
    "own_scaling": "its own scaling, the lengths of all domains",
    "pooled": "the numbers of all domains",
    "kept": "unchanged, too little is on record",
}


def told(calibration: Mapping[str, Any]) -> str:
    """Tell of one entry of ``GET /api/calibrations``.

    Errors and goodput are those of what the earlier requests taught, judged on the later ones.
    """
    report = calibration["report"]
    name = "all domains together" if calibration["domain"] == POOLED else calibration["domain"]
    source = _SOURCES.get(report["source"], report["source"])
    head = f"{name}, release {calibration['release']}: {source}; {report['num_observations']} observations"
    if "num_requests" in report:
        head += f" of {report['num_requests']} requests"
    return "\n".join([head, *(f"  {label:<12} {text}" for label, text in _lines(report))])


def _lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "old" in report:
        old, new = report["old"], report["new"]
        yield "scaling", f"{_scaling(old)} -> {_scaling(new)}"
        if (later := report["later"]) is None:
            yield "error", "too few later requests to tell"
        else:
            errors = {name: check["error"] for name, check in later["calibration"].items()}
            chance = later["calibration"]["new"]["by_chance"]
            yield (
                "error",
                f"{errors['now']:.1%} -> {errors['new']:.1%} on {later['num_requests']} later requests "
                f"(uncalibrated {errors['uncalibrated']:.1%}, by chance {chance:.1%})",
            )
        yield "lengths", f"{_lengths(old)} -> {_lengths(new)}"
        if later is not None:
            goodput, ratio = later["goodput"], later["goodput_ratio"]
            yield (
                "goodput",
                f"{goodput['now']:.2f} -> {goodput['new']:.2f} tokens/s predicted on them "
                f"[{ratio['low'] - 1:+.1%}, {ratio['high'] - 1:+.1%}]",
            )
    if matches := report.get("ngram"):
        rates = (f"{one['match_length']}: {one['rate']:.2f} of {one['num_reached']}" for one in matches)
        yield "n-grams", "accepted by match length " + ", ".join(rates)
    if sampling := report.get("sampling"):
        yield "sampling", f"draft temperature {sampling['temperature']:g} ({sampling['reason']})"
    if rule := report.get("rule"):
        numbers = ", ".join(f"{name} {value}" for name, value in rule["numbers"].items())
        yield (
            "verifier",
            f"{rule['verifier']} {numbers}".rstrip() + f" ({rule['reason']}, {rule['num_requests']} requests)",
        )


def _scaling(numbers: Mapping[str, Any]) -> str:
    return f"temperature {numbers['temperature']:.2f} offset {numbers['offset']:+.2f} warmth {numbers['warmth']:+.2f}"


def _lengths(numbers: Mapping[str, Any]) -> str:
    longest = numbers["max_chain_length"]
    return f"stop below {numbers['stop_below']:.2f}, at most {longest}" if longest else "no speculation"
