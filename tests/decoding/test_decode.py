"""Decoding without an engine: a loop on the caller's thread."""

import pytest

from adaptive_spec.bench.lossless import greedy_reference
from adaptive_spec.core import Request, SamplingParams
from adaptive_spec.decoding.decoder import Decoder
from adaptive_spec.errors import RequestError
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.settings import DecoderSettings
from tests.decoding.heard import Heard

SETTINGS = DecoderSettings(slots=3, max_context_tokens=64, max_chain_length=3)


def test_more_requests_than_rows_say_what_the_target_says(pair: ModelPair) -> None:
    requests = [Request(f"r{i}", (i + 1, 7, 9), SamplingParams(max_tokens=10, chain_length=3)) for i in range(7)]
    said: dict[str, list[int]] = {request.request_id: [] for request in requests}
    reasons = {}
    for request, delta in Decoder(pair, SETTINGS).decode(requests):
        said[request.request_id] += delta.token_ids
        reasons[request.request_id] = delta.finish_reason
    assert said == {request.request_id: greedy_reference(pair, request.prompt_ids, 10) for request in requests}
    assert set(reasons.values()) <= {"stop", "length"}


def test_a_wrong_request_is_refused_before_any_is_decoded(pair: ModelPair) -> None:
    heard = Heard()
    decoder = Decoder(pair, SETTINGS, heard.listeners)
    with pytest.raises(RequestError, match="empty"):
        next(
            decoder.decode([Request("right", (1, 2), SamplingParams(max_tokens=4)), Request("a", (), SamplingParams())])
        )
    assert not heard.steps and not decoder.num_active


def test_who_stops_reading_cancels_the_rest(pair: ModelPair) -> None:
    heard = Heard()
    decoder = Decoder(pair, SETTINGS, heard.listeners)
    running = decoder.decode([Request("long", (1, 2), SamplingParams(max_tokens=40, ignore_eos=True))])
    next(running)
    running.close()
    assert heard.reasons() == {"long": "cancelled"} and not decoder.num_active
