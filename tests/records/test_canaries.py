"""Trials on both databases: one at a time, ended once, and never of a release that another one has replaced."""

from datetime import timedelta

import pytest

from adaptive_spec.errors import ReleaseError
from adaptive_spec.records.canaries import (
    ABORTED,
    PROMOTED,
    ROLLED_BACK,
    begin_canary,
    end_canary,
    list_canaries,
    note_canary,
    running_canary,
    served_requests,
    standing,
)
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import list_events
from adaptive_spec.records.releases import add_release, list_releases, live_version, set_live
from tests.records.rows import START, insert, make_finish, make_step


def states(database: Database) -> dict[int, str]:
    return {record.version: record.state for record in list_releases(database)}


def test_a_trial_ends_once(database: Database) -> None:
    for version in (1, 2, 3):
        add_release(database, version, f"release-{version:06d}", min(version - 1, 1), {})
    set_live(database, 1, "first")
    assert standing(database) == (1, None)
    begin_canary(database, 2, 0.1, "gate passed")
    with pytest.raises(ReleaseError, match="is on trial"):
        begin_canary(database, 3, 0.1, "gate passed")
    live, canary = standing(database)
    assert live == 1 and canary is not None and (canary.release, canary.live, canary.share) == (2, 1, 0.1)
    note_canary(database, canary.id, {"num_canary_requests": 4})
    assert running_canary(database).report == {"num_canary_requests": 4}  # type: ignore[union-attr]
    assert end_canary(database, canary.id, ROLLED_BACK, "worse", {})
    assert not end_canary(database, canary.id, PROMOTED, "too late", {})
    assert states(database) == {1: "live", 2: "rolled_back", 3: "candidate"} and live_version(database) == 1
    begin_canary(database, 3, 0.5, "gate passed")
    assert end_canary(database, running_canary(database).id, PROMOTED, "better", {"n": 1})  # type: ignore[union-attr]
    assert standing(database) == (3, None)
    assert [(one.release, one.state, one.reason) for one in list_canaries(database)] == [
        (3, "promoted", "better"),
        (2, "rolled_back", "worse"),
    ]
    assert list_canaries(database)[0].report == {"n": 1}
    kinds = [event.kind for event in reversed(list_events(database))]
    assert kinds == [
        "release_live",
        "canary_started",
        "canary_rolled_back",
        "canary_started",
        "canary_promoted",
        "release_live",
    ]


def test_whatever_goes_live_ends_the_trial(database: Database) -> None:
    for version in (1, 2, 3):
        add_release(database, version, f"release-{version:06d}", 0, {})
    for version in (2, 3):
        begin_canary(database, version, 0.1, "gate passed")
        set_live(database, 1 if version == 2 else 3, "a person's wish")
    assert [one.state for one in list_canaries(database)] == [PROMOTED, ABORTED]
    assert states(database) == {1: "retired", 2: "rolled_back", 3: "live"}
    with pytest.raises(ReleaseError, match="it is live"):
        begin_canary(database, 3, 0.1, "again")
    with pytest.raises(ReleaseError, match="unknown"):
        begin_canary(database, 9, 0.1, "guess")
    with pytest.raises(ReleaseError, match="was rolled back"):
        begin_canary(database, 2, 0.1, "once more")
    add_release(database, 4, "release-000004", 2, {})
    with pytest.raises(ReleaseError, match="builds on release 2"):
        begin_canary(database, 4, 0.1, "made meanwhile")
    assert running_canary(database) is None


def test_only_requests_that_one_release_served_whole_are_compared(database: Database) -> None:
    def serve(name: str, releases: tuple[int, ...], **given: object) -> None:
        with database.session_scope() as session:
            finish = make_finish(name, releases=releases, **given)  # type: ignore[arg-type]
            steps = [make_step(name, index, release=releases[-1]) for index in range(3)]
            insert(database, session, finish, *steps)

    serve("live", (1,))
    serve("tried", (2,), finished_after_seconds=5.0)
    serve("both", (1, 2))
    serve("other", (7,))
    serve("fixed", (1,), policy="fixed")
    serve("cut", (2,), finish_reason="cancelled")
    serve("early", (1,), finished_after_seconds=1.0)
    before = START - timedelta(days=1)
    found = served_requests(database, (1, 2), before, START + timedelta(seconds=2))
    assert [(one.request_id, one.release) for one in found] == [("tried", 2), ("live", 1)]
    assert (found[0].num_steps, found[0].num_accepted, found[0].num_emitted) == (2, 2, 4)
    assert found[0].decoder_seconds == pytest.approx(0.06)
    assert served_requests(database, (1, 2), START + timedelta(days=1), before) == []
