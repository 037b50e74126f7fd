"""Turns between domains, order within each, and leaving early."""

import time

import pytest

from adaptive_spec.core import Request, SamplingParams
from adaptive_spec.decoding.queue import FairQueue
from adaptive_spec.decoding.stream import Choice


def choice(request_id: str, domain: str = "a", deadline_seconds: float | None = None) -> Choice:
    params = SamplingParams(deadline_seconds=deadline_seconds)
    return Choice(Request(request_id, (1,), params, domain), lambda _: None, submitted=100.0)


def drained(queue: FairQueue) -> list[str]:
    ids = []
    while (taken := queue.pop()) is not None:
        ids.append(taken.request.request_id)
    return ids


def filled(*entries: tuple[str, str]) -> FairQueue:
    queue = FairQueue()
    for request_id, domain in entries:
        queue.push(choice(request_id, domain))
    return queue


def test_a_flood_delays_nobody_else() -> None:
    queue = filled(*((f"a{i}", "a") for i in range(50)), ("b0", "b"), ("b1", "b"), ("c0", "c"))
    assert drained(queue)[:7] == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert queue.pop() is None and len(queue) == 0


def test_a_domain_that_comes_back_waits_for_its_turn() -> None:
    queue = filled(("a0", "a"), ("b0", "b"))
    first = queue.pop()
    assert first is not None and first.request.request_id == "a0"
    queue.push(choice("a1", "a"))
    assert drained(queue) == ["b0", "a1"]


def test_removal_from_anywhere_keeps_the_order_of_the_rest() -> None:
    queue = filled(("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b"))
    removed = queue.remove("a1")
    assert removed is not None and removed.request.request_id == "a1"
    assert queue.remove("b0") is not None
    assert queue.remove("a1") is None and queue.remove("nobody") is None
    assert "a1" not in queue and "a2" in queue and len(queue) == 2
    assert drained(queue) == ["a0", "a2"]


def test_the_late_are_taken_out_once() -> None:
    queue = FairQueue()
    for request_id, domain, seconds in [("a0", "a", 5.0), ("a1", "a", None), ("b0", "b", 1.0), ("b1", "b", 9.0)]:
        queue.push(choice(request_id, domain, seconds))
    assert queue.expired(100.5) == []
    assert {late.request.request_id for late in queue.expired(105.0)} == {"a0", "b0"}
    assert queue.expired(108.0) == []
    assert [late.request.request_id for late in queue.expired(109.0)] == ["b1"]
    assert drained(queue) == ["a1"]


@pytest.mark.parametrize("count", [40_000])
def test_a_long_queue_costs_no_more_per_request(count: int) -> None:
    queue = filled(*((str(i), f"domain-{i % 1000}") for i in range(count)))
    began = time.perf_counter()
    for i in range(0, count, 2):
        assert queue.remove(str(i)) is not None
    assert len(drained(queue)) == count // 2
    assert time.perf_counter() - began < 2.0  # a scan per request would take minutes
