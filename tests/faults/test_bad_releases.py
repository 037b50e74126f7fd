"""Bundles that are bad in every way: none is published, none is swapped in, and nobody who is served notices."""

from collections.abc import Callable, Iterator

import pytest

from adaptive_spec.errors import ReleaseError
from adaptive_spec.records.releases import add_release, list_releases, live_version, set_live
from adaptive_spec.releases.bundle import bundle_name
from adaptive_spec.releases.registry import next_version, publish
from tests.faults.bundles import BAD, make_release
from tests.faults.conftest import BACKENDS, Place
from tests.faults.traffic import Traffic
from tests.process import until


@pytest.fixture(scope="module", params=BACKENDS)
def served(request: pytest.FixtureRequest, make_place: Callable[[str], Place]) -> Iterator[tuple[Place, Traffic]]:
    """A service under traffic whose sound release 1 is live."""
    place = make_place(request.param)
    with place.serving() as process, Traffic(place.url, place.models.answers) as traffic:
        make_release(place.database_url, place.releases, 1, place.models.adapter, place.models.pair.hashes)
        place.follows(1)
        yield place, traffic
        traffic.check()
        assert process.poll() is None


@pytest.mark.parametrize("fault", BAD)
def test_it_is_refused_and_the_live_release_goes_on(served: tuple[Place, Traffic], fault: str) -> None:
    place, traffic = served
    bad, pair = BAD[fault], place.models.pair
    version = next_version(place.database, place.releases)
    bad.write(place.releases, version, place.models.adapter, pair.hashes)
    if "vocabulary" not in fault:  # how many tokens a draft has is known to nobody but who runs it
        with pytest.raises(ReleaseError, match=bad.reason):
            publish(place.database, place.releases, version, {}, draft=pair.draft, hashes=pair.hashes)
        assert version not in [record.version for record in list_releases(place.database)]
    assert live_version(place.database) == 1

    add_release(place.database, version, bundle_name(version), 1, {})
    set_live(place.database, version, "pointed to by a process that did not look")
    (event,) = until(lambda: place.events("release_refused", version))
    assert bad.reason_in(event.detail["reason"]), event.detail
    assert place.live() == 1 and not place.events("release_swapped", version)
    traffic.more()
    assert place.live() == 1
    set_live(place.database, 1, "taken back")


@pytest.mark.parametrize("fault", ["flipped byte in the weights", "NaN"])
@pytest.mark.faults
def test_a_service_that_starts_on_a_bad_release_serves_without_it(place: Place, fault: str) -> None:
    BAD[fault].write(place.releases, 1, place.models.adapter, place.models.pair.hashes)
    add_release(place.database, 1, bundle_name(1), 0, {})
    set_live(place.database, 1, "pointed to by a process that did not look")
    with place.serving(), Traffic(place.url, place.models.answers) as traffic:
        assert place.live() == 0
        until(lambda: place.events("release_refused", 1))
        make_release(place.database_url, place.releases, 2, place.models.adapter, place.models.pair.hashes)
        place.follows(2)
        traffic.more()
    traffic.check()
