"""The canary's watch: what the database says of a release on trial becomes true in this decoder, and is judged.

The service calls ``follow`` whenever it has read what is live, and ``judge`` now and then.  The trial's state is a row
and its evidence the records, so that every decoder on the database takes part, each may decide, and a restart goes on
where it was.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from adaptive_spec.decoding.engine import Engine
from adaptive_spec.errors import ReleaseError
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.records.canaries import (
    PROMOTED,
    ROLLED_BACK,
    CanaryRecord,
    ServedRequest,
    end_canary,
    list_canaries,
    note_canary,
    running_canary,
    served_requests,
)
from adaptive_spec.records.database import Database
from adaptive_spec.releases.canary import Reading, Terms, Verdict, judge
from adaptive_spec.settings import Settings

logger = logging.getLogger(__name__)

_LATE = timedelta(minutes=2)  # records of other decoders may come so much after the request's end


class CanaryWatch:
    """Of one decoder.  Not safe between threads: the service holds its lock.

    Args:
        load: gives a release by its version, its bundle checked; raises ReleaseError.
        ended: told how a trial ended that this decoder took part in, whoever ended it.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        engine: Engine,
        load: Callable[[int], LoadedRelease],
        ended: Callable[[str], None] = lambda state: None,
    ) -> None:
        self._database = database
        self._settings = settings.releases
        self._terms = Terms(
            settings.decoder.max_chain_length, settings.releases.canary_margin_share, settings.releases.canary_level
        )
        self._engine = engine
        self._load = load
        self._tell_ended = ended
        self._seen: dict[str, ServedRequest] = {}  # of the canary that is watched
        self._watched: int | None = None

    def follow(self, wanted: CanaryRecord | None) -> None:
        """Run the canary that the database has, if any; one that trips or does not load is rolled back for all."""
        self._note_end(wanted)
        running = self._engine.canary
        if running is not None and (wanted is None or running.version != wanted.release):
            self._engine.end_canary(promote=False).result()
            logger.info("release %d serves nobody any more", running.version)
        if wanted is None or (self._engine.canary is not None and self._engine.canary.version == wanted.release):
            return
        if self._engine.tripped is not None and self._watched == wanted.id:
            self._end(wanted, ROLLED_BACK, self._engine.tripped[1], wanted.report)
            return
        try:
            pause = self._engine.begin_canary(self._load(wanted.release), wanted.share).result()
        except (ReleaseError, OSError) as error:
            if self._end(wanted, ROLLED_BACK, f"refused by a decoder: {error}", wanted.report):
                self._tell_ended(ROLLED_BACK)
            return
        self._watched = wanted.id
        self._seen.clear()
        logger.info(
            "release %d serves %.0f %% of requests, after a pause of %.1f ms",
            wanted.release,
            100 * wanted.share,
            1e3 * pause,
        )

    def judge(self) -> bool:
        """Judge the canary that runs by all that is recorded of it; tell whether it has come to its end."""
        canary = running_canary(self._database)
        if canary is None or canary.id != self._watched or not self._look(canary):
            return False
        verdict = judge([self._reading(one, canary) for one in self._in_order()], self._terms)
        report = verdict.to_dict()
        if verdict.decision == "promote":
            return self._end(canary, PROMOTED, verdict.reason, report)
        if verdict.decision == "roll_back":
            return self._end(canary, ROLLED_BACK, verdict.reason, report)
        if (over := self._over(canary, verdict)) is not None:
            state = PROMOTED if self._settings.canary_default == "promote" else ROLLED_BACK
            return self._end(canary, state, f"{over} without a decision ({verdict.reason}): the default", report)
        note_canary(self._database, canary.id, report)
        return False

    def _note_end(self, wanted: CanaryRecord | None) -> None:
        """Tell of the trial that was followed until now, when it is over."""
        if self._watched is None or (wanted is not None and wanted.id == self._watched):
            return
        for canary in list_canaries(self._database):
            if canary.id == self._watched:
                self._tell_ended(canary.state)
        self._watched = None

    def _look(self, canary: CanaryRecord) -> bool:
        """Read what has come; tell whether there is anything to decide on that was not there before."""
        latest = max((one.finished_at for one in self._seen.values()), default=canary.started_at)
        after = max(canary.started_at, latest - _LATE)
        found = served_requests(self._database, (canary.live, canary.release), canary.started_at, after)
        before = len(self._seen)
        self._seen |= {one.request_id: one for one in found}
        late = datetime.now(UTC) - canary.started_at >= timedelta(hours=self._settings.canary_max_hours)
        return len(self._seen) > before or late

    def _in_order(self) -> list[ServedRequest]:
        return sorted(self._seen.values(), key=lambda one: (one.finished_at, one.request_id))

    def _reading(self, one: ServedRequest, canary: CanaryRecord) -> Reading:
        goodput = one.num_emitted / one.decoder_seconds if one.decoder_seconds > 0 else 0.0
        return Reading(one.domain, one.release == canary.release, one.num_accepted / one.num_steps, goodput)

    def _over(self, canary: CanaryRecord, verdict: Verdict) -> str | None:
        """Which limit of a trial is reached."""
        if verdict.num_canary_requests >= self._settings.canary_max_requests:
            return f"{verdict.num_canary_requests} requests"
        if datetime.now(UTC) - canary.started_at >= timedelta(hours=self._settings.canary_max_hours):
            return f"{self._settings.canary_max_hours:g} hours"
        return None

    def _end(self, canary: CanaryRecord, state: str, reason: str, report: dict[str, object]) -> bool:
        ended = end_canary(self._database, canary.id, state, reason, report)
        if ended:
            logger.warning("canary %d is %s: %s", canary.release, state.replace("_", " "), reason)
        return ended
