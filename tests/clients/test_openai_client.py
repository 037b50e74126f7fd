"""The ``openai`` package against the service: what it sends is understood, what it gets it can parse."""

from typing import Any

import openai
import pytest
from openai import OpenAI

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def model(client: OpenAI) -> str:
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id
    return card.id


def test_a_chat_whole_and_streamed_say_the_same(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "temperature": 0, "max_completion_tokens": 12}
    asked["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**asked, metadata={"domain": "greetings"})
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    details = whole.usage.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None
    text, usage = "", None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        text += "".join(each.delta.content or "" for each in chunk.choices)
    assert text == choice.message.content
    assert usage is not None and usage.total_tokens == whole.usage.total_tokens


def test_choices_seeds_and_log_probs(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HELLO, "temperature": 1, "max_tokens": 6, "n": 3, "seed": 5}
    alone = {"ignore_eos": True, "speculation": {"chain_length": 0}}  # so that a seed repeats
    first, again = (
        client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, extra_body=alone) for _ in range(2)
    )
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    for choice in first.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 6
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in choice.logprobs.content)


def test_a_completion_and_where_it_stops(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "abc", "temperature": 0, "max_tokens": 20}
    asked["extra_body"] = {"ignore_eos": True}
    (whole,) = client.completions.create(**asked, logprobs=1).choices
    assert whole.logprobs is not None and whole.logprobs.token_logprobs is not None
    assert len(whole.logprobs.token_logprobs) == 20
    (cut,) = client.completions.create(**asked, stop=whole.text[4:6]).choices
    assert cut.finish_reason == "stop" and whole.text.startswith(cut.text) and whole.text[4:6] not in cut.text
    penalised = client.completions.create(**asked, presence_penalty=1.5, frequency_penalty=0.5, top_p=0.9)
    assert len(penalised.choices) == 1


def test_what_speculation_may_be_asked_for(client: OpenAI, model: str) -> None:
    """Off, a fixed length, another drafter: the same text, and the answer says what was done."""
    texts = set()
    for speculation in ({"chain_length": 0}, {"chain_length": 3}, {"drafter": "ngram"}, {"verifier": "exact"}):
        body = {"speculation": speculation, "ignore_eos": True}
        reply = client.completions.create(model=model, prompt="xyz", temperature=0, max_tokens=12, extra_body=body)
        texts.add(reply.choices[0].text)
        told = (reply.model_extra or {})["speculation"]
        assert told["releases"] == [0]
        if speculation == {"chain_length": 0}:
            usage = reply.usage and reply.usage.completion_tokens_details
            assert usage is not None and usage.accepted_prediction_tokens == usage.rejected_prediction_tokens == 0
    assert len(texts) == 1


def test_refusals_are_its_own_exceptions(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here") as unknown:
        client.chat.completions.create(model="another", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="tools=") as tools:
        client.chat.completions.create(
            model=model, messages=HELLO, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert tools.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="context holds"):
        client.completions.create(model=model, prompt="a" * 500)
    with pytest.raises(openai.BadRequestError, match="verifier"):
        client.completions.create(model=model, prompt="a", extra_body={"speculation": {"verifier": "hope"}})
    with pytest.raises(openai.APIStatusError, match="raise deadline_seconds") as late:
        client.completions.create(model=model, prompt="a", extra_body={"deadline_seconds": 1e-6})
    assert late.value.status_code == 408
