"""The numbers that docs/verification.md prints are the numbers that the rules give."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adaptive_spec.core import SIMILARITIES, VERIFIERS, Rule
from adaptive_spec.verification.divergence import within_allowance
from adaptive_spec.verification.exact import accepts_greedy, accepts_sampled, kept, next_sampled
from adaptive_spec.verification.relaxed import Evidence, rule_passes
from adaptive_spec.verification.similarity import similarity

PAGE = (Path(__file__).parent.parent.parent / "docs" / "verification.md").read_text()


def table(*heading: str) -> list[list[str]]:
    """The cells of the page's table that has these headings first."""
    lines = PAGE.splitlines()
    [start] = [at for at, line in enumerate(lines) if line.startswith(f"| {' | '.join(heading)} |")]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([re.sub(r"^`([^`]*)`$", r"\1", cell.strip()) for cell in line.strip("|").split("|")])
    return rows


NAMED = {name: torch.tensor([float(value) for value in values]).log() for name, *values in table("name", "token 0")}
EXAMPLES = table("verifier", "settings")


def distributions(names: str) -> Tensor:
    return torch.stack([NAMED[name] for name in names.split()])


@pytest.mark.parametrize("row", EXAMPLES, ids=lambda row: f"{row[0]} {row[4]}")
def test_worked_examples(row: list[str]) -> None:
    verifier, settings, target_names, draft_names, tokens, alone, exact, both, _ = row
    given = dict(re.findall(r"`(\w+)` ([\w.]+)", settings))
    kinds = {name: type(getattr(Rule(), name)) for name in given}
    rule = Rule(verifier, **{name: kinds[name](value) for name, value in given.items()})
    target, draft = distributions(target_names), distributions(draft_names)
    chain, own = torch.tensor([[int(token) for token in tokens.split()]]), target.argmax(-1)[None]
    length = torch.tensor([chain.shape[1]])
    passes = rule_passes(rule, [0], Evidence(chain, own, length, lambda rows: target[None], lambda rows: draft[None]))
    strict = accepts_greedy(torch.cat([own, own[:, :1]], dim=1), chain)
    found = [int(kept(its, length)) for its in (passes, strict, within_allowance(strict, passes, length))]
    assert found == [int(alone), int(exact), int(both)]


def test_every_relaxed_verifier_has_an_example_that_diverges() -> None:
    diverging = {row[0] for row in EXAMPLES if int(row[7]) > int(row[6])}
    assert diverging == set(VERIFIERS) - {"exact"}


def test_similarities_by_hand() -> None:
    rows = table("measure", "TORN to ALIKE")
    assert [name for name, *_ in rows] == list(SIMILARITIES)
    for measure, alike, far in rows:
        for name, printed in (("ALIKE", alike), ("FAR", far)):
            found = float(similarity(NAMED["TORN"], NAMED[name], measure))
            assert found == pytest.approx(float(printed), abs=6e-5), (measure, name)


def test_exact_sampling_by_hand() -> None:
    target, draft = torch.tensor([[[0.2, 0.8], [0.5, 0.5]]]), torch.tensor([[[0.6, 0.4]]])
    rows = table("uniform", "kept")
    assert len(rows) == 2
    for uniform, count, after in rows:
        passes = accepts_sampled(target, draft, torch.tensor([[0]]), torch.tensor([[float(uniform)]]))
        num_kept = kept(passes, torch.tensor([1]))
        assert int(num_kept) == int(count)
        if recovered := re.match(r"recovered: (\d)", after):
            for draw in (0.0, 0.5, 0.99):
                found = next_sampled(target, draft, torch.tensor([1]), num_kept, torch.tensor([draw]))
                assert int(found) == int(recovered[1])
