"""Relaxed verification in the live decoder: who may choose it, what it keeps, and the budget that holds it."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

from adaptive_spec.core import Release, Request, Rule, SamplingParams, Step, Thresholds
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.errors import RequestError
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import DecoderSettings, VerificationSettings
from tests.decoding.heard import Heard

Exactly = Callable[[SamplingParams], list[list[int]]]
SETTINGS = DecoderSettings(slots=4, max_context_tokens=400, max_chain_length=4)
GREEDY = SamplingParams(max_tokens=120, ignore_eos=True, chain_length=3)
RELAXED = ("ngram", "logits", "hybrid", "typical", "topk_relaxed")
ANYTHING = {"min_similarity": 0.0, "min_overlap": 0.0, "typical_epsilon": 0.0, "relaxed_top_k": 999, "relaxed_delta": 1}
NOTHING = {"min_similarity": 1.0, "min_overlap": 1.0, "typical_delta": 99.0, "typical_epsilon": 1.0, "relaxed_top_k": 1}


def rules(verifier: str, budget: float = 1.0, **numbers: Any) -> VerificationSettings:
    return VerificationSettings(verifier=verifier, divergence_budget=budget, **{"typical_delta": 9.0, **numbers})


def decode(
    pair: ModelPair,
    verification: VerificationSettings,
    requests: list[Request],
    heard: Heard | None = None,
    release: Release | None = None,
    settings: DecoderSettings = SETTINGS,
) -> list[list[int]]:
    engine = Engine(pair, settings, (heard or Heard()).listeners, verification=verification)
    if release is not None:
        engine.decoder.swap(engine.decoder.weights.prepare(LoadedRelease(release)))
    streams = [engine.submit(request) for request in requests]
    engine.start()
    try:
        return [stream.collect()[1] for stream in streams]
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def exactly(pair: ModelPair) -> Exactly:
    """What ``exact`` says to some requests, decoded once for all verifiers that are held against it."""
    return functools.cache(lambda params: decode(pair, VerificationSettings(), some(params)))


def some(params: SamplingParams = GREEDY, domain: str = "code", count: int = 4, name: str = "r") -> list[Request]:
    return [Request(f"{name}-{i}", (1 + i, 2, 3), replace(params, seed=i), domain) for i in range(count)]


def divergent(steps: list[Step]) -> int:
    return sum(step.num_divergent for step in steps)


@pytest.fixture(params=RELAXED)
def verifier(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_a_rule_that_nothing_passes_is_exact(
    pair: ModelPair, heard: Heard, exactly: Exactly, verifier: str, temperature: float, drafter: str
) -> None:
    params = replace(GREEDY, temperature=temperature, drafter=drafter, max_tokens=40)
    assert decode(pair, rules(verifier, **NOTHING), some(params), heard) == exactly(params)
    assert divergent(heard.steps) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rule_that_everything_passes_keeps_whole_chains(
    pair: ModelPair, heard: Heard, exactly: Exactly, verifier: str, temperature: float
) -> None:
    params = replace(GREEDY, temperature=temperature)
    assert decode(pair, rules(verifier, **ANYTHING), some(params), heard) != exactly(params)
    late = [step for step in heard.steps if step.step_index > 10]  # credit has been earned by then
    assert {step.verifier for step in late} == {verifier}
    whole = [step.num_accepted == step.chain_length for step in late]
    assert sum(whole) > 0.95 * len(whole)
    assert 0 < divergent(heard.steps) <= sum(step.num_emitted for step in heard.steps)
    for step in heard.steps:
        assert step.num_divergent <= step.num_accepted
        assert (step.num_divergent > 0) == (step.total_variation > 0)
        # A sampled chain may lose a token that is the target's own favourite; a greedy one never does.
        assert (step.given_up_nats > 0) == (step.num_divergent > 0) or (temperature and step.given_up_nats >= 0)
        assert step.total_variation <= step.num_divergent + 1e-5


def test_divergence_is_measured_right(pair: ModelPair, heard: Heard) -> None:
    """Against the two models themselves, one position at a time."""
    [request] = some(count=1)
    [said] = decode(pair, rules("logits", **ANYTHING), [request], heard)
    prompt, at = list(request.prompt_ids), 0
    with torch.inference_mode():
        target = pair.target(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        draft = pair.draft(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    apart = 1 - torch.minimum(target.exp(), draft.exp()).sum(-1)
    for step in heard.steps:
        places = [at + i for i in range(step.num_accepted) if int(target[at + i].argmax()) != said[at + i]]
        assert step.num_divergent == len(places)
        assert step.total_variation == pytest.approx(sum(float(apart[place]) for place in places), abs=1e-4)
        given_up = sum(float(target[place].max() - target[place, said[place]]) for place in places)
        assert step.given_up_nats == pytest.approx(given_up, abs=1e-4)
        at += step.num_emitted


@pytest.mark.parametrize(
    ("budget", "temperature"),
    [
        (0.02, 0.0),
        (0.1, 1.0),
        pytest.param(0.02, 1.0, marks=pytest.mark.slow),
        pytest.param(0.1, 0.0, marks=pytest.mark.slow),
    ],
)
def test_no_domain_ever_exceeds_its_budget(
    pair: ModelPair, heard: Heard, verifier: str, budget: float, temperature: float
) -> None:
    """With the loosest rule, two domains side by side; one of them shifts to other prompts and sampling in mid-run."""
    verification = rules(verifier, budget, budget_window_tokens=200, **ANYTHING)
    params = replace(GREEDY, temperature=temperature)
    shifted = [
        Request(f"late-{i}", tuple(range(40 + i, 90 + i)), replace(params, temperature=1.5, seed=i), "code")
        for i in range(6)
    ]
    decode(pair, verification, [*some(params), *some(params, "prose", 4, "p"), *shifted], heard)
    emitted, spent = Counter[str](), Counter[str]()
    for step in heard.steps:
        emitted[step.domain] += step.num_emitted
        spent[step.domain] += step.num_divergent
        assert spent[step.domain] <= budget * emitted[step.domain]
    assert all(spent[domain] > 0.2 * budget * emitted[domain] for domain in emitted)  # it is used, too


def test_a_domain_over_its_budget_falls_back_and_comes_back(pair: ModelPair, heard: Heard) -> None:
    verification = rules("logits", 0.1, budget_window_tokens=60, **ANYTHING)
    decode(pair, verification, some(replace(GREEDY, max_tokens=300), count=2), heard)
    kinds = [kind for kind, _, _ in heard.events]
    assert kinds[:4] == ["divergence_budget_spent", "divergence_budget_restored"] * 2
    first = heard.events[0]
    assert first[2] == "code" and first[1]["budget"] == 0.1 and first[1]["exact_for_tokens"] == 30
    assert first[1]["divergence_share"] <= 0.1
    verifiers = {step.verifier for step in heard.steps}
    assert verifiers == {"exact", "logits"}


@pytest.mark.parametrize("verification", [rules("logits", 0.0, **ANYTHING), VerificationSettings()])
def test_no_budget_means_exact(pair: ModelPair, heard: Heard, verification: VerificationSettings) -> None:
    exact = decode(pair, VerificationSettings(), some())
    assert decode(pair, verification, some(), heard) == exact
    assert {step.verifier for step in heard.steps} == {"exact"}


def test_exact_neighbours_of_relaxed_rows_say_what_the_target_says(pair: ModelPair) -> None:
    verification = rules("logits", domain_budgets={"strict": 0.0}, **ANYTHING)
    for temperature in (0.0, 1.0):
        params = replace(GREEDY, temperature=temperature)
        alone = decode(pair, VerificationSettings(), some(params, "strict", 2))
        mixed = decode(pair, verification, [*some(params, "loose", 2, "l"), *some(params, "strict", 2)])
        assert mixed[2:] == alone


# ---- who chooses


def test_a_request_chooses_within_what_is_allowed(pair: ModelPair, heard: Heard) -> None:
    asking = some(replace(GREEDY, verifier="typical"), count=1)
    with pytest.raises(RequestError, match=r"not allowed.*verification\.allowed"):
        decode(pair, VerificationSettings(), asking)
    with pytest.raises(RequestError, match="choose one of exact, ngram"):
        decode(pair, VerificationSettings(), some(replace(GREEDY, verifier="vibes"), count=1))
    allowed = VerificationSettings(allowed=("typical",), divergence_budget=1.0, typical_epsilon=0.0)
    decode(pair, allowed, asking, heard)
    assert {step.verifier for step in heard.steps if step.step_index > 20} == {"typical"}
    other = Heard()
    decode(pair, rules("logits", **ANYTHING), some(replace(GREEDY, verifier="exact")), other)
    assert {step.verifier for step in other.steps} == {"exact"}


@pytest.mark.parametrize(
    ("verification", "wanted"),
    [
        (VerificationSettings(), ("exact", 0.7)),  # a release chooses nothing that the operator has not allowed
        (VerificationSettings(allowed=("logits",)), ("logits", 0.9)),
        (VerificationSettings(verifier="logits"), ("logits", 0.9)),
        (VerificationSettings(domain_verifiers={"code": "logits"}), ("logits", 0.9)),
        # Numbers that were learned for one verifier say nothing of another, which may share them.
        (VerificationSettings(allowed=("logits",), domain_verifiers={"code": "hybrid"}), ("hybrid", 0.7)),
        (VerificationSettings(verifier="typical"), ("typical", 0.7)),
    ],
)
def test_the_operator_bounds_what_a_release_chooses(
    pair: ModelPair, verification: VerificationSettings, wanted: tuple[str, float]
) -> None:
    learned = Thresholds(rule=Rule("logits", min_similarity=0.9))
    release = Release(3, MappingProxyType({"code": learned}))
    engine = Engine(pair, SETTINGS, verification=verification)
    found = engine.decoder.rules.rule_of(some(count=1)[0], release)
    assert (found.verifier, found.min_similarity) == wanted
    untouched = engine.decoder.rules.rule_of(some(domain="prose", count=1)[0], release)
    assert (untouched.verifier, untouched.min_similarity) == (verification.verifier, 0.7)


@pytest.mark.parametrize("verification", [rules("logits"), rules("ngram", domain_verifiers={"code": "logits"})])
def test_a_release_may_always_fall_back_to_exact(pair: ModelPair, verification: VerificationSettings) -> None:
    learned = Rule("exact", min_similarity=0.1)
    assert verification.choice("code", learned).verifier == "exact"
    asked = verification.choice("code", learned, "logits")  # by a request that may: under the operator's numbers
    assert (asked.verifier, asked.min_similarity) == ("logits", 0.7)
    assert verification.choice("code", replace(learned, verifier="logits"), "logits").min_similarity == 0.1


def test_relaxed_answers_are_not_kept_for_others(pair: ModelPair, heard: Heard) -> None:
    settings = SETTINGS.model_copy(update={"answer_cache_tokens": 10_000})
    request = some(count=1)[0]
    again = replace(request, request_id="again")
    for verification, cached in ((rules("logits", **ANYTHING), False), (VerificationSettings(), True)):
        engine = Engine(pair, settings, heard.listeners, verification=verification)
        engine.start()
        try:
            engine.submit(request).collect()
            usage = engine.submit(again).collect()[2].usage
        finally:
            engine.stop()
        assert usage is not None and usage.cached is cached
        assert (usage.num_divergent_tokens > 0) is (not cached)
