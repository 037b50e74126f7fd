"""The tokens a draft needs."""

from dataclasses import replace

import torch

from adaptive_spec.learning.evaluate import judge
from adaptive_spec.learning.vocabulary import choose_vocabulary
from tests.learning.toy import tiny_draft, toy_traces


def test_tokens_the_target_says_come_first_then_those_of_prompts_then_low_ids() -> None:
    traces = toy_traces(4, seed=0)
    said = {int(token) for trace in traces for token in trace.top_ids[:, 0]}
    quoted = {token for trace in traces for token in trace.tokens} - said
    rare = replace(traces[0], tokens=(90, *traces[0].tokens), prompt_tokens=traces[0].prompt_tokens + 1)
    chosen = choose_vocabulary([*traces, rare], len(said | quoted) + 4, 97)
    assert chosen is not None and chosen == sorted(chosen)
    rest = set(chosen) - said - quoted
    assert 90 in rest and len(rest) == 4 and max(rest - {90}) < 90
    assert set(choose_vocabulary(traces, len(said), 97) or []) == said
    assert choose_vocabulary(traces, 97, 97) is None and choose_vocabulary(traces, 0, 97) is None


def test_a_draft_is_judged_on_what_it_may_propose() -> None:
    draft, traces = tiny_draft(), toy_traces(6, seed=1)
    free = judge(draft, traces)
    allowed = list(range(0, draft.config.vocab_size, 2))
    held = judge(draft, traces, vocabulary=allowed)
    for before, after in zip(free, held, strict=True):
        said = torch.from_numpy(before.trace.top_ids[:, 0].astype(int))
        assert not any(same and int(token) % 2 for same, token in zip(after.agrees, said, strict=True))
        assert all(a >= b - 1e-6 for a, b in zip(after.confidence, before.confidence, strict=True))
    assert judge(draft, traces, vocabulary=list(range(draft.config.vocab_size)))[0].agrees == free[0].agrees
