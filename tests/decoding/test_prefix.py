"""The prefix cache: what was computed for one prompt serves the next that begins alike, and changes no token."""

import pytest
import torch

from adaptive_spec.core import Release, Request, SamplingParams
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.prefix import BLOCK_TOKENS, PrefixCache
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from tests.decoding.test_decoder import SETTINGS, greedy_of_target, prompts

SYSTEM = tuple(range(40, 40 + 2 * BLOCK_TOKENS + 3))  # two whole blocks and a bit
PARAMS = SamplingParams(max_tokens=16, chain_length=3)


def test_prompts_that_begin_alike_are_computed_once(pair: ModelPair) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"prefix_cache_tokens": 512}))
    engine.start()
    texts = [SYSTEM + text for text in prompts(6, seed=8)]
    for name, text in enumerate(texts):
        assert engine.submit(Request(str(name), text, PARAMS)).collect()[1] == greedy_of_target(pair, text, 16)
    again = [engine.submit(Request(f"again {name}", text, PARAMS)) for name, text in enumerate(texts)]
    assert [stream.collect()[1] for stream in again] == [greedy_of_target(pair, text, 16) for text in texts]
    target, draft = engine.decoder.prefixes, engine.decoder.proposer.prefixes
    assert target.num_recalled >= 11 * 2 * BLOCK_TOKENS and draft.num_recalled >= 11 * 2 * BLOCK_TOKENS
    assert 0 < target.num_tokens <= 512
    deltas = {n: torch.full_like(p, 0.01) for n, p in pair.draft.named_parameters() if "layers" in n}
    engine.swap(LoadedRelease(Release(1), deltas)).result()
    before = draft.num_recalled
    assert engine.submit(Request("new", texts[0], PARAMS)).collect()[1] == greedy_of_target(pair, texts[0], 16)
    assert draft.num_recalled == before  # by other weights
    engine.swap(LoadedRelease()).result()
    engine.submit(Request("back", texts[1], PARAMS)).collect()
    assert draft.num_recalled > before  # what these weights computed is still there
    engine.stop()


def test_an_answer_is_the_beginning_of_the_next_turn(pair: ModelPair) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"prefix_cache_tokens": 512}))
    engine.start()
    params = SamplingParams(max_tokens=40, chain_length=2, ignore_eos=True)
    _, said, _ = engine.submit(Request("1", SYSTEM, params)).collect()
    engine.call(lambda: None).result()
    before = engine.decoder.prefixes.num_recalled
    turn = (*SYSTEM, *said[:20], 7)
    assert engine.submit(Request("2", turn, PARAMS)).collect()[1] == greedy_of_target(pair, turn, 16)
    assert engine.decoder.prefixes.num_recalled - before == len(turn[:-1]) // BLOCK_TOKENS * BLOCK_TOKENS
    engine.stop()


@pytest.mark.parametrize("room", [0, BLOCK_TOKENS, 3 * BLOCK_TOKENS])
def test_the_cache_is_bounded_and_keeps_beginnings(pair: ModelPair, room: int) -> None:
    decoder = Engine(pair, SETTINGS).decoder
    cache = PrefixCache(decoder.target_cache, room)
    with torch.inference_mode():
        cache.remember(0, SYSTEM)
        for start in range(3):
            cache.remember(0, tuple(range(start, start + BLOCK_TOKENS)))
            cache.recall(1, SYSTEM)
        assert cache.num_tokens <= room
        kept = cache.recall(1, SYSTEM)
        assert kept == {0: 0, BLOCK_TOKENS: 0, 3 * BLOCK_TOKENS: 2 * BLOCK_TOKENS}[room]
        assert cache.recall(1, SYSTEM, "other weights") == 0
        assert cache.recall(1, (1, *SYSTEM)) == 0
        for first, second in decoder.target_cache._stores():
            assert all(torch.equal(store[0, :, :kept], store[1, :, :kept]) for store in (first, second))


def test_a_failed_step_forgets_what_it_may_have_spoilt(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"prefix_cache_tokens": 512}))
    engine.start()
    engine.submit(Request("1", SYSTEM, PARAMS)).collect()
    with monkeypatch.context() as broken:
        broken.setattr(engine.decoder.proposer, "propose", lambda *_: 1 / 0)
        assert engine.submit(Request("2", SYSTEM, PARAMS)).collect()[2].finish_reason == "error"
    engine.call(lambda: None).result()
    assert engine.decoder.prefixes.num_tokens == 0
    engine.stop()


def test_requests_that_come_together_share_their_beginning(pair: ModelPair) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"prefix_cache_tokens": 512}))
    texts = [(*SYSTEM, index) for index in range(3)]
    streams = [engine.submit(Request(str(index), text, PARAMS)) for index, text in enumerate(texts)]
    engine.start()
    assert [stream.collect()[1] for stream in streams] == [greedy_of_target(pair, text, 16) for text in texts]
    assert engine.decoder.prefixes.num_recalled == 2 * 2 * BLOCK_TOKENS
    engine.stop()
