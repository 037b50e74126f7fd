"""A thousand mixed requests: all answered or refused, every row free, memory flat.  ``make test-slow``."""

import random

import pytest

from adaptive_spec.bench.corpora import DOMAINS, prompts
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.settings import ModelSettings
from tests.decoding.stress import Report, stress

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]

MEGABYTE = 2**20


def check(report: Report, growth_bytes: int) -> None:
    assert {"stop", "length", "cancelled", "deadline"} <= set(report.ended)
    assert report.refused["RequestError"] and report.policies["cache"]
    assert report.growth_bytes < growth_bytes, report.resident_bytes


def test_tiny_models(pair: ModelPair) -> None:
    rng = random.Random(2)
    texts = [tuple(rng.randrange(256) for _ in range(rng.choice([1, 4, 20, 60]))) for _ in range(40)]
    check(stress(pair, texts, 1000), 2 * MEGABYTE)


def test_the_quickstart_models() -> None:
    real = load_pair(ModelSettings())
    texts = [real.encode(prompts(domain)[number].text)[:60] for domain in DOMAINS for number in range(4)]
    check(stress(real, texts, 200), 16 * MEGABYTE)
