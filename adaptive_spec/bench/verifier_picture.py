"""What each verifier keeps of the same chain, as a picture: ``python -m adaptive_spec.bench.verifier_picture FILE``.

The chain is a real one: the first, over packaged prompts of SQL and code, on which the verifiers differ enough.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaptive_spec.bench.compare_chart import check_chart
from adaptive_spec.bench.corpora import prompts
from adaptive_spec.core import Rule
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.settings import load_settings
from adaptive_spec.verification.divergence import diverging_tokens, within_allowance
from adaptive_spec.verification.exact import accepts_greedy, kept
from adaptive_spec.verification.relaxed import Evidence, rule_passes

LENGTH = 8
# Looser than the defaults where distributions are compared: an untrained draft is seldom alike.
RULES: tuple[tuple[str, Rule], ...] = (
    ("exact\nthe target's own token", Rule()),
    ("ngram\n¼ of the bigrams are the target's", Rule("ngram", min_overlap=0.25)),
    ("logits\ntv: overlap ≥ .3", Rule("logits", min_similarity=0.3)),
    ("logits\njs ≥ .55", Rule("logits", similarity="js", min_similarity=0.55)),
    ("logits\ncosine ≥ .6", Rule("logits", similarity="cosine", min_similarity=0.6)),
    ("hybrid\nbigrams ¼, then js ≥ .55", Rule("hybrid", min_overlap=0.25, similarity="js", min_similarity=0.55)),
    ("typical\nmore probable than min(.09, .3 e⁻ᴴ)", Rule("typical")),
    ("topk_relaxed\ntop 10, at most .3 behind the best", Rule("topk_relaxed")),
)
KEPT, DIVERGENT, REFUSED, UNREACHED = range(4)
_LOOKS = (
    ("#2a6f97", "white", "kept", "kept: exact verification keeps it too"),
    ("#f0b04f", "black", "diverges", "kept although exact verification refuses it: it diverges, and costs budget"),
    ("#c1553b", "white", "refused", "refused: the target's own token is emitted instead, the step ends"),
    ("#ececec", "black", "", "never reached"),
)
_PROMPTS, _ANSWER_TOKENS, _STARTS = 3, 40, 3
_SHOWN_TOKENS = 12  # of the text before the chain
_ENOUGH = 4  # different outcomes


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain: its tokens and the target's, [chain]; log-probs of both models, [chain, vocab]."""

    domain: str
    ids: Tensor
    own: Tensor
    target: Tensor
    draft: Tensor
    after: str = ""  # the end of the text that it continues


@torch.inference_mode()
def chain_at(pair: ModelPair, text: Sequence[int], domain: str = "") -> Chain:
    """Let the draft propose a greedy chain after a text, and the target read it."""
    ids = torch.tensor([list(text)])
    drafted = []
    for _ in range(LENGTH):
        drafted.append(pair.draft(ids).logits[0, -1].float().log_softmax(-1))
        ids = torch.cat([ids, drafted[-1].argmax()[None, None]], dim=1)
    target = pair.target(ids[:, :-1]).logits[0, -LENGTH:].float().log_softmax(-1)
    after = pair.tokenizer.decode(list(text[-_SHOWN_TOKENS:]))
    return Chain(domain, ids[0, -LENGTH:], target.argmax(-1), target, torch.stack(drafted), after)


def fates(chain: Chain, rule: Rule) -> list[int]:
    """What becomes of each token under a rule whose budget never ends."""
    ids, own, length = chain.ids[None], chain.own[None], torch.tensor([LENGTH])
    strict = accepts_greedy(torch.cat([own, own[:, :1]], dim=1), ids)
    accepted = strict
    if rule.verifier != "exact":
        found = Evidence(ids, own, length, lambda rows: chain.target[None], lambda rows: chain.draft[None])
        accepted = within_allowance(strict, rule_passes(rule, [0], found), length)
    num_kept = kept(accepted, length)
    diverging = diverging_tokens(strict, num_kept)[0].tolist()
    count = int(num_kept)
    return [DIVERGENT if its else KEPT for its in diverging[:count]] + [REFUSED, *[UNREACHED] * LENGTH][
        : LENGTH - count
    ]


@torch.inference_mode()
def telling_chain(pair: ModelPair, num_prompts: int = _PROMPTS, answer_tokens: int = _ANSWER_TOKENS) -> Chain:
    """The first of the chains on which enough different things happen, else one on which the most do."""
    best, most = None, 0
    for number in range(num_prompts):
        for domain in ("sql", "code"):
            text = list(pair.encode(prompts(domain)[number].text))
            for start in _promising(pair, text, answer_tokens):
                chain = chain_at(pair, start, domain)
                different = len({tuple(fates(chain, rule)) for _, rule in RULES})
                if different > most:
                    best, most = chain, different
                if most >= _ENOUGH:
                    return chain
    assert best is not None
    return best


def _promising(pair: ModelPair, text: list[int], answer_tokens: int) -> list[list[int]]:
    """Beginnings of the target's answer after which the draft would guess some of its tokens, best first."""
    inputs = torch.tensor([text])
    said = pair.target.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=answer_tokens, do_sample=False
    )[0]
    right = (pair.draft(said[None, :-1]).logits[0].argmax(-1) == said[1:]).float()
    starts = range(len(text), len(said) - LENGTH) or range(len(text), len(text) + 1)
    # The first token guessed right, and some but not all of those that follow.
    worth = {start: float(right[start - 1]) * 4 - abs(float(right[start - 1 :][:LENGTH].sum()) - 5) for start in starts}
    return [said[:start].tolist() for start in sorted(starts, key=lambda start: -worth[start])[:_STARTS]]


def draw(pair: ModelPair, chain: Chain, path: Path) -> None:
    """One column a token, one row a verifier."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch, Rectangle

    figure, axes = pyplot.subplots(figsize=(13, 8.2), dpi=88, layout="constrained")
    head = 2.3
    _heading(axes, pair, chain, head)
    for line, (name, rule) in enumerate(RULES):
        top = head + line
        title, _, words = name.partition("\n")
        axes.text(-0.1, top + 0.38, title, ha="right", va="center", fontsize=11, weight="bold")
        axes.text(-0.1, top + 0.7, words, ha="right", va="center", fontsize=9)
        found = fates(chain, rule)
        for place, fate in enumerate(found):
            colour, ink, word, _ = _LOOKS[fate]
            axes.add_patch(Rectangle((place + 0.03, top + 0.06), 0.94, 0.88, color=colour, linewidth=0))
            axes.text(place + 0.5, top + 0.5, word, ha="center", va="center", fontsize=10, color=ink)
        count = sum(fate in (KEPT, DIVERGENT) for fate in found)
        axes.text(LENGTH + 0.15, top + 0.5, f"{count} + 1", va="center", fontsize=11, weight="bold")
    axes.text(LENGTH + 0.15, head - 0.35, "tokens\nemitted", va="center", fontsize=9)
    axes.set_xlim(-3.3, LENGTH + 0.9)
    axes.set_ylim(head + len(RULES) + 0.05, 0)
    axes.axis("off")
    patches = [Patch(color=colour, label=words) for colour, _, _, words in _LOOKS]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    figure.suptitle(
        f"One chain of {LENGTH} tokens that the draft proposed, read by the target ({pair.name}, a prompt of "
        f"{chain.domain or 'no domain'}), and what each verifier keeps of it;\nthe text before it ends with:  "
        + "".join(map(_visible, chain.after)),
        fontsize=12,
    )
    figure.savefig(path)
    pyplot.close(figure)


def _heading(axes: Any, pair: ModelPair, chain: Chain, height: float) -> None:
    """Above each column: the drafted token, and the target's own."""
    axes.text(-0.1, 0.35, "the draft proposes", ha="right", va="center", fontsize=11, weight="bold")
    axes.text(-0.1, 0.78, "its probability to draft / target", ha="right", va="center", fontsize=9)
    axes.text(-0.1, 1.3, "the target would say", ha="right", va="center", fontsize=11, weight="bold")
    axes.text(-0.1, 1.73, "its probability to the target", ha="right", va="center", fontsize=9)
    for place in range(LENGTH):
        drafted, own = int(chain.ids[place]), int(chain.own[place])
        of_draft, of_target = (float(its[place, drafted].exp()) for its in (chain.draft, chain.target))
        same, middle = drafted == own, place + 0.5
        axes.text(middle, 0.35, _shown(pair, drafted), ha="center", va="center", fontsize=12, family="monospace")
        axes.text(middle, 0.78, f"{of_draft:.2f} / {of_target:.2f}", ha="center", va="center", fontsize=9)
        look = {"color": "#777777"} if same else {"color": "#c1553b", "weight": "bold"}
        axes.text(middle, 1.3, _shown(pair, own), ha="center", va="center", fontsize=12, family="monospace", **look)
        axes.text(middle, 1.73, f"{float(chain.target[place, own].exp()):.2f}", ha="center", va="center", fontsize=9)
    axes.axhline(height - 0.1, xmin=0.02, color="#999999", linewidth=0.8)


def _shown(pair: ModelPair, token: int) -> str:
    """A token's text, white space and what a font may lack made visible."""
    text = "".join(map(_visible, pair.tokenizer.decode([token])))
    return text if len(text) <= 9 else text[:8] + "…"


def _visible(character: str) -> str:
    known = {" ": "␣", "\n": "⏎", "\t": "⇥", "$": r"\$"}.get(character)
    if known is not None:
        return known
    return character if character.isascii() and character.isprintable() else f"{ord(character):x}"


def main(path: Path) -> None:
    """Find the chain and draw it."""
    check_chart(path)
    settings = load_settings().model
    pair = load_pair(settings)
    draw(pair if pair.name else replace(pair, name=settings.target), telling_chain(pair), path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
