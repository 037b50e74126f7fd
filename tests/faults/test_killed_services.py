"""kill -9 of the real service: in mid-traffic, at each stage of a swap, and at each stage of a calibration."""

import time

import pytest

from adaptive_spec.records.releases import live_version
from adaptive_spec.releases.registry import live_release
from tests.children import PATIENCE
from tests.faults.bundles import make_release
from tests.faults.conftest import Place
from tests.faults.traffic import CUT, Traffic
from tests.process import call, until


def make_first(place: Place) -> None:
    make_release(place.database_url, place.releases, 1, place.models.adapter, place.models.pair.hashes)


def test_what_was_written_stays_and_the_live_release_is_the_same(place: Place) -> None:
    with place.serving() as process, Traffic(place.url, place.models.answers) as traffic:
        make_first(place)
        place.follows(1)
        traffic.more(30)
        settled = set(traffic.answered)
        time.sleep(1.0)  # several flushes: everything answered before is past the documented bound
        process.kill()
        process.wait()
    assert traffic.failed == []
    with place.serving(), Traffic(place.url, place.models.answers) as later:
        assert place.live() == 1
        later.more()
    later.check()
    recorded = place.recorded_tokens()
    place.check_records(later)
    assert settled <= recorded.keys() and set(recorded.values()) == {24}


@pytest.mark.faults
@pytest.mark.parametrize(
    "stage",
    [
        "adaptive_spec.releases.bundle:read_bundle",
        "adaptive_spec.releases.adapter:load_adapter_delta",
        "adaptive_spec.models.weights:DraftWeights._merged",
        "adaptive_spec.decoding.served:Lineup.swap",
        "adaptive_spec.records.writer:Writer.event",  # the new weights are in, and nobody has been told
    ],
)
def test_a_swap_killed_at_any_stage_is_done_by_the_next_life(place: Place, stage: str) -> None:
    with place.serving(FAULT_KILL_BEFORE=stage) as process, Traffic(place.url, place.models.answers) as traffic:
        traffic.more()
        make_first(place)
        process.wait(60 * PATIENCE)
    assert process.returncode == -9 and traffic.failed == []
    with place.serving(), Traffic(place.url, place.models.answers) as later:
        assert place.live() == 1
        later.more()
    later.check()
    place.check_records(later)


@pytest.mark.faults
@pytest.mark.parametrize(
    "stage",
    [
        "adaptive_spec.releases.bundle:write_bundle",
        "adaptive_spec.releases.registry:publish",  # the bundle is there and no row
        "adaptive_spec.records.releases:set_live",  # a row, and it is not live
        "adaptive_spec.records.calibrations:add_calibration",  # it is live, and what it was fitted to is not told
    ],
)
def test_a_calibration_killed_at_any_stage_can_be_made_again(place: Place, stage: str) -> None:
    with place.serving(FAULT_KILL_BEFORE=stage) as process, Traffic(place.url, place.models.answers) as traffic:
        traffic.more(60)
        with pytest.raises(CUT):
            call(f"{place.url}/api/calibrate", {})
        process.wait(60 * PATIENCE)
    assert process.returncode == -9 and traffic.failed == []
    before = live_version(place.database)
    assert live_release(place.database, place.releases, hashes=place.models.pair.hashes).version == before
    with place.serving(), Traffic(place.url, place.models.answers) as later:
        assert place.live() == before
        call(f"{place.url}/api/calibrate", {})
        version = until(lambda: live_version(place.database))
        place.follows(version)
        later.more()
    later.check()
    place.check_records(later)
