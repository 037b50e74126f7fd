"""prune(): what need not be kept any longer goes, as the settings ``retention`` say.

Called by the service and by ``adaptive-spec db prune``.  It first rolls up outcomes, so that none goes that is not
counted.  Everything is done in small steps, each of which may be the last: what is left goes the next time.  Traces are
swept by the writer (``records.retention``).
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from adaptive_spec.pipeline import RUNS_NAME
from adaptive_spec.records.database import Database
from adaptive_spec.records.expiry import Expiry, cutoffs
from adaptive_spec.records.rollups import roll_up
from adaptive_spec.records.runs import ended_before
from adaptive_spec.releases import expiry as releases
from adaptive_spec.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What went, or would.

    rows: by what they are.  releases: versions whose bundles.  checkpoints: runs whose.
    """

    rows: dict[str, int]
    releases: tuple[int, ...]
    checkpoints: tuple[int, ...]

    def __bool__(self) -> bool:
        return any(self.rows.values()) or bool(self.releases or self.checkpoints)


def prune(
    database: Database,
    settings: Settings,
    *,
    dry_run: bool = False,
    stopped: Callable[[], bool] = lambda: False,
    now: datetime | None = None,
) -> Pruned:
    """Delete what the settings keep no longer, and say what.

    Args:
        dry_run: only say what would go; nothing is written, so outcomes that are not rolled up yet are left out.
        stopped: whether to leave the rest to the next time.
        now: another time than the present.

    Raises:
        SQLAlchemyError: the database does not answer.
    """
    now = now or datetime.now(UTC)
    if not dry_run:
        roll_up(database, stopped)
    due = cutoffs(database, settings.retention, now)
    expiry = Expiry(database, due, stopped)
    versions = releases.due(database, settings.releases.folder, settings.retention.releases)
    runs = _old_checkpoints(database, settings, now)
    if dry_run:
        return Pruned(expiry.count(), tuple(versions), tuple(runs))

    def expire(version: int) -> bool:
        return releases.expire(database, settings.releases.folder, version)

    def discard(run: int) -> bool:
        shutil.rmtree(settings.releases.folder / RUNS_NAME / str(run))
        return True

    return Pruned(expiry.delete(), _each(expire, versions, stopped), _each(discard, runs, stopped))


def _each(work: Callable[[int], bool], numbers: Sequence[int], stopped: Callable[[], bool]) -> tuple[int, ...]:
    """Return those that work was done on.  A folder that cannot be deleted holds up no other."""
    done = []
    for number in numbers:
        if stopped():
            break
        try:
            if work(number):
                done.append(number)
        except OSError as error:
            logger.warning("what is left of %d is deleted later: %s", number, error)
    return tuple(done)


def _old_checkpoints(database: Database, settings: Settings, now: datetime) -> list[int]:
    """Runs that ended long ago and have a folder still."""
    if not settings.retention.checkpoint_days:
        return []
    folders = (settings.releases.folder / RUNS_NAME).glob("*")
    numbers = [int(folder.name) for folder in folders if folder.name.isdecimal()]
    return ended_before(database, numbers, now - timedelta(days=settings.retention.checkpoint_days))
