"""Won once, lost once, and believed no longer than the database was heard."""

import time
from collections.abc import Callable
from pathlib import Path

from adaptive_spec.cluster.leadership import Leadership
from adaptive_spec.records.leadership import FileLock

SECONDS = 0.3  # so long that a busy machine does not make a leader doubt


class CutOff(FileLock):
    """A lock whose database can be made to answer slowly, or not at all."""

    broken = False
    seconds = 0.0

    def hold(self) -> bool:
        time.sleep(self.seconds)
        if self.broken:
            self.release()
            raise OSError("no route to host")
        return super().hold()


def campaign(lock: FileLock, told: list[str]) -> Leadership:
    return Leadership(lock, SECONDS, won=lambda: told.append("won"), lost=lambda: told.append("lost"))


def until(found: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not (result := found()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return result


def test_one_of_two_leads_and_the_other_takes_over(tmp_path: Path) -> None:
    told: list[str] = []
    told_other: list[str] = []
    first, second = campaign(FileLock(tmp_path / "l"), told), campaign(FileLock(tmp_path / "l"), told_other)
    first.start()
    assert first.leads and told == ["won"]
    second.start()
    time.sleep(2 * SECONDS)
    assert first.leads and not second.leads and told_other == []
    first.stop()
    time.sleep(2 * SECONDS)
    assert not second.leads  # what is being ended is still the first one's
    first.release()
    assert until(lambda: second.leads)
    assert not first.leads and told_other == ["won"]
    second.stop()
    second.release()


def test_the_lead_is_lost_with_the_database_and_won_again(tmp_path: Path) -> None:
    told: list[str] = []
    lock = CutOff(tmp_path / "l")
    leadership = campaign(lock, told)
    leadership.start()
    lock.broken = True
    assert until(lambda: told == ["won", "lost"]) and not leadership.leads
    time.sleep(2 * SECONDS)
    assert told == ["won", "lost"]
    lock.broken = False
    assert until(lambda: told == ["won", "lost", "won"]) and leadership.leads
    leadership.stop()
    leadership.release()


def test_nobody_believes_to_lead_while_no_answer_comes(tmp_path: Path) -> None:
    told: list[str] = []
    lock = CutOff(tmp_path / "l")
    leadership = campaign(lock, told)
    leadership.start()
    lock.seconds = 10 * SECONDS
    assert until(lambda: not leadership.leads)
    assert told == ["won"]
    lock.seconds = 0.0
    assert until(lambda: leadership.leads)  # the answer was that the lock is still held
    assert told == ["won"]
    leadership.stop()
    leadership.release()


def test_a_failing_consequence_does_not_end_the_campaign(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    lock = FileLock(tmp_path / "l")
    leadership = Leadership(lock, SECONDS, won=fail, lost=fail)
    leadership.start()
    time.sleep(2 * SECONDS)
    assert leadership.leads
    leadership.stop()
    leadership.release()
