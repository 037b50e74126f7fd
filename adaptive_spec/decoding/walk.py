"""The verify phase where the host may look: along the chains, position by position, each row as far as it is kept.

Gives the verdict that ``judge`` gives, and is tested against it.  What comes after a refused token is never looked at,
and a relaxed rule only at what exact verification refuses: elsewhere its word changes nothing.  A position's
distributions are few enough to stay in a processor's cache.
"""

from collections import defaultdict

import torch
from torch import Tensor

from adaptive_spec.core import Rule
from adaptive_spec.decoding.propose import Chains
from adaptive_spec.decoding.rules import Relaxation
from adaptive_spec.decoding.sampling import Sampling, penalised
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.decoding.verdict import Divergence, Verdict
from adaptive_spec.verification.distribution import best_tokens, processed_probs
from adaptive_spec.verification.divergence import given_up_nats
from adaptive_spec.verification.exact import accepts, next_sampled
from adaptive_spec.verification.ngram import ngram_overlap
from adaptive_spec.verification.relaxed import Evidence, rule_passes
from adaptive_spec.verification.similarity import similarity

_SCREENED = ("ngram", "hybrid")


def walk(
    slots: list[Slot], logits: Tensor, chains: Chains, sampling: Sampling | None, relaxation: Relaxation | None = None
) -> Verdict:
    """Decide how much of each chain is kept and what comes after it.  Arguments are those of ``judge``."""
    found = _Walk(penalised(slots, logits, chains.ids, 0), chains, sampling, relaxation)
    going = list(range(len(slots)))
    for position in range(chains.ids.shape[1] + 1):
        if going:
            going = found.advance(going, position)
    return Verdict(
        logits,
        found.ids,
        found.lengths,
        chains.confidences.tolist(),
        found.num_accepted,
        found.next_tokens,
        found.overlaps,
        found.divergence if relaxation is not None and chains.ids.shape[1] else None,
    )


class _Walk:
    """What has been found so far, by row."""

    def __init__(
        self, logits: Tensor, chains: Chains, sampling: Sampling | None, relaxation: Relaxation | None
    ) -> None:
        count, width = chains.ids.shape
        self.ids: list[list[int]] = chains.ids.tolist()
        self.lengths: list[int] = chains.lengths.tolist()
        self.num_accepted = [0] * count
        self.next_tokens = [0] * count
        self.overlaps = [[0.0] * width for _ in range(count)]
        self.divergence = Divergence(
            [[False] * width for _ in range(count)],
            [[0.0] * width for _ in range(count)],
            [[0.0] * width for _ in range(count)],
            [False] * count,
        )
        groups = relaxation.groups if relaxation else ()
        self._rules: dict[int, Rule] = {row: rule for rule, rows in groups for row in rows}
        self._left = list(relaxation.allowance) if relaxation else []
        self._screens: dict[int, bool] = {}
        self._logits = logits
        self._chains = chains
        self._sampling = sampling

    def advance(self, going: list[int], position: int) -> list[int]:
        """Judge the token at a position of some rows; return those that go on after it."""
        at = _At(going, position, _at(self._logits, going, position), self._chains, self._sampling)
        proposed = [row for row in going if position < self.lengths[row]]
        strict = self._strict(at, proposed)
        refused = [row for row in proposed if row not in strict]
        on = strict | self._diverging(at, [row for row in refused if row in self._rules])
        for row in on:
            self.num_accepted[row] += 1
        if proposed:
            self._note_overlaps(at, proposed, on)
        ended = [row for row in going if row not in on]
        for row, token in zip(ended, at.next_tokens(ended, refused), strict=True):
            self.next_tokens[row] = token
        return [row for row in going if row in on]

    def _strict(self, at: "_At", rows: list[int]) -> set[int]:
        """The rows whose token exact verification accepts."""
        if at.probs is None:
            return {row for row in rows if at.own[row] == self.ids[row][at.position]}
        return at.accepted(rows) if rows else set()

    def _note_overlaps(self, at: "_At", rows: list[int], kept: set[int]) -> None:
        overlaps = [float(row in kept) for row in rows] if at.probs is None else at.overlaps(rows)
        for row, overlap in zip(rows, overlaps, strict=True):
            self.overlaps[row][at.position] = overlap

    def _diverging(self, at: "_At", refused: list[int]) -> set[int]:
        """The rows whose token is kept although exact verification refuses it."""
        groups: dict[Rule, list[int]] = defaultdict(list)
        for row in refused:
            groups[self._rules[row]].append(row)
        return {row for rule, rows in groups.items() for row in self._kept_by(rule, at, rows)}

    def _kept_by(self, rule: Rule, at: "_At", rows: list[int]) -> list[int]:
        if rule.verifier in _SCREENED:
            self._screen(rule)
            rows = [row for row in rows if self._screens[row]]
        passing = rows if rule.verifier == "ngram" else at.passing(rule, rows) if rows else []
        kept = [row for row in passing if self._left[row] > 0]
        for row in passing:
            self.divergence.wanted_more[row] = self._left[row] <= 0
        if kept:
            measured = zip(kept, at.total_variation(kept), at.given_up_nats(kept), strict=True)
            for row, apart, given_up in measured:
                self._left[row] -= 1
                self.divergence.tokens[row][at.position] = True
                self.divergence.total_variation[row][at.position] = apart
                self.divergence.given_up_nats[row][at.position] = given_up
        return kept

    def _screen(self, rule: Rule) -> None:
        """Compare the n-grams of all chains under a rule, once."""
        rows = [row for row, its in self._rules.items() if its == rule]
        if rows[0] in self._screens:
            return
        width = self._chains.ids.shape[1]
        own = best_tokens(_some(self._logits, rows)[:, :width])
        overlap = ngram_overlap(self._chains.ids[rows], own, self._chains.lengths[rows], rule.ngram_size)
        self._screens |= dict(zip(rows, (overlap >= rule.min_overlap).tolist(), strict=True))


class _At:
    """One position of some rows: logits, and what they make of them, [rows, vocab]."""

    def __init__(
        self, rows: list[int], position: int, logits: Tensor, chains: Chains, sampling: Sampling | None
    ) -> None:
        self.position = position
        self.logits = logits
        self.probs: Tensor | None = None
        self.own: dict[int, int] = {}
        self._rows = rows
        self._chains = chains
        self._sampling = sampling
        self._compared: tuple[list[int], Tensor, Tensor] | None = None
        self._measured: tuple[str, list[int], Tensor] | None = None
        if sampling is None:
            self.own = dict(zip(rows, best_tokens(logits).tolist(), strict=True))
        else:
            everyone = len(rows) == len(sampling.after)
            processing = sampling.processing if everyone else sampling.processing.rows(torch.tensor(rows))
            self.probs = processed_probs(logits[:, None], processing)[:, 0]

    def accepted(self, rows: list[int]) -> set[int]:
        """By rejection sampling."""
        assert self._chains.probs is not None and self.probs is not None and self._sampling is not None
        tokens, places = self._chains.ids[rows, self.position], self._places(rows)
        of_target, of_draft = self.probs[places, tokens], self._chains.probs[rows, self.position, tokens]
        passes = accepts(of_target, of_draft, self._sampling.accept[rows, self.position])
        return {row for row, accepted in zip(rows, passes.tolist(), strict=True) if accepted}

    def overlaps(self, rows: list[int]) -> list[float]:
        """Sums of min(target, draft)."""
        assert self._chains.probs is not None and self.probs is not None
        draft = _at(self._chains.probs, rows, self.position)
        found: list[float] = torch.minimum(_some(self.probs, self._places(rows)), draft).sum(-1).tolist()
        return found

    def next_tokens(self, rows: list[int], refused: list[int]) -> list[int]:
        """The recovered or bonus tokens of rows that end here."""
        if not rows or self.probs is None:
            return [self.own[row] for row in rows]
        assert self._chains.probs is not None and self._sampling is not None
        draft = self._chains.probs[:, self.position : self.position + 1]
        none = torch.zeros(len(rows), dtype=torch.long)
        found: list[int] = next_sampled(
            _some(self.probs, self._places(rows))[:, None],
            _some(draft, rows),
            torch.tensor([int(row in refused) for row in rows]),
            none,
            self._sampling.after[rows],
        ).tolist()
        return found

    def passing(self, rule: Rule, rows: list[int]) -> list[int]:
        """Those whose token here passes a rule that looks at one position at a time."""
        if rule.verifier in ("logits", "hybrid"):
            passes = self._alike(rows, rule.similarity) >= rule.min_similarity
        else:
            target, draft = self._compare(rows)
            ids = self._chains.ids[rows, self.position, None]
            evidence = Evidence(
                ids, ids, torch.ones(len(rows)), lambda some: target[:, None], lambda some: draft[:, None]
            )
            passes = rule_passes(rule, list(range(len(rows))), evidence)[:, 0]
        return [row for row, its in zip(rows, passes.tolist(), strict=True) if its]

    def total_variation(self, rows: list[int]) -> list[float]:
        """Between target and draft."""
        found: list[float] = (1 - self._alike(rows, "tv")).tolist()
        return found

    def given_up_nats(self, rows: list[int]) -> list[float]:
        """How much less probable the tokens are than the target's best."""
        tokens = self._chains.ids[rows, self.position]
        found: list[float] = given_up_nats(_some(self.logits, self._places(rows))[:, None], tokens[:, None]).tolist()
        return [value[0] for value in found]  # type: ignore[index]

    def _alike(self, rows: list[int], measure: str) -> Tensor:
        """Similarities; those that were just computed are still there."""
        if self._measured is not None:
            measured, before, found = self._measured
            if measured == measure and set(rows) <= set(before):
                return found[[before.index(row) for row in rows]]
        found = similarity(*self._compare(rows), measure)
        self._measured = measure, rows, found
        return found

    def _compare(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Log-probs of target and draft, [some rows, vocab]; those of rows that were just asked for are still there."""
        assert self._chains.log_probs is not None
        if self._compared is not None:
            before, target, draft = self._compared
            if set(rows) <= set(before):
                places = [before.index(row) for row in rows]
                return _some(target, places), _some(draft, places)
        places = self._places(rows)
        processing = None if self._sampling is None else self._sampling.processing
        if self.probs is None or processing is None:
            target = _some(self.logits, places).float().log_softmax(-1)
        else:
            target = _some(self.probs, places).log()
            if processing.some_greedy:
                plain = _some(self.logits, places).float().log_softmax(-1)
                target = torch.where(processing.greedy[rows, None], plain, target)
        self._compared = rows, target, _at(self._chains.log_probs, rows, self.position)
        return self._compared[1:]

    def _places(self, rows: list[int]) -> list[int]:
        return [self._rows.index(row) for row in rows]


def _some(values: Tensor, rows: list[int]) -> Tensor:
    """Some rows; not copied when they are all of them.  Stacking copies five times as fast as indexing."""
    return values if len(rows) == len(values) else torch.stack([values[row] for row in rows])


def _at(values: Tensor, rows: list[int], position: int) -> Tensor:
    return _some(values[:, position], rows)
