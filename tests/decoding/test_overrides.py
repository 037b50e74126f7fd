"""Thresholds set by hand in the live decoder: they shape drafting at once, end by themselves, and change no token."""

import random
import time
from itertools import accumulate

import pytest

from adaptive_spec.core import LengthRule, Release, Request, SamplingParams, ThresholdOverride, Thresholds
from adaptive_spec.decoding.decoder import Decoder
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.overrides import Overrides
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import DecoderSettings
from tests.calibration.planted import linear_cost
from tests.decoding.heard import Heard
from tests.decoding.test_decoder import greedy_of_target

SETTINGS = DecoderSettings(slots=4, max_context_tokens=160, max_chain_length=4, explore_share=0.0)
NEVER_STOPS = Release(1, {"*": Thresholds(stop_below=0.0, max_chain_length=4, survival=(0.9,) * 4)})
PROMPT = (5, 6, 7, 5, 6, 7)
HOUR = 3600.0


def by_hand(left: float = HOUR, domain: str = "code", **numbers: float) -> Overrides:
    return Overrides({domain: (ThresholdOverride(**numbers), left)})  # type: ignore[arg-type]


def deciding(pair: ModelPair, overrides: Overrides, heard: Heard, domain: str, drafter: str = "model") -> Decoder:
    """A decoder with one request."""
    decoder = Decoder(pair, SETTINGS, heard.listeners)
    decoder.swap(decoder.weights.prepare(LoadedRelease(NEVER_STOPS)))
    decoder.lineup.overrides = overrides
    params = SamplingParams(max_tokens=20, ignore_eos=True, drafter=drafter)
    decoder.admit(Request("r", PROMPT, params, domain), lambda delta: None, time.perf_counter())
    return decoder


def chain_lengths(pair: ModelPair, overrides: Overrides, domain: str = "code", drafter: str = "model") -> set[int]:
    """The lengths of a request's chains, but those near its end."""
    heard = Heard()
    decoder = deciding(pair, overrides, heard, domain, drafter)
    while decoder.filling:
        decoder.fill(64)
    while decoder.slots:
        decoder.step()
    emitted = list(accumulate(step.num_emitted for step in heard.steps))
    return {step.chain_length for step, so_far in zip(heard.steps[1:], emitted, strict=False) if so_far < 15}


def test_limits_hold_for_their_domain_alone(pair: ModelPair) -> None:
    assert chain_lengths(pair, Overrides()) == {4}
    assert chain_lengths(pair, by_hand(max_chain_length=2)) == {2}
    assert chain_lengths(pair, by_hand(max_chain_length=0)) == {0}
    assert chain_lengths(pair, by_hand(max_chain_length=2), domain="law") == {4}
    assert chain_lengths(pair, by_hand(domain="*", max_chain_length=2), domain="law") == {2}
    assert max(chain_lengths(pair, by_hand(max_chain_length=1), drafter="ngram")) <= 1


def test_an_expired_one_is_not_in_force(pair: ModelPair) -> None:
    assert chain_lengths(pair, by_hand(left=0.0, max_chain_length=1)) == {4}
    own_has_ended = Overrides(
        {"code": (ThresholdOverride(max_chain_length=1), 0.0), "*": (ThresholdOverride(max_chain_length=3), HOUR)}
    )
    assert chain_lengths(pair, own_has_ended) == {3}


def test_a_threshold_and_a_limit_hold_under_optimal_stopping(pair: ModelPair, heard: Heard) -> None:
    def floors(**numbers: float) -> tuple[float, ...]:
        decoder = deciding(pair, by_hand(**numbers) if numbers else Overrides(), heard, "code")
        return decoder.proposer.floors(decoder.filling[0], 4, linear_cost(0.01, 1.0), 1)

    assert len(floors()) == 4 and floors()[1] < 0.5  # drafting costs next to nothing
    assert floors(stop_below=0.75) == (0.0, 0.75, 0.75, 0.75)
    assert len(floors(max_chain_length=2)) == 2
    assert floors(max_chain_length=0) == ()


def test_an_override_changes_no_token_and_takes_effect_between_two_steps(pair: ModelPair, heard: Heard) -> None:
    engine = Engine(pair, SETTINGS, heard.listeners)
    engine.start()
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    stream = engine.submit(Request("r", (1, 2, 3), params, "code"))
    rng = random.Random(0)
    try:
        for _ in range(8):
            engine.override(by_hand(max_chain_length=rng.randrange(5), temperature=rng.uniform(0.1, 9))).result()
        assert stream.collect()[1] == greedy_of_target(pair, [1, 2, 3], 120)
    finally:
        engine.stop()


@pytest.mark.parametrize("rows", [1, 4])
def test_numbers_hold_at_every_batch_size_and_others_stay(rows: int) -> None:
    thresholds = Thresholds(temperature=1.5, stop_below=0.2, larger_batches=(LengthRule(4, 0.5, 3),), survival=(0.9,))
    over = ThresholdOverride(stop_below=0.8).over(thresholds)
    assert over.lengths_at(rows).stop_below == 0.8
    assert over.lengths_at(rows).max_chain_length == thresholds.lengths_at(rows).max_chain_length
    assert (over.temperature, over.survival) == (1.5, (0.9,))
