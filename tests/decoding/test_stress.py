"""The small edition; a thousand requests, and the real models, are in tests/slow."""

import random

from adaptive_spec.models.loading import ModelPair
from tests.decoding.stress import stress


def test_a_hundred_mixed_requests(pair: ModelPair) -> None:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(256) for _ in range(rng.choice([1, 4, 20, 60]))) for _ in range(12)]
    report = stress(pair, prompts, 100)
    assert report.refused["RequestError"] and report.num_answered > 70
    assert {"stop", "length", "cancelled", "deadline"} <= set(report.ended)
    assert report.policies["cache"]
