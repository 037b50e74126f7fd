"""kill -9 of a process that publishes, at each of its stages, and of one that migrates."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from adaptive_spec.records.database import Database
from adaptive_spec.records.releases import live_version
from adaptive_spec.records.tables import Base
from adaptive_spec.releases.registry import live_release, next_version
from tests.faults.bundles import migrate, publish_next
from tests.faults.conftest import Place
from tests.faults.stages import killed_at


@pytest.mark.faults
def test_a_publisher_killed_at_any_stage_leaves_a_whole_release_or_none(place: Place) -> None:
    """Whatever it leaves behind, the live release can be read whole, and the next one can be published."""
    arguments = (place.database_url, place.releases, place.models.adapter, place.models.pair.hashes)
    before, num_new = 0, 0
    for stage in itertools.count():
        killed = killed_at(stage, place.releases, publish_next, *arguments)
        version = live_version(place.database)
        release = live_release(
            place.database, place.releases, draft=place.models.pair.draft, hashes=place.models.pair.hashes
        )
        assert release.version == version >= before
        num_new += version > before
        before = version
        if not killed:
            break
    assert stage > 20 and num_new >= 1, (stage, num_new)
    assert version == next_version(place.database, place.releases) - 1


@pytest.mark.faults
@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_a_migration_killed_at_any_stage_is_made_up_for(
    make_empty: Callable[[str], str], backend: str, tmp_path: Path
) -> None:
    num_killed = 0
    for stage in itertools.count():
        url = make_empty(backend)
        killed = killed_at(stage, tmp_path / "none", migrate, url)
        database = Database(url)
        database.upgrade()
        database.check()
        with database.engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        database.close()
        if not killed:
            break
        num_killed += 1
    assert num_killed > 50
