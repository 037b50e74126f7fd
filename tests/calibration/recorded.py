"""Planted requests as the writer would have stored them: ten steps of one drafted token each."""

import numpy as np

from adaptive_spec.core import FinishedRequest, Step
from adaptive_spec.records.database import Database
from tests.records.rows import make_finish, make_step, record

STEPS = 10


def record_requests(
    database: Database,
    count: int,
    acceptance: float,
    *,
    name: str,
    confidence: float = 0.6,
    domain: str = "code",
    release: int = 0,
    drafter: str = "model",
    finished: bool = True,
    seed: int = 0,
) -> None:
    """Store so many requests ``name-0``, ``name-1``, …"""
    random = np.random.default_rng(seed)
    items: list[Step | FinishedRequest] = []
    for index in range(count):
        request_id = f"{name}-{index}"
        for step_index in range(STEPS):
            positions = ((confidence, 0.5, bool(random.random() < acceptance)),)
            items.append(
                make_step(
                    request_id,
                    step_index,
                    domain=domain,
                    release=release,
                    drafter=drafter,
                    chain_length=1,
                    positions=positions,
                )
            )
        if finished:
            items.append(make_finish(request_id, domain=domain, releases=(release,)))
    record(database, *items)
