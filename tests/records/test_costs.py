"""Costs are kept under their key, the newest only."""

from datetime import UTC, datetime, timedelta

from adaptive_spec.records.costs import get_cost, list_costs, save_cost
from adaptive_spec.records.database import Database


def test_the_newest_model_of_a_key(database: Database) -> None:
    assert get_cost(database, "box") is None
    save_cost(database, "box", {"measured": {"1": [0.5]}})
    save_cost(database, "box", {"measured": {"1": [0.25]}})
    save_cost(database, "other", {})
    found = get_cost(database, "box")
    assert list(list_costs(database)) == ["other", "box"]
    assert list_costs(database)["box"] == found
    assert found is not None and found.model == {"measured": {"1": [0.25]}}
    assert abs(datetime.now(UTC) - found.measured_at) < timedelta(minutes=5)
