"""A job of the schedule is begun once per interval, whoever asks."""

import threading
from datetime import timedelta

from sqlalchemy import select

from adaptive_spec.records.database import Database
from adaptive_spec.records.jobs import claim_job
from adaptive_spec.records.tables import JobRow

HOUR = timedelta(hours=1)


def pass_time(database: Database, by: timedelta) -> None:
    with database.session_scope() as session:
        for row in session.scalars(select(JobRow)):
            row.begun_at -= by


def test_intervals_begin_when_first_asked_and_go_on(database: Database) -> None:
    assert not claim_job(database, "calibrate", HOUR)
    pass_time(database, HOUR - timedelta(minutes=1))
    assert not claim_job(database, "calibrate", HOUR)
    pass_time(database, timedelta(minutes=1))
    assert claim_job(database, "calibrate", HOUR)
    assert not claim_job(database, "calibrate", HOUR)
    assert not claim_job(database, "retrain", HOUR)


def test_two_that_believe_they_lead_begin_a_job_once(database: Database) -> None:
    claim_job(database, "retrain", HOUR)
    pass_time(database, HOUR)
    got: list[bool] = []
    start = threading.Barrier(6)

    def claim() -> None:
        other = Database(database.url.render_as_string(hide_password=False))
        start.wait()
        got.append(claim_job(other, "retrain", HOUR))
        other.close()

    threads = [threading.Thread(target=claim) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 5 + [True]
