"""The replay behind scores and observations, worked by hand."""

import torch

from adaptive_spec.learning.evaluate import JudgedTrace, acceptance_length, replay
from adaptive_spec.learning.judge import replay_observations
from tests.learning.toy import toy_traces


def test_reached_positions_of_a_replay() -> None:
    """Chains of 2 over yes yes no / no / yes-at-the-end: three steps, the rejected position counts as reached."""
    agrees = [True, True, False, False, True]
    assert list(replay(agrees, 2)) == [(0, 2), (3, 0), (4, 1)]
    assert acceptance_length(agrees, 2) == 5 / 3
    (trace,) = toy_traces(1, seed=0)
    judged = JudgedTrace(trace, agrees, torch.zeros(5), [0.9, 0.8, 0.7, 0.6, 0.5], torch.zeros(5, 0))
    seen = replay_observations([judged], 2)[trace.domain]
    assert seen.position.tolist() == [0, 1, 0, 0]
    assert seen.confidence.tolist() == [0.9, 0.8, 0.6, 0.5]
    assert seen.accepted.tolist() == [True, True, False, True]
    assert seen.explored.all() and set(seen.request_index.tolist()) == {0}
