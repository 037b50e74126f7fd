"""Two releases in one decoder: who serves whom, and that no exchange of releases changes a token."""

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from adaptive_spec.core import Release, Request, SamplingParams, Step, Thresholds
from adaptive_spec.decoding.decoder import Decoder
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.served import bucket
from adaptive_spec.errors import ReleaseError
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.releases.trip import STEPS_PER_REQUEST, TRIP_STEPS
from adaptive_spec.settings import DecoderSettings
from tests.decoding.heard import Heard
from tests.decoding.test_decoder import greedy_of_target, prompts
from tests.decoding.test_drafts import noise, to_target

SETTINGS = DecoderSettings(
    slots=8, max_context_tokens=160, max_chain_length=3, explore_share=0.0, prefix_cache_tokens=512
)
NUM_EXCHANGES = 50


@pytest.fixture
def engine(pair: ModelPair, heard: Heard) -> Iterator[Engine]:
    engine = Engine(pair, SETTINGS, heard.listeners)
    yield engine
    engine.stop()


def a_release(pair: ModelPair, version: int, rng: random.Random) -> LoadedRelease:
    """Noise for everybody, or for one domain, or none; often a vocabulary; other thresholds."""
    spoilt = {name: delta * rng.random() for name, delta in noise(pair).items()} if rng.random() < 0.7 else {}
    own = {"code": to_target(pair)} if rng.random() < 0.5 else {}
    vocabulary = tuple(sorted(rng.sample(range(258), 150))) if rng.random() < 0.5 else None
    thresholds = {
        "*": Thresholds(stop_below=rng.choice((0.0, 0.5)), max_chain_length=3, temperature=rng.uniform(0.5, 2))
    }
    return LoadedRelease(Release(version, thresholds, vocabulary=vocabulary), spoilt, own)


class Exchanging:
    """Exchanges releases before every step."""

    def __init__(self, decoder: Decoder, pair: ModelPair, seed: int) -> None:
        self.decoder, self.pair = decoder, pair
        self.rng = random.Random(seed)
        self.rows: list[int] = []  # at each exchange
        self.last: Callable[[], None] | None = None
        self._step = decoder.step

    def step(self) -> None:
        decoder, rng = self.decoder, self.rng
        if len(self.rows) < NUM_EXCHANGES:
            self.rows.append(len(decoder.slots))
            prepared = decoder.weights.prepare(a_release(self.pair, len(self.rows), rng))
            if decoder.lineup.canary is None:
                rng.choice((decoder.swap, lambda drafts: decoder.begin_canary(drafts, 0.5)))(prepared)
            else:
                rng.choice((decoder.swap, lambda _: decoder.end_canary(promote=rng.random() < 0.5), lambda _: None))(
                    prepared
                )
        elif self.last is not None:
            self.last()
            self.last = None
        self._step()


def confidences(steps: list[Step], since: int) -> dict[tuple[str, int], float]:
    """What the draft believed of each token of each request, by the token's place, in the steps from one on."""
    emitted: Counter[str] = Counter()
    found = {}
    for index, step in enumerate(steps):
        for place, position in enumerate(step.positions):
            if index >= since:
                found[step.request_id, emitted[step.request_id] + place] = position.confidence
        emitted[step.request_id] += step.num_emitted
    return found


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_exchanges_of_releases_in_mid_request_change_no_token(
    engine: Engine, heard: Heard, pair: ModelPair, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    exchanging = Exchanging(engine.decoder, pair, seed)
    good = engine.decoder.weights.prepare(LoadedRelease(Release(99), to_target(pair)))
    after: list[int] = []

    def recover() -> None:
        engine.decoder.end_canary(promote=False)
        engine.decoder.swap(good)
        after.append(len(heard.steps))

    exchanging.last = recover
    monkeypatch.setattr(engine.decoder, "step", exchanging.step)
    texts = prompts(16, seed=seed)
    params = SamplingParams(max_tokens=100, chain_length=3, ignore_eos=True)
    streams = [
        engine.submit(Request(f"{i}", text, params, "code" if i % 2 else "prose")) for i, text in enumerate(texts)
    ]
    engine.start()
    outputs = [stream.collect()[1] for stream in streams]
    for text, tokens in zip(texts, outputs, strict=True):
        reference = pair.target.generate(
            torch.tensor([text]),
            attention_mask=torch.ones(1, len(text), dtype=torch.long),
            max_new_tokens=100,
            min_new_tokens=100,
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens == reference[0, len(text) :].tolist()
    assert len(exchanging.rows) == NUM_EXCHANGES and sum(exchanging.rows) > 7 * NUM_EXCHANGES
    assert min(len(row.releases) for row in heard.finished[:8]) > 2
    assert all(
        set(row.releases) == {s.release for s in heard.steps if s.request_id == row.request_id}
        for row in heard.finished
    )
    # Stale keys and values of a draft would show: what it believes after a text hangs on nothing but the text.
    exchanged = confidences(heard.steps, since=after[0])
    assert {step.release for step in heard.steps[after[0] :]} == {99}
    heard.steps.clear()
    again = [engine.submit(Request(f"{i}", text, params)) for i, text in enumerate(texts)]
    assert [stream.collect()[1] for stream in again] == outputs
    clean = confidences(heard.steps, since=0)
    common = exchanged.keys() & clean.keys()
    assert len(common) > 200
    assert all(exchanged[place] == pytest.approx(clean[place], abs=1e-4) for place in common)


def test_a_share_of_requests_gets_the_canary_and_keeps_it(engine: Engine, heard: Heard, pair: ModelPair) -> None:
    engine.start()
    engine.begin_canary(LoadedRelease(Release(5), to_target(pair)), 0.25).result()
    assert engine.canary is not None and engine.canary.version == 5 and engine.release.version == 0
    ids = [f"request {index}" for index in range(60)]
    text, params = prompts(1, seed=2)[0], SamplingParams(max_tokens=12, chain_length=2)
    for stream in [engine.submit(Request(name, text, params)) for name in ids]:
        assert stream.collect()[1] == greedy_of_target(pair, text, 12)
    engine.call(lambda: None).result()
    served = {row.request_id: row.releases for row in heard.finished}
    assert served == {name: (5,) if bucket(name, 5) < 0.25 else (0,) for name in ids}
    assert 5 <= sum(releases == (5,) for releases in served.values()) <= 25
    with pytest.raises(ReleaseError, match="live already"):
        engine.begin_canary(LoadedRelease(), 0.5).result()
    assert engine.canary.version == 5


def test_buckets_are_even_and_differ_between_versions() -> None:
    ids = [f"cmpl-{index}" for index in range(4000)]
    for version in (1, 2):
        shares = [sum(bucket(name, version) < share for name in ids) / len(ids) for share in (0.1, 0.5)]
        assert shares == pytest.approx([0.1, 0.5], abs=0.03)
    both = sum(bucket(name, 1) < 0.5 and bucket(name, 2) < 0.5 for name in ids) / len(ids)
    assert both == pytest.approx(0.25, abs=0.03)


def test_a_canary_that_breaks_acceptance_is_ended_within_the_stated_steps(
    engine: Engine, heard: Heard, pair: ModelPair
) -> None:
    engine.start()
    engine.swap(LoadedRelease(Release(1), to_target(pair))).result()
    wreck = {name: delta * 8 for name, delta in noise(pair).items()}
    engine.begin_canary(LoadedRelease(Release(2), wreck), 0.5).result()
    params = SamplingParams(max_tokens=60, chain_length=2, ignore_eos=True)
    texts = prompts(24, seed=6)
    streams = [engine.submit(Request(f"r{i}", text, params)) for i, text in enumerate(texts)]
    outputs = [stream.collect()[1] for stream in streams]
    assert engine.canary is None and engine.tripped is not None
    version, reason = engine.tripped
    assert version == 2 and "almost nothing" in reason
    counted: dict[str, int] = {}
    for step in heard.steps:
        if step.release == 2 and step.positions:
            counted[step.request_id] = counted.get(step.request_id, 0) + 1
    assert sum(min(count, STEPS_PER_REQUEST) for count in counted.values()) < TRIP_STEPS + SETTINGS.slots
    assert {row.finish_reason for row in heard.finished} == {"length"}
    assert all(len(tokens) == 60 for tokens in outputs)
    assert any(row.releases == (2, 1) for row in heard.finished)  # went on with the live release


def test_a_canary_whose_drafting_fails_costs_no_request(
    engine: Engine, heard: Heard, pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start()
    engine.begin_canary(LoadedRelease(Release(3), noise(pair)), 1.0).result()
    bad = engine.decoder.lineup.canary.drafts.shared.model  # type: ignore[union-attr]
    forward = engine.decoder.draft_cache.forward

    def failing(*args: object, model: object = None, **kwargs: object) -> torch.Tensor:
        if model is bad:
            raise RuntimeError("this adapter has a hole")
        return forward(*args, model=model, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.decoder.draft_cache, "forward", failing)
    texts = prompts(3, seed=7)
    params = SamplingParams(max_tokens=20, chain_length=2)
    streams = [engine.submit(Request(f"{i}", text, params)) for i, text in enumerate(texts)]
    for text, stream in zip(texts, streams, strict=True):
        assert stream.collect()[1] == greedy_of_target(pair, text, 20)
    assert engine.tripped == (3, "drafting failed: RuntimeError: this adapter has a hole")
    assert engine.canary is None and sum(step.num_accepted for step in heard.steps) > 0


def test_a_release_with_the_same_draft_rebuilds_nothing(engine: Engine, pair: ModelPair) -> None:
    """What a calibration publishes differs in numbers alone."""
    decoder = engine.decoder
    engine.swap(LoadedRelease(Release(1), to_target(pair)))
    decoder.admit(Request("a", (1, 2, 3), SamplingParams(max_tokens=40, ignore_eos=True)), lambda _: None, 0.0)
    engine._do_jobs()
    decoder.fill(10)
    decoder.step()
    assert decoder.slots[0].draft_length > 0
    engine.swap(LoadedRelease(Release(2, {"*": Thresholds(temperature=1.2)}), to_target(pair)))
    engine._do_jobs()
    assert decoder.release.version == 2 and decoder.slots[0].draft_length > 0
    engine.swap(LoadedRelease(Release(3)))
    engine._do_jobs()
    assert decoder.slots[0].draft_length == 0 and engine.pauses.num_swaps == 3
