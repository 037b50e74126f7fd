"""LiteLLM, as people put it in front of several backends: an ``openai/`` model at our address.

``make test-clients`` installs it.
"""

from typing import Any

import pytest

litellm: Any = pytest.importorskip("litellm", reason="make test-clients installs it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # its warnings are its own
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def asked(url: str) -> dict[str, Any]:
    import json
    import urllib.request

    with urllib.request.urlopen(f"{url}/v1/models") as reply:
        served = json.load(reply)["data"][0]["id"]
    return {
        "model": f"openai/{served}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": HELLO,
        "temperature": 0,
        "max_tokens": 12,
        "num_retries": 0,
        "extra_body": {"ignore_eos": True, "metadata": {"domain": "proxied"}},
    }


def test_a_chat_whole_and_streamed_say_the_same(asked: dict[str, Any]) -> None:
    whole = litellm.completion(**asked)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 12
    pieces = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == (
        whole.choices[0].message.content
    )
    assert pieces[-1].usage.completion_tokens == 12


def test_refusals_are_its_own_exceptions(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**asked, "temperature": 9})
    with pytest.raises(litellm.NotFoundError, match="not served here"):
        litellm.completion(**{**asked, "model": "openai/another"})


def test_the_domain_arrives(url: str, asked: dict[str, Any]) -> None:
    from tests.process import call, until

    litellm.completion(**asked)
    until(lambda: any(row["domain"] == "proxied" for row in call(f"{url}/api/stats")["domains"]))
