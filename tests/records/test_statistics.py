"""The example, by hand.  Steps of domain "code":

request a, step 0, release 0: drafted 3, reached + - (overlaps .8 .4)      accepted 1, emitted 2
request a, step 1, release 0: drafted 2, reached + + (overlaps .9 .7)      accepted 2, emitted 3
request b, step 0, release 1: drafted 3, reached - (overlap .2)            accepted 0, emitted 1
request b, step 1, release 1: drafted 0                                    accepted 0, emitted 1

spec steps 3, drafted 8, accepted 3, emitted 7; position 0: 2 of 3, position 1: 1 of 2; overlaps 3.0 over 5.
"""

from dataclasses import replace
from datetime import timedelta

import pytest

from adaptive_spec.records.database import Database
from adaptive_spec.records.domains import list_domains
from adaptive_spec.records.statistics import domain_statistics
from tests.records.rows import START, make_finish, make_step, record


@pytest.fixture
def example(database: Database) -> Database:
    record(
        database,
        make_step("a", 0, positions=((0.9, 0.8, True), (0.5, 0.4, False))),
        make_step("a", 1, chain_length=2, positions=((0.9, 0.9, True), (0.8, 0.7, True))),
        make_step("b", 0, release=1, policy="fixed", positions=((0.3, 0.2, False),)),
        make_step("b", 1, release=1, policy="fixed", chain_length=0, positions=()),
        make_step("c", 0, domain="law"),
        make_finish("a", completion_tokens=5, decode_seconds=2.0),
        make_finish(
            "b",
            completion_tokens=2,
            decode_seconds=1.5,
            releases=(1,),
            policy="fixed",
            num_draft_tokens=3,
            num_accepted_draft_tokens=0,
            finished_after_seconds=20,
        ),
    )
    return database


def test_every_number_of_the_example(example: Database) -> None:
    code, law = domain_statistics(example)
    assert (code.domain, law.domain) == ("code", "law")
    assert (code.num_requests, code.num_spec_steps, code.num_draft_tokens) == (2, 3, 8)
    assert (code.num_accepted_draft_tokens, code.num_emitted_tokens) == (3, 7)
    assert code.draft_acceptance_rate == pytest.approx(3 / 8)
    assert code.mean_acceptance_length == pytest.approx(2.0)
    assert code.acceptance_per_position == pytest.approx((2 / 3, 1 / 2))
    assert code.expected_acceptance == pytest.approx(3.0 / 5)
    assert code.tokens_per_second == pytest.approx(7 / 3.5)
    assert law.tokens_per_second == 0.0
    assert code.to_dict()["acceptance_per_position"] == pytest.approx([2 / 3, 1 / 2])


def test_counters_restart_with_each_release(example: Database) -> None:
    (first,) = domain_statistics(example, domain="code", release=0)
    assert (first.num_requests, first.num_spec_steps, first.num_accepted_draft_tokens) == (1, 2, 3)
    assert first.acceptance_per_position == pytest.approx((1.0, 0.5))
    assert first.tokens_per_second == pytest.approx(5 / 2)
    (second,) = domain_statistics(example, domain="code", release=1)
    assert (second.mean_acceptance_length, second.acceptance_per_position) == (1.0, (0.0,))


def test_policy_and_since_narrow(example: Database) -> None:
    (fixed,) = domain_statistics(example, policy="fixed")
    assert (fixed.num_requests, fixed.num_draft_tokens, fixed.num_emitted_tokens) == (1, 3, 2)
    (late,) = domain_statistics(example, since=START + timedelta(seconds=1))
    assert (late.num_spec_steps, late.num_draft_tokens, late.num_emitted_tokens) == (1, 2, 4)
    assert domain_statistics(example, domain="nowhere") == []


def test_domains(example: Database) -> None:
    assert list_domains(example) == ["code", "law"]


def test_chains_of_one_drafter(example: Database) -> None:
    record(example, make_step("d", 0, drafter="ngram", chain_length=2, positions=((0.5, 1.0, True), (0.5, 1.0, True))))
    (ngram,) = domain_statistics(example, domain="code", drafter="ngram")
    (model,) = domain_statistics(example, domain="code", drafter="model")
    assert (ngram.num_spec_steps, ngram.num_draft_tokens, ngram.num_accepted_draft_tokens) == (1, 2, 2)
    assert (model.num_spec_steps, model.num_draft_tokens, model.num_accepted_draft_tokens) == (3, 8, 3)


def test_cached_answers_are_counted_apart(example: Database) -> None:
    before = domain_statistics(example)
    for number, domain in enumerate(["code", "code", "poems"]):
        cached = make_finish(
            f"cached-{number}",
            domain=domain,
            num_steps=0,
            num_draft_tokens=0,
            num_accepted_draft_tokens=0,
            releases=(1,),
            decode_seconds=0.0,
            policy="cache",
        )
        record(example, cached)
    code, law, poems = domain_statistics(example)
    assert (code.num_cached_requests, law.num_cached_requests, poems.num_cached_requests) == (2, 0, 1)
    assert [replace(code, num_cached_requests=0), law] == before
    assert (poems.num_requests, poems.num_emitted_tokens, poems.tokens_per_second) == (0, 0, 0.0)
    assert [row.num_cached_requests for row in domain_statistics(example, domain="code", release=0)] == [0]
    assert [row.num_cached_requests for row in domain_statistics(example, policy="fixed")] == [0]
    assert {row.domain: row.num_requests for row in domain_statistics(example, policy="cache")} == {
        "code": 0,
        "poems": 0,
    }
    assert all(row.num_cached_requests == 0 for row in domain_statistics(example, drafter="model"))


def test_divergence_by_hand(database: Database) -> None:
    """Emitted 2 + 3 + 2 of which 1 + 2 + 0 diverge; .3 + .5 of total variation and 1.0 + 1.4 nats over three."""
    plain = make_step("a", 2, positions=((0.9, 0.8, True), (0.5, 0.4, False)))
    relaxed = replace(plain, step_index=0, verifier="logits", num_divergent=1, total_variation=0.3, given_up_nats=1.0)
    more = replace(
        relaxed, step_index=1, num_emitted=3, num_divergent=2, total_variation=0.5, given_up_nats=1.4, verifier="ngram"
    )
    record(database, relaxed, more, plain, make_finish("a"))
    [found] = domain_statistics(database)
    assert (found.num_emitted_tokens, found.num_divergent_tokens) == (7, 3)
    assert found.divergence_share == pytest.approx(3 / 7)
    assert found.mean_total_variation == pytest.approx(0.8 / 3)
    assert found.mean_given_up_nats == pytest.approx(2.4 / 3)
    [exact] = domain_statistics(database, verifier="exact")
    assert (exact.num_emitted_tokens, exact.divergence_share, exact.mean_given_up_nats) == (2, 0.0, 0.0)
    [ngram] = domain_statistics(database, verifier="ngram")
    assert ngram.divergence_share == pytest.approx(2 / 3)
