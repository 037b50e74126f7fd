"""Log-probs are the target's own, whoever drafted and however the token was chosen."""

from collections.abc import Iterator

import pytest
import torch

from adaptive_spec.core import Request, SamplingParams
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.settings import DecoderSettings


@pytest.fixture
def engine(pair: ModelPair) -> Iterator[Engine]:
    engine = Engine(pair, DecoderSettings(slots=3, max_context_tokens=128, max_chain_length=4))
    engine.start()
    yield engine
    engine.stop()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, logprobs=5),
        SamplingParams(max_tokens=20, logprobs=5, chain_length=0),
        SamplingParams(max_tokens=20, logprobs=20, temperature=1.3, seed=1, top_p=0.9),
        SamplingParams(max_tokens=20, logprobs=5, temperature=0.7, seed=2, top_k=4, drafter="combined"),
        SamplingParams(max_tokens=20, logprobs=5, repetition_penalty=1.5, frequency_penalty=1.0),
        SamplingParams(max_tokens=20, logprobs=0, temperature=1.0, seed=3, stop=("e",)),
    ],
)
def test_they_are_the_log_softmax_of_the_targets_logits(
    engine: Engine, pair: ModelPair, params: SamplingParams
) -> None:
    prompts = [(1, 2, 3, 1, 2, 3), (50, 60), (9,) * 20]
    streams = [engine.submit(Request(str(i), prompt, params)) for i, prompt in enumerate(prompts)]
    neighbour = engine.submit(Request("plain", (4, 5), SamplingParams(max_tokens=20)))
    for prompt, stream in zip(prompts, streams, strict=True):
        deltas = list(stream.events())
        assert all(len(delta.log_probs) == len(delta.token_ids) for delta in deltas)
        entries = [entry for delta in deltas for entry in delta.log_probs]
        tokens = [entry.token_id for entry in entries]
        assert tokens == [token for delta in deltas for token in delta.token_ids] and tokens
        with torch.no_grad():
            wanted = pair.target(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        ours = torch.tensor([entry.log_prob for entry in entries])
        assert torch.allclose(wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0], ours, atol=1e-4)
        best = wanted.topk(params.logprobs or 0).values
        listed = torch.tensor([[log_prob for _, log_prob in entry.top] for entry in entries]).view(best.shape)
        assert torch.allclose(best, listed, atol=1e-4)
        for position, entry in enumerate(entries):
            for token, log_prob in entry.top:
                assert abs(float(wanted[position, token]) - log_prob) < 1e-4
    assert not any(delta.log_probs for delta in neighbour.events())


def test_chains_are_accepted_while_log_probs_are_kept(engine: Engine) -> None:
    params = SamplingParams(max_tokens=60, chain_length=4, logprobs=1, ignore_eos=True)
    deltas = list(engine.submit(Request("a", (1, 2, 3), params)).events())
    assert max(len(delta.log_probs) for delta in deltas) > 1
