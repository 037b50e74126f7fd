"""Simulate length policies on a database's recorded traffic.  Called by the command line; it only reads.

Everything but the cost of a step is taken from the records: what was observed, the live release's thresholds, the
domains' shares of the traffic.  The cost is the stored one of this machine, a stored one by its key, or out of a file.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adaptive_spec.calibration.cost import CostModel, this_hardware
from adaptive_spec.calibration.outcomes import Simulation
from adaptive_spec.calibration.simulate import simulate
from adaptive_spec.core import StepCost
from adaptive_spec.errors import NotEnoughDataError, SettingsError
from adaptive_spec.records.calibrations import thresholds_of
from adaptive_spec.records.costs import list_costs
from adaptive_spec.records.database import Database
from adaptive_spec.records.observations import observations
from adaptive_spec.records.releases import list_releases, live_version
from adaptive_spec.records.statistics import domain_statistics
from adaptive_spec.settings import Settings

NEWEST_STEPS = 50_000
_SERVE = (
    "Run `adaptive-spec serve` with this database once, which measures and stores them, or name a file with --cost."
)


@dataclass(frozen=True, slots=True)
class RecordedSimulation:
    """A simulation and what of the records it is about.  domain: the only one asked for, None: all and their mix."""

    simulation: Simulation
    release: int
    drafter: str
    domain: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {"release": self.release, "drafter": self.drafter, **self.simulation.to_dict()}


def simulate_records(
    database: Database,
    settings: Settings,
    *,
    domain: str | None = None,
    release: int | None = None,
    drafter: str = "model",
    rows: int = 1,
    split: float = 0.5,
    cost: str | None = None,
    seed: int = 0,
) -> RecordedSimulation:
    """Judge every policy on what a release showed.

    Args:
        domain: judge only this one; the pooled policies still learn from all.
        release: None is the live one.  Confidences of different drafts do not mix.
        rows: of the steps whose cost is charged.
        cost: a stored cost's key or a file (see ``find_cost``).

    Raises:
        SettingsError: the drafter cannot be simulated, or no cost is known for so many rows.
        NotEnoughDataError: too little is on record, or nothing of the domain.
    """
    if drafter != "model":
        raise SettingsError(
            f"Chains of {drafter!r} cannot be simulated: an n-gram chain ends where its match ends, and what a longer "
            "one would have brought is not on record. Leave --drafter out."
        )
    version = live_version(database) if release is None else release
    step_cost = _cost_of(find_cost(database, cost), rows)
    seen = observations(database, release=version, drafter=drafter, limit=NEWEST_STEPS)
    if domain is not None and domain not in seen:
        known = f"those with some: {', '.join(seen)}" if seen else "no domain has any"
        raise NotEnoughDataError(f"Release {version} drafted nothing in domain {domain!r} yet; {known}.")
    parents = {record.version: record.parent for record in list_releases(database)}
    try:
        found = simulate(
            seen,
            step_cost,
            thresholds_of(database, version, parents),
            settings.calibration,
            traffic={part.domain: part.num_emitted_tokens for part in domain_statistics(database, release=version)},
            max_chain_length=settings.decoder.max_chain_length,
            rows=rows,
            split=split,
            seed=seed,
        )
    except NotEnoughDataError as error:
        raise NotEnoughDataError(f"Release {version}: {error}") from error
    return RecordedSimulation(_only(found, domain), version, drafter, domain)


def _only(found: Simulation, domain: str | None) -> Simulation:
    if domain is None:
        return found
    for small in found.too_small:
        if small.domain == domain:
            raise NotEnoughDataError(f"Domain {domain!r} has only {small.reason} on record. Serve more of it first.")
    return replace(found, domains=(found.domain(domain),), mix=(), too_small=())


def _cost_of(model: CostModel, rows: int) -> StepCost:
    """Between what was measured, never beyond."""
    most = max(model.measured)
    if rows > most:
        measured = f"1 to {most} rows" if most > 1 else "1 row only"
        raise SettingsError(
            f"The cost {model.step.key!r} was measured for steps of {measured}; "
            f"{rows} rows would be a guess. Lower --batch, or raise decoder.slots and start the service once."
        )
    return model.at(rows)


def find_cost(database: Database, named: str | None) -> CostModel:
    """Return the stored cost of this machine, a stored one by its key, or one out of a JSON file.

    The file holds what ``CostModel.to_dict`` returns, one step's cost (draft_seconds, verify_seconds, key), or is the
    ``release.json`` of a release, which carries the cost that it was calibrated with.

    Raises:
        SettingsError: there is none, there are several, or it is malformed.
    """
    stored = list_costs(database)
    if named is None:
        here = [key for key in stored if key.startswith(this_hardware() + "|")]
        if len(here) != 1:
            raise SettingsError(_which(here, list(stored)))
        named = here[0]
    try:
        if named in stored:
            return CostModel.from_dict(stored[named].model, named)
        return _read(Path(named), list(stored))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"The cost {named} cannot be read: {error}. {_SERVE}") from error


def _which(here: list[str], stored: list[str]) -> str:
    if here:
        return f"Several costs were measured on this machine; name one with --cost: {', '.join(map(repr, here))}."
    if stored:
        return (
            "The stored costs were measured on other machines; name one with --cost to simulate it: "
            f"{', '.join(map(repr, stored))}."
        )
    return f"No cost of a step is stored, and without one goodput cannot be told. {_SERVE}"


def _read(path: Path, stored: list[str]) -> CostModel:
    if not path.is_file():
        known = f" Stored are: {', '.join(map(repr, stored))}." if stored else ""
        raise SettingsError(f"{str(path)!r} is neither the key of a stored cost nor a file.{known} {_SERVE}")
    value = json.loads(path.read_text())
    value = value.get("provenance", {}).get("cost", value)
    if "measured" in value:
        return CostModel.from_dict(value, value["key"])
    step = StepCost(float(value["draft_seconds"]), tuple(map(float, value["verify_seconds"])), str(value["key"]))
    return CostModel.from_dict(CostModel({1: step}).to_dict(), step.key)  # which checks the numbers
