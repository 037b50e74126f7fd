"""Thresholds by hand: what a person may set, and for how long.  Asked over HTTP and on the command line."""

import math
from datetime import timedelta

from adaptive_spec.core import DOMAIN_NAME, POOLED, ThresholdOverride
from adaptive_spec.errors import RequestError
from adaptive_spec.records.database import Database
from adaptive_spec.records.overrides import OverrideRecord, set_override
from adaptive_spec.settings import Settings


def override_by_hand(
    database: Database, settings: Settings, domain: str, override: ThresholdOverride, reason: str, hours: float | None
) -> OverrideRecord:
    """Put an override in force on every decoder of the database.

    Args:
        domain: "*": every domain without an override of its own.
        hours: after which it ends; None: ``calibration.override_hours``.

    Raises:
        RequestError: the domain's name, a number or the time is out of bounds, or no reason is given.
    """
    bound = settings.calibration.override_max_hours
    lasts = min(settings.calibration.override_hours, bound) if hours is None else hours
    if not 0 < lasts <= bound:
        raise RequestError(f"hours must be above 0 and at most {bound:g} (calibration.override_max_hours).")
    if domain != POOLED and not DOMAIN_NAME.fullmatch(domain):
        raise RequestError(f"{domain!r} is no domain. Use 1 to 64 of A-Z a-z 0-9 _ . : / -, or * for every domain.")
    if not reason.strip():
        raise RequestError("Say why: an override needs a reason.")
    _check(override, settings.decoder.max_chain_length)
    return set_override(database, domain, override, reason.strip(), timedelta(hours=lasts))


def _check(override: ThresholdOverride, longest: int) -> None:
    numbers = override.numbers
    if not numbers:
        raise RequestError("Set at least one of temperature, offset, warmth, stop_below and max_chain_length.")
    if unbounded := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise RequestError(f"{unbounded[0]} must be a finite number.")
    if override.temperature is not None and override.temperature <= 0:
        raise RequestError("temperature must be above 0; 1 leaves confidences as they are.")
    if override.stop_below is not None and not 0 <= override.stop_below <= 1:
        raise RequestError("stop_below is a probability, from 0 (never stops) to 1.")
    if override.max_chain_length is not None and not 0 <= override.max_chain_length <= longest:
        raise RequestError(f"max_chain_length must be from 0 (no speculation) to {longest} (decoder.max_chain_length).")
