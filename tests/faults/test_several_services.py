"""Several services on one database: started at once, killed in turn, and one that joins while a release is on trial."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import text

from adaptive_spec.records.canaries import list_canaries, running_canary
from adaptive_spec.records.releases import live_version
from adaptive_spec.releases.trip import STEPS_PER_REQUEST, TRIP_STEPS
from tests.faults.bundles import make_release, save_adapter
from tests.faults.conftest import Place
from tests.faults.traffic import MAX_TOKENS, Traffic
from tests.process import call, until

pytestmark = pytest.mark.faults
JOB_SECONDS = 3.0
JOBS = {"SCHEDULE__RETRAIN_HOURS": JOB_SECONDS / 3600, "SCHEDULE__MIN_NEW_TRACES": 1_000_000}  # each is declined


@contextmanager
def all_at_once(places: list[Place], **settings: Any) -> Iterator[list[Any]]:
    """Start a service in each place at the same moment and yield their processes."""
    with ExitStack() as stack, ThreadPoolExecutor(len(places)) as pool:
        contexts = [place.serving(**settings) for place in places]
        starting = [pool.submit(context.__enter__) for context in contexts]
        for context, start in zip(contexts, starting, strict=True):
            start.exception()  # wait; then all that run are stopped, whichever did not
            if start.exception() is None:
                stack.push(context.__exit__)
        yield [start.result() for start in starting]


def leaders(place: Place) -> list[int]:
    """The processes that are said to lead."""
    return [row["pid"] for row in call(f"{place.url}/api/decoders")["decoders"] if row["state"] == "leads"]


def test_of_two_started_at_once_one_leads_and_the_other_takes_over(place: Place) -> None:
    other = place.beside()
    with all_at_once([place, other], **JOBS) as processes:
        with Traffic(other.url, place.models.answers) as traffic:
            (first,) = until(lambda: leaders(other))
            by_pid = {process.pid: process for process in processes}
            for _ in range(20):
                traffic.more(1)
                assert leaders(other) == [first]
        traffic.check()
        survivor = other if by_pid[first] is processes[0] else place
        by_pid.pop(first).kill()
        with Traffic(survivor.url, place.models.answers) as later:
            (second,) = until(lambda: [pid for pid in leaders(survivor) if pid != first], 10)
            assert [second] == list(by_pid)
            make_release(place.database_url, place.releases, 1, place.models.adapter, place.models.pair.hashes)
            survivor.follows(1)
            later.more()
            declined = len(place.events("retrain_declined"))
            until(lambda: len(place.events("retrain_declined")) > declined + 1)  # the jobs go on
        later.check()
    times = sorted(event.at for event in place.events("retrain_declined"))
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
    assert gaps and min(gaps) > 0.7 * JOB_SECONDS  # two that lead would each have begun them
    place.check_records(later)
    other.database.close()


def test_a_decoder_joins_in_mid_canary_and_a_bad_canary_ends_in_both(place: Place) -> None:
    """The first release on trial is sound, and a person ends it; the second proposes nonsense, and the wire trips."""
    models, other = place.models, place.beside()
    nonsense = save_adapter(models.pair.draft, place.folder / "nonsense", size=5.0)
    with place.serving() as process, Traffic(place.url, models.answers) as traffic:
        make_release(place.database_url, place.releases, 1, models.adapter, models.pair.hashes, canary_share=0.5)
        until(lambda: traffic.releases == {0, 1})
        with other.serving() as joined, Traffic(other.url, models.answers) as beside:
            until(lambda: beside.releases == {0, 1})
            assert place.live() == other.live() == 0
            call(f"{other.url}/api/canary", {"action": "abort", "reason": "enough"})
            make_release(place.database_url, place.releases, 2, nonsense, models.pair.hashes, canary_share=0.5)
            until(lambda: running_canary(place.database) is None)
            for each in (traffic, beside):
                each.more(8)  # what ran under it is over
                each.releases.clear()
                each.more(8)
                assert each.releases == {0}
            assert place.live() == other.live() == 0 == live_version(place.database)
        beside.check()
    traffic.check()
    assert process.returncode == joined.returncode == 0
    place.check_records(traffic)
    place.check_records(beside)
    ended, aborted = list_canaries(place.database)
    assert (ended.state, aborted.state) == ("rolled_back", "aborted") and "almost nothing" in ended.reason
    # Each decoder counts for itself.  Of a request so many steps count, and those that run when the wire trips end
    # as they began: a row of each of two clients.
    counted = TRIP_STEPS / STEPS_PER_REQUEST + 2
    assert 0 < _num_steps(place, 2) <= 2 * counted * MAX_TOKENS
    other.database.close()


def _num_steps(place: Place, release: int) -> int:
    query = text("SELECT COUNT(*) FROM steps WHERE release = :release AND num_reached > 0")
    with place.database.session_scope(read_only=True) as session:
        return int(session.execute(query, {"release": release}).scalar_one())
