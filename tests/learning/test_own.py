"""Adapters of domains' own: who gets a candidate, who keeps one, and that a kill changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adaptive_spec.core import Release, Trace
from adaptive_spec.learning.contest import COLD_START, NO_MARGIN, SHARED, WON
from adaptive_spec.learning.distil import distil
from adaptive_spec.learning.own import (
    LIVE,
    NEW,
    Candidate,
    adapters_of,
    candidate_domains,
    hold_contests,
    report_of,
    shared_time,
    train_candidates,
)
from adaptive_spec.learning.selection import split
from adaptive_spec.models.weights import DraftWeights
from adaptive_spec.settings import LearningSettings
from tests.learning.toy import tiny_draft, toy_traces

SETTINGS = LearningSettings(
    rank=8, learning_rate=2e-2, batch_tokens=256, max_epochs=4, min_traces=10, own_min_requests=5, own_margin_share=0.02
)
STEPS = {"code": 3, "sql": 5}  # the domains contradict one another: the same token, another next one


def traffic(counts: dict[str, int]) -> list[Trace]:
    traces = []
    for number, (domain, count) in enumerate(counts.items()):
        traces += toy_traces(count, seed=10 + number, states=96, step=STEPS.get(domain, 7), domain=domain)
    return traces


FITTED, SELECTION = split(traffic({"code": 120, "sql": 160}))


def ignore(progress: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ("sql", "code")),
        ({"own_max_domains": 1}, ("sql",)),
        ({"own_max_domains": 0}, ()),
        ({"min_traces": 120}, ("sql",)),
        ({"own_min_requests": 60}, ()),
    ],
)
def test_domains_with_enough_get_a_candidate_the_largest_first(
    change: dict[str, int], expected: tuple[str, ...]
) -> None:
    assert candidate_domains(FITTED, SELECTION, SETTINGS.model_copy(update=change)) == expected


def test_a_domain_alone_has_the_shared_adapter() -> None:
    only = [trace for trace in FITTED if trace.domain == "sql"]
    assert candidate_domains(only, SELECTION, SETTINGS) == ()


def test_the_shared_adapter_leaves_time_only_where_there_are_candidates() -> None:
    assert shared_time(SETTINGS, ()) == SETTINGS
    assert 0 < shared_time(SETTINGS, ("sql",)).time_limit_seconds < SETTINGS.time_limit_seconds


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Candidate]:
    """Adapters that know one domain each."""
    folder, found = tmp_path_factory.mktemp("adapters"), {}
    for domain in STEPS:
        its, chooses = ([trace for trace in part if trace.domain == domain] for part in (FITTED, SELECTION))
        model, report = distil(tiny_draft(), its, chooses, SETTINGS, ignore)
        model.save_pretrained(str(folder / domain), save_embedding_layers=False)
        found[domain] = Candidate(folder / domain, report)
    return found


def cut_within(domain: str, step: int) -> Callable[[dict[str, Any]], None]:
    def progress(told: dict[str, Any]) -> None:
        if (told["domain"], told["step"]) == (domain, step):
            raise KeyboardInterrupt

    return progress


def test_candidates_go_on_from_the_shared_adapter_and_after_a_kill(
    trained: dict[str, Candidate], tmp_path: Path
) -> None:
    settings = SETTINGS.model_copy(update={"checkpoint_seconds": 0.1, "max_epochs": 2})
    draft, seen = tiny_draft(), []

    def train(out: Path, progress: Callable[[dict[str, Any]], None]) -> dict[str, Candidate]:
        return train_candidates(
            draft, trained["code"].folder, ("sql", "code"), FITTED, SELECTION, settings, 0.0, progress, out
        )

    whole = train(tmp_path / "whole", seen.append)
    assert {told["domain"] for told in seen} == {"sql", "code"}
    assert whole["sql"].report.agreement_after > whole["sql"].report.agreement_before + 0.2
    assert whole["code"].report.agreement_before > 0.2, "what the shared adapter knows is not lost"
    pristine = tiny_draft().state_dict()
    assert all(torch.equal(tensor, pristine[name]) for name, tensor in draft.state_dict().items())
    for domain, step in (("sql", 3), ("code", 2)):
        draft = tiny_draft()
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "cut", cut_within(domain, step))
    draft = tiny_draft()
    cut = train(tmp_path / "cut", ignore)
    for domain in whole:
        one, other = (load_file(found[domain].folder / "adapter_model.safetensors") for found in (whole, cut))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_time_that_is_spent_leaves_no_candidates(trained: dict[str, Candidate], tmp_path: Path) -> None:
    spent = SETTINGS.time_limit_seconds
    assert not train_candidates(
        tiny_draft(), trained["code"].folder, ("sql",), FITTED, SELECTION, SETTINGS, spent, ignore, tmp_path
    )


def contests(trained: dict[str, Candidate], new: dict[str, str], live: dict[str, str], **change: Any) -> dict[str, Any]:
    """Domains and whose adapter is put up for them; the shared one knows ``code`` alone."""
    candidates = {domain: trained[of] for domain, of in new.items()}
    served = Release(1, domain_adapters={domain: str(trained[of].folder) for domain, of in live.items()})
    shared = Release(adapter=str(trained["code"].folder))
    verdicts = hold_contests(
        DraftWeights(tiny_draft()), shared, candidates, served, SELECTION, SETTINGS.model_copy(update=change)
    )
    folders = adapters_of(verdicts, candidates, served)
    assert [row["domain"] for row in report_of(verdicts, candidates)] == sorted(verdicts)
    return {name: (its.winner, its.reason, folders.get(name)) for name, its in verdicts.items()}


def test_a_winner_is_carried_and_a_loser_is_not(trained: dict[str, Candidate]) -> None:
    found = contests(trained, {"sql": "sql", "code": "sql"}, {})
    assert found == {"sql": (NEW, WON, str(trained["sql"].folder)), "code": (SHARED, NO_MARGIN, None)}


def test_an_adapter_of_the_live_release_stays_only_while_it_beats_the_new_shared_one(
    trained: dict[str, Candidate],
) -> None:
    found = contests(trained, {"sql": "code"}, {"sql": "sql", "code": "code"})
    assert found == {"sql": (LIVE, WON, str(trained["sql"].folder)), "code": (SHARED, NO_MARGIN, None)}


@pytest.mark.parametrize("domain", ["sql", "never seen"])
def test_a_domain_keeps_what_it_has_while_nothing_can_be_told(domain: str, trained: dict[str, Candidate]) -> None:
    found = contests(trained, {"code": "sql"}, {domain: "code"}, own_min_requests=1000)
    assert found == {domain: (LIVE, COLD_START, str(trained["code"].folder)), "code": (SHARED, COLD_START, None)}
