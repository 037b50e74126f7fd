"""The picture's chain is real, its cells are the rules' verdicts, and it is drawn."""

from pathlib import Path

import torch

from adaptive_spec.bench.verifier_picture import (
    DIVERGENT,
    KEPT,
    LENGTH,
    REFUSED,
    RULES,
    UNREACHED,
    Chain,
    draw,
    fates,
    telling_chain,
)
from adaptive_spec.core import Rule
from adaptive_spec.models.loading import ModelPair


def test_fates_by_hand() -> None:
    """The target says 0 everywhere, .9 sure; token 1 has .1.  The draft is the target."""
    probs = torch.tensor([[0.9, 0.1]] * LENGTH).log()
    chain = Chain("", torch.tensor([0, 0, 1, 0, 0, 0, 0, 1]), torch.zeros(LENGTH, dtype=torch.long), probs, probs)
    assert fates(chain, Rule()) == [KEPT, KEPT, REFUSED, *[UNREACHED] * 5]
    assert fates(chain, Rule("logits")) == [KEPT, KEPT, DIVERGENT, *[KEPT] * 4, DIVERGENT]
    assert fates(chain, Rule("typical", typical_epsilon=0.2)) == fates(chain, Rule())


def test_the_picture_of_a_tiny_pair(pair: ModelPair, tmp_path: Path) -> None:
    chain = telling_chain(pair, num_prompts=1, answer_tokens=12)
    assert chain.ids.shape == chain.own.shape == (LENGTH,)
    strict = fates(chain, RULES[0][1])
    assert DIVERGENT not in strict
    for _, rule in RULES[1:]:
        found = fates(chain, rule)
        assert sum(fate in (KEPT, DIVERGENT) for fate in found) >= strict.count(KEPT)
        assert found.count(REFUSED) <= 1
    file = tmp_path / "picture.png"
    draw(pair, chain, file)
    assert 10_000 < file.stat().st_size < 150_000
