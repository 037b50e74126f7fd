"""What is replayed: how much, of which domains, and that it keeps an old domain from being forgotten."""

from dataclasses import replace
from datetime import timedelta

import pytest

from adaptive_spec.core import Trace
from adaptive_spec.learning.batches import completion_length
from adaptive_spec.learning.distil import distil
from adaptive_spec.learning.evaluate import score
from adaptive_spec.learning.replay import divide, replayed
from adaptive_spec.settings import LearningSettings
from tests.learning.toy import tiny_draft, toy_traces

OLD = [*toy_traces(40, seed=1, domain="a"), *toy_traces(15, seed=2, domain="b")]
LATER = OLD[0].at + timedelta(hours=1)
FRESH = [replace(trace, at=LATER) for trace in toy_traces(30, seed=3, step=5, domain="c")]


def num_tokens(traces: list[Trace]) -> int:
    return sum(map(completion_length, traces))


def test_all_are_trained_on_alike_unless_some_are_fresh_and_a_share_is_set() -> None:
    assert divide([*OLD, *FRESH], LATER, 0.5) == (FRESH, OLD)
    for since, share in ((LATER, None), (None, 0.5), (LATER + timedelta(1), 0.5), (OLD[0].at, 0.5)):
        assert divide([*OLD, *FRESH], since, share) == ([*OLD, *FRESH], [])


def test_the_share_is_kept_and_domains_take_turns() -> None:
    drawn = replayed(OLD, FRESH, 0.4, seed=0)
    share = num_tokens(drawn) / (num_tokens(drawn) + num_tokens(FRESH))
    assert share == pytest.approx(0.4, abs=0.03)
    counts = [sum(trace.domain == domain for trace in drawn) for domain in ("a", "b")]
    assert abs(counts[0] - counts[1]) <= 1
    assert len({trace.request_id for trace in drawn}) == len(drawn)
    assert drawn == replayed(OLD, FRESH, 0.4, seed=0) != replayed(OLD, FRESH, 0.4, seed=1)
    assert replayed(OLD, FRESH, 0.0, seed=0) == []
    assert len(replayed(OLD, FRESH, 0.99, seed=0)) == len(OLD)  # no more than there are


def test_without_replay_an_old_domain_is_forgotten() -> None:
    """The same tokens continue differently in the new domain; the old one is kept by half of each epoch."""

    def agreement(replay_share: float) -> float:
        settings = LearningSettings(rank=8, learning_rate=2e-2, batch_tokens=256, max_epochs=4, checkpoint_seconds=0)
        settings = settings.model_copy(update={"replay_share": replay_share})
        old, new = toy_traces(40, seed=1), toy_traces(40, seed=3, step=5, states=32, domain="new")
        held_out = toy_traces(8, seed=4, step=5, states=32, domain="new")
        model, _ = distil(tiny_draft(), new, held_out, settings, lambda told: None, older=old)
        scores = score(model, toy_traces(10, seed=5))
        return sum(row.agreement for row in scores) / len(scores)

    assert agreement(0.5) > agreement(0.0) + 0.1
