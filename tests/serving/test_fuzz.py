"""Whatever JSON arrives, the answer is no fault of ours."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from adaptive_spec.serving.bodies import UNSUPPORTED, ChatBody, CompletionBody

TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # halves of surrogate pairs too
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**40, 1e308]))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=8,
)
IDS = st.lists(st.integers(-1, 130), max_size=5)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT}), max_size=3
)
SPECULATION = st.fixed_dictionaries(
    {}, optional={name: SCALARS for name in ("drafter", "adapter", "chain_length", "verifier", "record", "other")}
)


def bodies(kind: type[CompletionBody] | type[ChatBody]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies that are nearly right: what is required is, each other field may be anything."""
    known = {name: JSON for name in (*kind.model_fields, *UNSUPPORTED)}
    known |= {"speculation": st.one_of(SPECULATION, JSON), "metadata": st.one_of(st.dictionaries(TEXT, TEXT), JSON)}
    known |= {name: st.one_of(NUMBERS, JSON) for name in ("seed", "top_k", "max_tokens", "temperature", "stop", "n")}
    known |= {"model": st.one_of(st.just("tiny/target"), JSON)}
    required = {"prompt": st.one_of(TEXT, IDS, JSON)} if kind is CompletionBody else {"messages": MESSAGES}
    return st.fixed_dictionaries(required, optional={n: s for n, s in known.items() if n not in required})


CASES = {"/v1/completions": bodies(CompletionBody), "/v1/chat/completions": bodies(ChatBody)}
CONTROL = ("/api/retrain", "/api/calibrate", "/api/releases/rollback", "/api/releases/1/publish", "/api/canary")


def check(client: TestClient, path: str, body: bytes) -> None:
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", CASES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_completions_take_any_json(client: TestClient, path: str, data: st.DataObject) -> None:
    check(client, path, json.dumps(data.draw(CASES[path])).encode())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([*CASES, *CONTROL]), body=st.one_of(JSON.map(lambda v: json.dumps(v).encode()), st.binary())
)
def test_every_route_takes_any_body(client: TestClient, path: str, body: bytes) -> None:
    check(client, path, body)


@pytest.mark.parametrize("text", [r"\ud800", r"a\u0000b"])
def test_text_that_no_database_takes(client: TestClient, text: str) -> None:
    for path, name in (("/api/retrain", "trigger"), ("/api/calibrate", "domain"), ("/api/releases/rollback", "reason")):
        answer = client.post(path, content=f'{{"{name}": "{text}"}}', headers={"Content-Type": "application/json"})
        assert answer.status_code == 400


@pytest.mark.parametrize("body", [b"[" * 100_000, b"9" * 10_000, b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}"])
def test_json_that_is_too_much_for_a_parser(client: TestClient, body: bytes) -> None:
    check(client, "/v1/completions", body)
