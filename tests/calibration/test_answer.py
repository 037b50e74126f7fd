"""What drifts set going, and what they do not, under the cool-down."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from adaptive_spec.calibration import answer as answer_module
from adaptive_spec.calibration.answer import DriftAnswers
from adaptive_spec.calibration.drift import Shift
from adaptive_spec.calibration.watch import Drift, Source
from adaptive_spec.errors import RunError
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import list_events
from adaptive_spec.records.tables import EventRow
from adaptive_spec.settings import DriftSettings


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'records.db'}")
    database.upgrade()
    yield database
    database.close()


def drift(stream: str = "acceptance", direction: str = "down", domain: str = "code", drafter: str = "model") -> Drift:
    return Drift(Source(domain, drafter, "exact"), stream, 0, Shift(direction, 0.6, 0.4, 500, 70, 90))


class Actions:
    """What was asked for."""

    def __init__(self, database: Database, **settings: Any) -> None:
        self.taken: list[Any] = []
        self.busy = False
        self.answers = DriftAnswers(
            database, DriftSettings(**settings), calibrate=self._calibrate, retrain=lambda: self._take("retrain")
        )

    def _calibrate(self, domain: str, after_step: int) -> str:
        return self._take((domain, after_step))

    def _take(self, what: Any) -> str:
        if self.busy:
            raise RunError("Run 5 is active; wait for it.")
        self.taken.append(what)
        return "done"


def told(database: Database) -> list[dict[str, Any]]:
    return [event.detail for event in reversed(list_events(database, kind="drift_answer"))]


@pytest.mark.parametrize("triggers", ["events", "calibrate", "retrain"])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("stream", ["acceptance", "calibration"])
@pytest.mark.parametrize("direction", ["down", "up"])
def test_what_fits_is_done(database: Database, triggers: str, drafter: str, stream: str, direction: str) -> None:
    actions = Actions(database, triggers=triggers)
    actions.answers.answer([drift(stream, direction, drafter=drafter)])
    if triggers == "events":
        assert actions.taken == [] and told(database) == []
        return
    (answer,) = told(database)
    if drafter == "ngram" or (stream, direction) == ("acceptance", "up"):
        assert actions.taken == [] and (answer["action"], answer["started"]) == ("nothing", False)
    elif stream == "acceptance" and triggers == "retrain":
        assert actions.taken == ["retrain"] and answer["started"]
    else:
        assert actions.taken == [("code", 70)] and (answer["action"], answer["started"]) == ("calibrate", True)


def test_cool_down(database: Database) -> None:
    actions = Actions(database, triggers="retrain", cooldown_hours=6)
    actions.answers.answer([drift(), drift(domain="prose"), drift("calibration"), drift("calibration", domain="prose")])
    assert actions.taken == ["retrain", ("code", 70), ("prose", 70)]
    assert "not now, because a drift did the same" in told(database)[1]["reason"]
    again = Actions(database, triggers="retrain", cooldown_hours=6)  # another life knows of it
    again.answers.answer([drift(), drift("calibration")])
    assert again.taken == [] and [answer["started"] for answer in told(database)[-2:]] == [False, False]
    with database.session_scope() as session:
        session.execute(update(EventRow).values(at=datetime.now(UTC) - timedelta(hours=6, minutes=1)))
    again.answers.answer([drift(), drift("calibration")])
    assert again.taken == ["retrain", ("code", 70)]
    with database.session_scope() as session:  # the clock was ahead then
        session.execute(update(EventRow).values(at=datetime.now(UTC) + timedelta(days=400)))
    again.answers.answer([drift()])
    assert again.taken == ["retrain", ("code", 70), "retrain"]


def test_what_could_not_start_is_told_and_cools_nothing(database: Database) -> None:
    actions = Actions(database, triggers="retrain")
    actions.busy = True
    actions.answers.answer([drift()])
    (answer,) = told(database)
    assert answer["reason"] == "not now, because Run 5 is active; wait for it." and not answer["started"]
    actions.busy = False
    actions.answers.answer([drift()])
    assert actions.taken == ["retrain"]


def test_an_answer_outlives_an_outage(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise OperationalError("SELECT 1", {}, Exception("server is away"))

    actions = Actions(database, triggers="calibrate")
    monkeypatch.setattr(answer_module, "list_events", away)
    with pytest.raises(OperationalError):
        actions.answers.answer([drift()])
    assert actions.taken == []
    monkeypatch.undo()
    actions.answers.answer([])
    assert actions.taken == [("code", 70)] and len(told(database)) == 1
