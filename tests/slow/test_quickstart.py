"""The promises on the real quickstart models.  Minutes, not seconds: ``make test-slow``."""

from collections.abc import Iterator

import pytest
import torch

from adaptive_spec.bench.corpora import DOMAINS, prompts
from adaptive_spec.bench.lossless import Z_LIMIT, check_lossless, greedy_reference
from adaptive_spec.core import Release, Request, SamplingParams
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import DecoderSettings, ModelSettings
from adaptive_spec.verification.distribution import sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


@pytest.fixture(scope="module")
def real_pair() -> ModelPair:
    return load_pair(ModelSettings())


@pytest.fixture
def engine(real_pair: ModelPair) -> Iterator[Engine]:
    engine = Engine(real_pair, DecoderSettings(max_context_tokens=512, max_chain_length=4))
    engine.start()
    yield engine
    engine.swap(LoadedRelease()).result()
    engine.stop()


def test_two_hundred_prompts_are_token_exact_and_sampling_passes(real_pair: ModelPair) -> None:
    report = check_lossless(real_pair, num_prompts=200, seed=0, max_tokens=32)
    assert report.passed, report.to_dict()
    assert report.num_identical >= 199


def test_the_sampling_test_catches_a_draft_drawn_at_another_temperature(
    real_pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sharpened(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        return sample(probs**8, uniforms)  # temperature 1/8, verified as if it were 1

    monkeypatch.setattr("adaptive_spec.decoding.propose.sample", sharpened)
    report = check_lossless(real_pair, num_prompts=32, seed=0)
    assert not report.passed and abs(report.z) > Z_LIMIT, report.to_dict()
    assert report.num_identical == 32


def test_a_swap_in_mid_generation_changes_nothing(real_pair: ModelPair, engine: Engine) -> None:
    names = [name for name, _ in real_pair.draft.named_parameters() if "q_proj" in name]
    parameters = dict(real_pair.draft.named_parameters())
    for number, domain in enumerate(DOMAINS):
        prompt = real_pair.encode(prompts(domain)[number].text)
        stream = engine.submit(Request(domain, prompt, SamplingParams(max_tokens=48, chain_length=4)))
        tokens: list[int] = []
        for index, delta in enumerate(stream.events()):
            tokens += delta.token_ids
            generator = torch.Generator().manual_seed(index)
            noise = {n: torch.randn(parameters[n].shape, generator=generator) * 0.02 for n in names}
            engine.swap(LoadedRelease(Release(version=index + 1), noise))
        assert tokens == greedy_reference(real_pair, prompt, 48)


def test_the_bundled_draft_predicts_the_target(real_pair: ModelPair, engine: Engine) -> None:
    params = SamplingParams(max_tokens=64, chain_length=4)
    question = real_pair.encode("Tell me about the history of tea and how it is grown.")
    usage = engine.submit(Request("tea", question, params)).collect()[2].usage
    assert usage is not None and usage.num_accepted_draft_tokens / usage.num_steps > 0.15
