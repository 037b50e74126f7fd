"""Chains measured whole: what is measured is what verification saw, and nobody's tokens change for it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaptive_spec.core import ChainEvidence, Release, Request, SamplingParams, Thresholds
from adaptive_spec.decoding import verdict
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import DecoderSettings, VerificationSettings
from tests.decoding.heard import Heard

SETTINGS = DecoderSettings(slots=4, max_context_tokens=200, max_chain_length=4)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, chain_length=3)
SAMPLED = replace(PARAMS, temperature=1.0)


def logits(**given: Any) -> VerificationSettings:
    return VerificationSettings(
        **{"verifier": "logits", "min_similarity": 0.6, "divergence_budget": 0.3, "evidence_share": 1.0, **given}
    )


def decode(
    pair: ModelPair,
    verification: VerificationSettings,
    requests: list[Request],
    listeners: Listeners,
    settings: DecoderSettings = SETTINGS,
    release: Release | None = None,
) -> list[list[int]]:
    engine = Engine(pair, settings, listeners, verification=verification)
    if release is not None:
        engine.decoder.swap(engine.decoder.weights.prepare(LoadedRelease(release)))
    streams = [engine.submit(request) for request in requests]
    engine.start()
    try:
        return [stream.collect()[1] for stream in streams]
    finally:
        engine.stop()


def some(*params: SamplingParams, domain: str = "code") -> list[Request]:
    return [Request(f"r-{i}", (1 + i, 2, 3), replace(its, seed=i), domain) for i, its in enumerate(params)]


@pytest.fixture(params=["walk", "judge"])
def settings(request: pytest.FixtureRequest) -> Iterator[DecoderSettings]:
    """Both ways to verify: where the host may look, and as on a device."""
    yield SETTINGS.model_copy(update={"static_shapes": "off" if request.param == "walk" else "on"})


@pytest.mark.parametrize(
    ("drafter", "allowed_only"),
    [
        ("model", False),
        ("combined", True),
        pytest.param("model", True, marks=pytest.mark.slow),
        pytest.param("combined", False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("params", [PARAMS, SAMPLED, replace(SAMPLED, top_p=0.9, presence_penalty=0.3)])
def test_measuring_changes_nothing(
    pair: ModelPair, settings: DecoderSettings, params: SamplingParams, drafter: str, allowed_only: bool
) -> None:
    verification = logits(verifier="exact", allowed=("logits",)) if allowed_only else logits()
    requests = some(*[replace(params, drafter=drafter)] * 3, replace(PARAMS, chain_length=None))
    told, silent = Heard(), Heard()
    said = decode(pair, verification, requests, told.listeners, settings)
    off = verification.model_copy(update={"evidence_share": 0.0})
    assert said == decode(pair, off, requests, silent.listeners, settings)
    assert told.evidence and not silent.evidence
    assert [(step.verifier, step.num_accepted, step.num_divergent) for step in told.steps] == [
        (step.verifier, step.num_accepted, step.num_divergent) for step in silent.steps
    ]


@pytest.mark.parametrize("params", [PARAMS, SAMPLED])
def test_the_strict_verdict_is_the_one_that_verification_took(
    pair: ModelPair, heard: Heard, settings: DecoderSettings, params: SamplingParams
) -> None:
    """With exact verification a step accepts the chain up to its first refusal, coins of sampled rows included."""
    verification = logits(verifier="exact", allowed=("logits",))
    decode(pair, verification, some(*[params] * 4), heard.listeners, settings)
    steps = {(step.request_id, step.step_index): step for step in heard.steps}
    assert len(heard.evidence) > 20
    refusals = 0
    for seen in heard.evidence:
        step = steps[seen.request_id, seen.step_index]
        assert (seen.drafter, len(seen.chain), seen.release) == (step.drafter, step.chain_length, 0)
        accepted = (*seen.strict, False).index(False)
        assert step.num_accepted == accepted
        refusals += accepted < len(seen.chain)
    assert refusals > 5


def test_similarities_are_those_of_the_two_models(pair: ModelPair, heard: Heard) -> None:
    """Against the models themselves, past the refusal too, under the rule's measure."""
    release = Release(3, {"code": Thresholds(temperature=1.7, sampling_temperature=0.6)})
    [request] = some(PARAMS)
    [said] = decode(pair, logits(similarity="cosine"), [request], heard.listeners, release=release)
    at, ends = 0, {}
    for step in heard.steps:
        ends[step.step_index] = at
        at += step.num_emitted
    whole = [seen for seen in heard.evidence if seen.chain]
    assert any(not all(seen.strict[:-1]) for seen in whole)
    for seen in whole:
        text = [*request.prompt_ids, *said[: ends[seen.step_index]], *seen.chain]
        with torch.inference_mode():
            target = pair.target(torch.tensor([text])).logits[0, -len(seen.chain) - 1 : -1]
            draft = pair.draft(torch.tensor([text])).logits[0, -len(seen.chain) - 1 : -1]
        alike = torch.cosine_similarity(target.softmax(-1), draft.softmax(-1), dim=-1)
        assert seen.similarities == pytest.approx(alike.tolist(), abs=1e-4)
        assert list(seen.target_tokens) == target.argmax(-1).tolist()
        assert (seen.measure, seen.release, seen.most_emitted) == ("cosine", 3, len(seen.chain) + 1)
        assert (seen.greedy, seen.temperature) == (True, 1.0)


def test_an_answer_ends_where_a_chain_says_so(pair: ModelPair, heard: Heard) -> None:
    decoder = Engine(pair, SETTINGS, heard.listeners, verification=logits()).decoder
    decoder.evidence._eos = frozenset(range(0, 258, 2))  # every other token ends
    decoder._eos = decoder.evidence._eos
    for request in some(*[replace(PARAMS, ignore_eos=False)] * 4):
        decoder.admit(request, lambda delta: None, 0.0)
        while decoder.filling:
            decoder.fill(64)
    while decoder.slots:
        decoder.step()
    ended = [seen for seen in heard.evidence if any(token % 2 == 0 for token in seen.chain)]
    assert ended
    for seen in ended:
        assert seen.most_emitted == next(place for place, token in enumerate(seen.chain, 1) if token % 2 == 0)


@pytest.mark.parametrize(
    ("verification", "params", "domain"),
    [
        (VerificationSettings(evidence_share=1.0), PARAMS, "code"),  # nothing may ever relax
        (logits(evidence_share=0.0), PARAMS, "code"),
        (logits(divergence_budget=0.0), PARAMS, "code"),
        (logits(domain_verifiers={"strict": "exact"}, allowed=("ngram",)), PARAMS, "strict"),
        (logits(verifier="typical"), PARAMS, "code"),  # its numbers are not calibrated
        (logits(), replace(PARAMS, record=False), "code"),
        (logits(), replace(PARAMS, verifier="exact"), "code"),  # not what the domain's rule would judge
    ],
)
def test_who_is_not_measured_pays_nothing(
    pair: ModelPair,
    heard: Heard,
    monkeypatch: pytest.MonkeyPatch,
    verification: VerificationSettings,
    params: SamplingParams,
    domain: str,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("adaptive_spec.decoding.evidence.look", refuse)
    decode(pair, verification, some(params, params, domain=domain), heard.listeners)
    assert heard.evidence == [] and len(heard.steps) > 10


def test_without_a_listener_nothing_is_measured(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("chosen")

    monkeypatch.setattr("adaptive_spec.decoding.evidence.EvidenceTaker.choose", refuse)
    decode(pair, logits(), some(PARAMS), Listeners())


def test_a_small_share_of_the_steps_is_measured(pair: ModelPair, heard: Heard) -> None:
    long = replace(PARAMS, max_tokens=180)
    decode(pair, logits(evidence_share=0.2), some(*[long] * 4), heard.listeners)
    steps = len([step for step in heard.steps if step.step_index])
    assert 0.1 * steps < len(heard.evidence) < 0.35 * steps


def test_measuring_that_fails_is_left_out(
    pair: ModelPair, heard: Heard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = decode(pair, logits(), some(PARAMS, SAMPLED), Heard().listeners)

    def fail(*_: object) -> verdict.Look:
        raise MemoryError("no room")

    monkeypatch.setattr("adaptive_spec.decoding.evidence.look", fail)
    assert decode(pair, logits(), some(PARAMS, SAMPLED), heard.listeners) == wanted
    assert heard.evidence == [] and "chains are not measured" in caplog.text


def test_empty_chains_count_too(pair: ModelPair, heard: Heard) -> None:
    """A step without a chain emits a token that cannot diverge."""
    decode(pair, logits(), some(replace(PARAMS, chain_length=0)), heard.listeners)
    assert heard.evidence and {seen.chain for seen in heard.evidence} == {()}
    seen: ChainEvidence = heard.evidence[0]
    assert (seen.most_emitted, seen.drafter, seen.similarities) == (1, "", ())
