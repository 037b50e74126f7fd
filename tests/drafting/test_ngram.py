"""The n-gram drafter against plain search, and how long its chains should be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_spec.core import MatchAcceptance, Release, Thresholds
from adaptive_spec.drafting.memory import DomainMemory, Memories
from adaptive_spec.drafting.ngram import NOTHING, AcceptanceByMatch, Match, OutputStore, SuffixIndex
from adaptive_spec.settings import DecoderSettings

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def searched(tokens: list[int], shortest: int, longest: int, limit: int) -> Match:
    """Slow and obvious: the longest suffix with a latest earlier occurrence, continued token by token."""
    for length in range(longest, shortest - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for start in range(len(tokens) - length - 1, -1, -1):
            if length <= len(tokens) and tokens[start : start + length] == suffix:
                text, place = list(tokens), start + length
                for offset in range(limit):
                    text.append(text[place + offset])
                return Match(tuple(text[len(tokens) :]), length)
    return NOTHING


@given(TOKENS, TOKENS, st.integers(0, 6))
def test_a_request_is_continued_as_plain_search_would(first: list[int], second: list[int], limit: int) -> None:
    index = SuffixIndex(2, 4)
    index.extend(first)
    index.extend(second)
    assert index.propose(limit) == searched(first + second, 2, 4, limit)


def test_a_loop_is_continued_beyond_its_end() -> None:
    index = SuffixIndex(2, 3)
    index.extend([7, 8, 7, 8])
    assert index.propose(5).chain == (7, 8, 7, 8, 7)


@given(st.lists(TOKENS, max_size=12))
def test_the_store_forgets_whole_outputs_and_never_invents(outputs: list[list[int]]) -> None:
    store = OutputStore(2, 3, max_tokens=60)
    for output in outputs:
        store.add(output)
        assert store.num_tokens <= 60
        match = store.propose([0, 1, 2], 4)
        if match.match_length:
            wanted = [0, 1, 2][3 - match.match_length :]
            text = [*wanted, *match.chain]
            assert any(other[i : i + len(text)] == text for other in outputs for i in range(len(other)))


def test_an_output_pushed_out_is_not_found() -> None:
    store = OutputStore(2, 2, max_tokens=8)
    store.add([1, 2, 3, 4, 5])
    assert store.propose([1, 2], 2).chain == (3, 4)
    store.add([6, 7, 8, 9, 6])
    assert store.propose([1, 2], 2) == NOTHING
    assert store.propose([6, 7], 3).chain == (8, 9, 6)
    assert OutputStore(2, 2, max_tokens=0).propose([1, 2], 2) == NOTHING


def test_the_longer_match_wins_and_the_request_wins_a_tie() -> None:
    memory = DomainMemory(DecoderSettings(ngram_min_match=2, ngram_max_match=4, ngram_store_tokens=100), Thresholds())
    memory.store.add([1, 2, 3, 50, 51])
    own = SuffixIndex(2, 4)
    own.extend([2, 3, 60, 61, 1, 2, 3])
    assert memory.propose(own, 2) == Match((50, 51), 3, 0.3)
    own.extend([70, 71, 1, 2, 3])
    assert memory.propose(own, 2) == Match((70, 71), 3, 0.3)


def test_acceptance_is_counted_by_match_length() -> None:
    acceptance = AcceptanceByMatch()
    assert acceptance.rate(3) == 0.3
    acceptance.add(3, 4, 5)
    acceptance.add(2, 0, 4)
    assert acceptance.rate(4) == pytest.approx(6.4 / 17)  # (4 + 8 x 0.3) / (9 + 8): as all lengths together
    assert acceptance.rate(3) == pytest.approx((4 + 8 * 6.4 / 17) / 13)
    assert acceptance.rate(2) == pytest.approx((0 + 8 * 6.4 / 17) / 12)


def test_acceptance_follows_the_traffic() -> None:
    acceptance = AcceptanceByMatch()
    for _ in range(1000):
        acceptance.add(3, 4, 4)
    for _ in range(300):
        acceptance.add(3, 0, 1)
    assert acceptance.rate(3) < 0.6  # counted for ever it would still be above 0.9


def test_domains_begin_with_what_the_release_tells_of_matches() -> None:
    memories = Memories(DecoderSettings())
    known = Thresholds(ngram_acceptance=(MatchAcceptance(2, 10, 100), MatchAcceptance(4, 9_000, 10_000)))
    memories.begin_with(Release(1, {"code": known}))
    code, other = memories["code"].acceptance, memories["other"].acceptance
    assert code.rate(2) < 0.2 < 0.85 < code.rate(4)
    assert other.rate(2) == other.rate(4)
    for _ in range(300):
        code.add(4, 0, 4)
    assert code.rate(4) < 0.3  # what is on record does not weigh more than a memory holds
