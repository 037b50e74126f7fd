"""The check passes on a sound decoder, and catches one that is not."""

import pytest
import torch

from adaptive_spec.bench.lossless import Z_LIMIT, _decode, check_lossless
from adaptive_spec.core import SamplingParams
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.settings import DecoderSettings
from adaptive_spec.verification.distribution import sample


def test_a_sound_decoder_passes_and_progress_is_told(pair: ModelPair) -> None:
    told: list[tuple[str, str]] = []
    report = check_lossless(pair, 12, max_tokens=24, progress=lambda phase, text: told.append((phase, text)))
    assert report.passed and report.num_identical == 12 and report.num_sampled_tokens == 12 * 24
    assert [phase for phase, _ in told[::12]] == [
        "greedy, batches of 32",
        "greedy, no speculation",
        "sampled",
        "target alone",
    ]


@pytest.mark.parametrize("drafter", ["model", "ngram", "combined"])
def test_every_drafter_passes_under_the_policy_in_every_batch(pair: ModelPair, drafter: str) -> None:
    report = check_lossless(pair, 8, max_tokens=16, drafter=drafter, chain_length=None, batches=(1, 8))
    assert report.passed and report.num_identical == 8


def test_a_draft_drawn_at_another_temperature_than_verified_is_caught(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sharpened(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        return sample(probs**2, uniforms)

    monkeypatch.setattr("adaptive_spec.decoding.propose.sample", sharpened)
    report = check_lossless(pair, 40, max_tokens=40)
    assert not report.passed and abs(report.z) > Z_LIMIT
    assert report.num_identical == 40


def test_a_wrong_token_is_named(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(pair: ModelPair, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        return [1] * max_tokens

    monkeypatch.setattr("adaptive_spec.bench.lossless.greedy_reference", reference)
    report = check_lossless(pair, 3, max_tokens=8)
    assert not report.passed and report.num_identical == 0
    assert report.first_difference is not None and report.first_difference.startswith("prompt 0")


def test_every_prompt_is_sampled_with_a_seed_of_its_own(pair: ModelPair) -> None:
    """With one seed for all, positions of different prompts share their uniforms and z means nothing."""
    engine = Engine(pair, DecoderSettings(max_context_tokens=64))
    engine.start()
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=0, ignore_eos=True)
    first, second, again = (_decode(engine, [(1, 2, 3), (1, 2, 3)], params, lambda _: None) for _ in range(3))
    engine.stop()
    assert first == second == again
    assert first[0] != first[1]
