"""Verification on the real quickstart models: sampling over many seeds, broken variants, budgets on live traffic."""

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adaptive_spec.bench.corpora import DOMAINS, prompts
from adaptive_spec.bench.lossless import sampled_scores, z_of
from adaptive_spec.core import Request, SamplingParams
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.verdict import judge
from adaptive_spec.decoding.walk import walk
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.settings import DecoderSettings, ModelSettings, VerificationSettings
from adaptive_spec.verification.distribution import sample
from tests.decoding.heard import Heard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]

SEEDS = 20
Z_LIMIT = 4.22  # two-sided 1e-3 over 20 seeds and two statistics
SETTINGS = DecoderSettings(slots=8, max_context_tokens=320, max_chain_length=4)


@pytest.fixture(scope="module")
def real_pair() -> ModelPair:
    return load_pair(ModelSettings())


@pytest.fixture(scope="module")
def engine(real_pair: ModelPair) -> Iterator[Engine]:
    engine = Engine(real_pair, SETTINGS)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def short_prompts(real_pair: ModelPair) -> list[tuple[int, ...]]:
    return [real_pair.encode(prompts(domain)[number].text)[:80] for domain in DOMAINS for number in (0, 1)]


def scores(
    pair: ModelPair,
    engine: Engine,
    encoded: list[tuple[int, ...]],
    seed: int,
    length: int | None,
    drafter: str = "model",
) -> torch.Tensor:
    params = SamplingParams(
        max_tokens=24, temperature=1.0, seed=1000 * seed, ignore_eos=True, chain_length=length, drafter=drafter
    )
    return sampled_scores(pair, engine, encoded, params)


@pytest.mark.parametrize("drafter", ["model", "ngram", "combined"])
@pytest.mark.parametrize("policy", ["stopping", "threshold"])
def test_sampling_under_every_drafter_and_policy(
    real_pair: ModelPair, short_prompts: list[tuple[int, ...]], drafter: str, policy: str
) -> None:
    heard = Heard()
    settings = SETTINGS.model_copy(update={"policy": policy, "explore_share": 0.1, "ngram_min_match": 1})
    engine = Engine(real_pair, settings, heard.listeners)
    engine.start()
    try:
        engine.price(engine.measure_cost("here", repeats=1))
        found = [scores(real_pair, engine, short_prompts, seed, None, drafter) for seed in range(3)]
    finally:
        engine.stop()
    assert sum(step.chain_length for step in heard.steps) > 20  # there was something to verify
    assert max(map(abs, z_of(torch.cat(found)))) < Z_LIMIT


@pytest.mark.parametrize(("chain_length", "decide"), [(1, judge), (4, walk)])
def test_sampling_has_the_targets_distribution_over_twenty_seeds(
    real_pair: ModelPair,
    engine: Engine,
    short_prompts: list[tuple[int, ...]],
    chain_length: int,
    decide: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.decoder, "_judge", decide)
    found = [scores(real_pair, engine, short_prompts, seed, chain_length) for seed in range(SEEDS)]
    every = [z for each in found for z in z_of(each)]
    assert max(map(abs, every)) < Z_LIMIT, every
    assert max(map(abs, z_of(torch.cat(found)))) < 3.5


def broken_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain is drawn at temperature 1/4 and verified as if it were drawn at 1."""

    def sharpened(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        return sample(probs**4, uniforms)

    monkeypatch.setattr("adaptive_spec.decoding.propose.sample", sharpened)


def broken_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recovered token comes from the target, not from the residual."""
    _replace_next(monkeypatch, lambda target, draft, bonus: target)


def broken_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bonus token comes from the draft's last distribution."""
    _replace_next(monkeypatch, lambda target, draft, bonus: torch.where(bonus, draft, target))


def _replace_next(monkeypatch: pytest.MonkeyPatch, choose: Any) -> None:
    from adaptive_spec.verification.exact import next_sampled

    def broken(target: Any, draft: Any, lengths: Any, num_kept: Any, uniforms: Any) -> Any:
        if not draft.shape[1] or not bool((lengths > 0).any()):
            return next_sampled(target, draft, lengths, num_kept, uniforms)
        rows = torch.arange(len(num_kept))
        bonus = (num_kept == lengths) & (lengths > 0)
        last = draft[rows, num_kept.clamp_max(draft.shape[1] - 1)]
        return sample(choose(target[rows, num_kept], last, bonus[:, None]), uniforms)

    monkeypatch.setattr("adaptive_spec.decoding.verdict.next_sampled", broken)


@pytest.mark.parametrize("break_it", [broken_temperature, broken_residual, broken_bonus])
def test_broken_variants_are_caught_by_the_same_test(
    real_pair: ModelPair,
    engine: Engine,
    short_prompts: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    break_it: Any,
) -> None:
    monkeypatch.setattr(engine.decoder, "_judge", judge)
    break_it(monkeypatch)
    found = [scores(real_pair, engine, short_prompts, seed, 1) for seed in range(SEEDS // 2)]
    assert max(map(abs, z_of(torch.cat(found)))) > Z_LIMIT


@pytest.mark.parametrize("verifier", ["ngram", "logits", "hybrid", "typical", "topk_relaxed"])
def test_a_budget_holds_on_live_traffic_that_shifts(real_pair: ModelPair, verifier: str) -> None:
    """Loose rules and 2 %: four domains, and a fifth that turns from one kind of prompt to another in mid-run."""
    heard = Heard()
    loose = {"min_similarity": 0.1, "min_overlap": 0.1, "typical_epsilon": 0.001, "relaxed_delta": 0.9}
    verification = VerificationSettings(
        verifier=verifier,
        divergence_budget=0.02,
        budget_window_tokens=500,
        **loose,  # type: ignore[arg-type]
    )
    engine = Engine(real_pair, SETTINGS, heard.listeners, verification=verification)
    engine.start()
    traffic = [(domain, domain, number) for number in range(3) for domain in DOMAINS]
    traffic += [("shifting", "code" if number < 3 else "tools", number) for number in range(6)]
    streams = []
    for index, (domain, source, number) in enumerate(traffic):
        prompt = real_pair.encode(prompts(source)[number].text)[:80]
        params = SamplingParams(
            max_tokens=64, temperature=float(index % 2), seed=index, ignore_eos=True, chain_length=3
        )
        streams.append(engine.submit(Request(f"r{index}", prompt, params, domain)))
    for stream in streams:
        stream.collect()
    engine.stop()
    emitted, divergent = Counter[str](), Counter[str]()
    for step in heard.steps:
        emitted[step.domain] += step.num_emitted
        divergent[step.domain] += step.num_divergent
        assert divergent[step.domain] <= 0.02 * emitted[step.domain]
    assert set(emitted) == {*DOMAINS, "shifting"}
    assert statistics.mean(divergent[domain] / emitted[domain] for domain in emitted) > 0.002  # it is used
