"""The draft phase of a step: a chain for each live row, from the draft model or from an n-gram match.

The number of tokens a row may get is decided by floors (``drafting/policy.py``).  On a CPU the loop looks after each
token which rows go on and ends early; on a device it runs its course and looks at nothing, and what was drawn below a
floor does not count.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adaptive_spec.calibration.cost import CostKeeper, CostModel
from adaptive_spec.core import StepCost
from adaptive_spec.decoding.cache import RaggedCache
from adaptive_spec.decoding.prefix import PrefixCache
from adaptive_spec.decoding.sampling import Sampling, penalised
from adaptive_spec.decoding.served import Lineup
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.drafting.memory import Memories
from adaptive_spec.drafting.ngram import NOTHING, Match
from adaptive_spec.drafting.policy import (
    NEVER,
    best_length,
    calibrated_confidence,
    fixed_floors,
    stopping_floors,
    threshold_floors,
)
from adaptive_spec.models.weights import Draft, TrimmedHead
from adaptive_spec.settings import DecoderSettings
from adaptive_spec.verification.distribution import processed_probs, sample
from adaptive_spec.verification.transfer import on_device

_LEARNING_SHARE = 0.1  # of the chains of a domain of which nothing is known yet


@dataclass(slots=True)
class Chains:
    """What one draft phase produced.

    ids: [rows, width].  lengths: [rows], how many of them are proposed.  confidences: [rows, width].
    probs: [rows, width, vocab] they were drawn from; None when every row is greedy: then the chain alone decides.
    log_probs: [rows, width, vocab], what relaxed rules compare with the target's: what a row was drawn from, of a
    greedy row the draft's distribution; None when all are verified exactly; undefined beyond a chain's end.
    matches: of n-gram chains; NOTHING where the model drafted.  fair: rows whose length was fixed beforehand.
    """

    ids: Tensor
    lengths: Tensor
    confidences: Tensor
    probs: Tensor | None
    log_probs: Tensor | None
    explored: list[bool]
    fair: list[bool]
    matches: list[Match]
    seconds: float

    def drafter(self, row: int) -> str:
        """Who proposed a row's chain."""
        return "ngram" if self.matches[row].chain else "model"

    def narrow(self) -> None:
        """Cut off the columns that no chain reaches."""
        width = int(self.lengths.max()) if self.ids.shape[1] else 0
        self.ids, self.confidences = self.ids[:, :width], self.confidences[:, :width]
        self.probs = None if self.probs is None else self.probs[:, :width]
        self.log_probs = None if self.log_probs is None else self.log_probs[:, :width]


def no_chains(rows: int, device: torch.device, vocab_size: int | None) -> Chains:
    """Nothing proposed.  vocab_size: None when every row is greedy."""
    ids, lengths = torch.zeros(rows, 0, dtype=torch.long, device=device), torch.zeros(rows, dtype=torch.long)
    probs = None if vocab_size is None else torch.zeros(rows, 0, vocab_size, device=device)
    falses = [False] * rows
    return Chains(
        ids, lengths.to(device), torch.zeros(rows, 0, device=device), probs, None, falses, falses, [NOTHING] * rows, 0.0
    )


@dataclass(slots=True)
class _Plan:
    """What was decided for each row before the first token is drawn."""

    floors: list[tuple[float, ...]]  # empty: the model does not draft
    matches: list[Match]
    explored: list[bool]
    fair: list[bool]  # the model drafts a length that was fixed beforehand


class Proposer:
    """Drafts with the releases of the line-up; owns the drafts' cache, and what is remembered of each domain.

    The length policy is ``floors`` and ``reach_after``; who measures another one overrides them.
    """

    def __init__(self, lineup: Lineup, cache: RaggedCache, settings: DecoderSettings, rng: random.Random) -> None:
        self.lineup = lineup
        self.cache = cache
        self.settings = settings
        self.memories = Memories(settings)
        self.prefixes = PrefixCache(cache, settings.prefix_cache_tokens)
        self.costs: CostKeeper | None = None  # once measured, chains are as long as pays
        self._caught_up = False  # in this step: drafting took longer than it costs
        self._random = rng
        self._device = cache.model.device
        self._vocab_size = int(cache.model.config.vocab_size)

    def propose(self, slots: list[Slot], sampling: Sampling | None, compares: bool = False) -> Chains:
        """Draft for every row.

        Args:
            sampling: None when every row is greedy.
            compares: whether a relaxed rule will look at what was drawn from.
        """
        began = time.perf_counter()
        self._caught_up = False
        plan = self._plan(slots)
        width = max(len(match.chain) or len(floors) for match, floors in zip(plan.matches, plan.floors, strict=True))
        if self.cache.static and width:
            width = self.settings.max_chain_length
        chains = self._empty(width, plan, sampling, compares)
        if any(plan.floors):
            self._draw(slots, chains, plan.floors, sampling)
        if not self.cache.static:
            chains.narrow()
        chains.seconds = time.perf_counter() - began
        return chains

    @property
    def cost(self) -> CostModel | None:
        return self.costs.model if self.costs else None

    def note_cost(self, chains: Chains, context_tokens: int, verify_seconds: float) -> None:
        """Count what a step took.  Where a device works behind the host's back, phases cannot be told apart."""
        if self.costs is None:
            return
        rows, width = chains.ids.shape
        if self._device.type != "cpu":
            self.costs.add_whole(rows, width, context_tokens, chains.seconds + verify_seconds)
            return
        by_model = [
            length for length, match in zip(chains.lengths.tolist(), chains.matches, strict=True) if not match.chain
        ]
        drafted = max(by_model, default=0)
        seconds = chains.seconds / drafted if drafted and not self._caught_up else None
        self.costs.add(rows, width, context_tokens, seconds, verify_seconds)

    def learn(self, slot: Slot, chains: Chains, row: int, length: int, accepted: int) -> None:
        """Count how a chain of a row fared."""
        domain, match = slot.request.domain, chains.matches[row]
        if match.chain:
            self.memories[domain].acceptance.add(match.match_length, accepted, min(accepted + 1, length))
        elif chains.fair[row] and length:
            self.lineup.of(slot.release).survivals.add(domain, length, accepted)

    def _plan(self, slots: list[Slot]) -> _Plan:
        cost = self.cost.at(len(slots), max(slot.target_length for slot in slots)) if self.cost else None
        everyone = self._random.random() < self._explore_share(cost)
        nobody = not everyone and cost is not None and self._random.random() < self.settings.explore_share
        rooms = [self._room(slot, nobody) for slot in slots]
        limits = rooms if everyone else [self._limit(slot, room) for slot, room in zip(slots, rooms, strict=True)]
        matches = [self._match(slot, limit) for slot, limit in zip(slots, limits, strict=True)]
        if not everyone:
            matches = self._worth_verifying(slots, matches, cost)
        plan = _Plan([], matches, [], [])
        for slot, room, match in zip(slots, rooms, matches, strict=True):
            by_model = not match.chain and slot.drafter != "ngram" and room > 0
            chosen = slot.request.params.chain_length is None
            explores = chosen and (everyone or (by_model and self._must_learn(slot, cost)))
            free = chosen and not explores
            floors = self.floors(slot, room, cost, len(slots)) if free else fixed_floors(room)
            plan.floors.append(floors if by_model else ())
            plan.explored.append(explores)
            plan.fair.append(by_model and not free)
        return plan

    def _room(self, slot: Slot, nobody: bool) -> int:
        """The most tokens that a row may be proposed; none where nobody is, to see what a plain step costs."""
        fixed = slot.request.params.chain_length
        if nobody and fixed is None:
            return 0
        return max(0, min(self.settings.max_chain_length if fixed is None else fixed, slot.tokens_left - 1))

    def _limit(self, slot: Slot, room: int) -> int:
        """The room under the limit that a person has set for the domain; a request's own length goes before it."""
        override = self.lineup.overrides.of(slot.request.domain)
        if override is None or override.max_chain_length is None or slot.request.params.chain_length is not None:
            return room
        return min(room, override.max_chain_length)

    def _worth_verifying(self, slots: list[Slot], matches: list[Match], cost: StepCost | None) -> list[Match]:
        """The matches, cut to the length that pays.

        A step costs what its longest chain costs, for all rows, so it is the gain of all together that must pay.
        """
        free = [slot.request.params.chain_length is None for slot in slots]
        gains = [0.0] * max(len(match.chain) for match in matches)
        for match, counts in zip(matches, free, strict=True):
            for index in range(len(match.chain) if counts else 0):
                gains[index] += match.rate ** (index + 1)
        length = best_length(gains, cost, rows=len(slots))
        return [
            replace(match, chain=match.chain[:length]) if counts else match
            for match, counts in zip(matches, free, strict=True)
        ]

    def floors(self, slot: Slot, room: int, cost: StepCost | None, rows: int) -> tuple[float, ...]:
        """What the reach of a row must be before each further token, of ``room`` at most; empty: it does not draft."""
        survival, room = self._survival(slot), self._limit(slot, room)
        if self._stops_optimally(slot) and cost and survival:
            floors = stopping_floors(survival, cost, room)
        else:
            floors = threshold_floors(self.lineup.thresholds_of(slot).lengths_at(rows), room)
        return floors if floors and floors[0] <= 1 else ()  # every chain begins at reach 1

    def _stops_optimally(self, slot: Slot) -> bool:
        """Whether the setting asks for it, and no threshold stands in its place that a person has set."""
        override = self.lineup.overrides.of(slot.request.domain)
        return self.settings.policy == "stopping" and (override is None or override.stop_below is None)

    def reach_after(self, reach: Tensor, tops: Tensor, scaling: Tensor) -> Tensor:
        """The reach after a token of which the draft was so sure.

        reach, tops: [rows]; scaling: [rows, 2], the temperature, and what is added, of each -> [rows]
        """
        return reach * calibrated_confidence(tops, scaling[:, 0], scaling[:, 1])

    def _explore_share(self, cost: StepCost | None) -> float:
        """The share of steps that draft at full length regardless of the policy, for the asked share of time.

        Steps, not rows: a step costs what its longest chain costs, so rows explore together.
        """
        share = self.settings.explore_share
        if cost is None:
            return share
        longest = min(self.settings.max_chain_length, len(cost.verify_seconds) - 1)
        return share * cost.verify_seconds[0] / (longest * cost.draft_seconds + cost.verify_seconds[longest])

    def _must_learn(self, slot: Slot, cost: StepCost | None) -> bool:
        """Whether a chain of a row's domain is to show how they fare.

        While nothing at all is known every chain does; a domain that is served by what others showed, now and then.
        """
        wanted = self.settings.policy == "stopping" and cost is not None and self.settings.explore_share > 0
        if not wanted or self._own_survival(slot):
            return False
        return not self._pooled_survival(slot) or self._random.random() < _LEARNING_SHARE

    def _own_survival(self, slot: Slot) -> tuple[float, ...]:
        """The survival curve of a row's domain: as counted here, else as the release has it; empty: not known."""
        told = slot.release.for_domain(slot.request.domain).survival
        return self.lineup.of(slot.release).survivals[slot.request.domain].curve(told) or told

    def _survival(self, slot: Slot) -> tuple[float, ...]:
        """The same, or that of all domains."""
        return self._own_survival(slot) or self._pooled_survival(slot)

    def _pooled_survival(self, slot: Slot) -> tuple[float, ...]:
        return self.lineup.of(slot.release).survivals.pooled.curve()

    def _match(self, slot: Slot, room: int) -> Match:
        """The n-gram chain of a row, NOTHING where the model is to draft or nothing matches."""
        if slot.suffixes is None:
            return NOTHING
        match = self.memories[slot.request.domain].propose(slot.suffixes, room)
        trusted = slot.drafter == "ngram" or match.match_length >= self.settings.ngram_trusted_match
        return match if trusted else NOTHING

    def _empty(self, width: int, plan: _Plan, sampling: Sampling | None, compares: bool) -> Chains:
        """Chains with the n-gram ones filled in."""
        device, rows = self._device, len(plan.matches)
        padded = [[*match.chain, *[0] * (width - len(match.chain))] for match in plan.matches]
        ids = on_device(padded, device, torch.long).view(rows, width)
        lengths = on_device([len(match.chain) for match in plan.matches], device)
        confidences = torch.zeros(rows, width, device=device)
        everywhere = (rows, width, self._vocab_size)
        probs = None if sampling is None else torch.zeros(everywhere, device=device)
        log_probs = torch.empty(everywhere, device=device) if compares else None
        for row, match in enumerate(plan.matches):
            if not match.chain:
                continue
            length = len(match.chain)
            confidences[row, :length] = match.rate
            if probs is not None:
                probs[row, :length].scatter_(-1, ids[row, :length, None], 1.0)
            if log_probs is not None:
                log_probs[row].fill_(-torch.inf).scatter_(-1, ids[row, :, None], 0.0)
        return Chains(ids, lengths, confidences, probs, log_probs, plan.explored, plan.fair, plan.matches, 0.0)

    def _draw(
        self, slots: list[Slot], chains: Chains, floors: list[tuple[float, ...]], sampling: Sampling | None
    ) -> None:
        """Let the draft model propose, token by token, for the rows that have floors."""
        device, width = self._device, chains.ids.shape[1]
        above = on_device([[*row, *[NEVER] * (width - len(row))] for row in floors], device)
        chosen = [self.lineup.thresholds_of(slot) for slot in slots]
        scalings = [
            [each.temperature, each.offset + each.warmth * slot.request.params.warmth]
            for each, slot in zip(chosen, slots, strict=True)
        ]
        scaling = on_device(scalings, device)
        heat = None  # what logits are divided by before tokens are drawn; None: by nothing
        if sampling is not None and any(each.sampling_temperature != 1 for each in chosen):
            heat = on_device([each.sampling_temperature for each in chosen], device)
        reach = torch.ones(len(slots), device=device)
        going = on_device([bool(row) for row in floors], device)
        rows = [row for row, values in enumerate(floors) if values]
        for position in range(width):
            going = going & (reach >= above[:, position])
            if not self.cache.static:  # on a CPU looking is free
                rows = going.nonzero().flatten().tolist()
                if not rows:
                    return
            at = on_device(rows, device)
            heat_of_rows = None if heat is None else heat[at]
            tokens, tops = self._next([slots[row] for row in rows], rows, chains, position, sampling, heat_of_rows)
            counts = going[at]
            chains.ids[at, position] = tokens
            chains.confidences[at, position] = tops
            chains.lengths[at] += counts
            reach[at] = self.reach_after(reach[at], tops, scaling[at])

    def _next(
        self,
        slots: list[Slot],
        rows: list[int],
        chains: Chains,
        position: int,
        sampling: Sampling | None,
        heat: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The next token of some rows and the draft's top probability; what it was drawn from goes into the chains."""
        ids = chains.ids
        logits, trimmed = self._logits(slots, rows, ids, position)
        tops = logits.float().softmax(-1).amax(-1)
        compares = chains.log_probs is not None
        if sampling is None and not compares and not any(slot.request.params.penalises for slot in slots):
            tokens = logits.argmax(-1)
            return tokens if trimmed is None else trimmed.token_ids[tokens], tops
        if trimmed is not None:
            logits = self._everywhere(logits, trimmed)
        at = on_device(rows, self._device)
        logits = penalised(slots, logits[:, None], ids[at, :position], position)
        probs = None
        if sampling is not None:
            heated = logits if heat is None else logits / heat[:, None, None]
            probs = processed_probs(heated, sampling.processing.rows(at))[:, 0]
        if chains.log_probs is not None:
            compared = logits[:, 0].float().log_softmax(-1)
            if sampling is not None and probs is not None:
                compared = torch.where(sampling.processing.greedy[at, None], compared, probs.log())
            chains.log_probs[at, position] = compared
        if sampling is None or probs is None:
            return logits[:, 0].argmax(-1), tops
        assert chains.probs is not None
        chains.probs[at, position] = probs
        return sample(probs, sampling.draft[at, position]), tops

    def _logits(
        self, slots: list[Slot], rows: list[int], ids: Tensor, position: int
    ) -> tuple[Tensor, TrimmedHead | None]:
        """Draft logits [rows, tokens of the head], and the head when it is trimmed; feeds what the draft has not seen.

        Rows of different adapters are run group by group, and where their heads differ the logits are over all tokens.
        """
        parts: list[tuple[Tensor, TrimmedHead | None]] = []
        order: list[int] = []
        for draft, trimmed, members in self._groups(slots):
            chosen = [rows[index] for index in members]
            if position:
                fed = ids[on_device(chosen, self._device), position - 1 : position]
                starts = [len(slots[index].tokens) + position - 1 for index in members]
                last = [0] * len(members)
            else:
                fed, starts, last = self._pending([slots[index] for index in members], chosen, draft)
            head = None if trimmed is None else trimmed.head
            parts.append((self.cache.forward(chosen, fed, starts, last=last, model=draft.model, head=head), trimmed))
            order += members
        if len(parts) == 1:
            return parts[0]
        heads = {id(trimmed) for _, trimmed in parts}
        common = parts[0][1] if len(heads) == 1 else None
        logits = torch.cat([part if len(heads) == 1 else self._everywhere(part, its) for part, its in parts])
        return logits[on_device([order.index(index) for index in range(len(rows))], self._device)], common

    def _everywhere(self, logits: Tensor, trimmed: TrimmedHead | None) -> Tensor:
        """Logits [rows, tokens of the head] over the whole vocabulary, -inf where the head has no row."""
        if trimmed is None:
            return logits
        return logits.new_full((len(logits), self._vocab_size), -torch.inf).index_copy(1, trimmed.token_ids, logits)

    def _groups(self, slots: list[Slot]) -> Iterator[tuple[Draft, TrimmedHead | None, list[int]]]:
        """The rows that share a draft and a head."""
        members: dict[tuple[int, int], list[int]] = {}
        for index, slot in enumerate(slots):
            drafts = self.lineup.of(slot.release).drafts
            members.setdefault((id(drafts.of(slot.adapter)), id(drafts.trimmed)), []).append(index)
        for indices in members.values():
            first = slots[indices[0]]
            yield self.lineup.draft_of(first), self.lineup.of(first.release).drafts.trimmed, indices

    def _pending(self, slots: list[Slot], rows: list[int], draft: Draft) -> tuple[Tensor, list[int], list[int]]:
        """What the draft has not seen of each row: ids [rows, tokens], where they start, and the last of each."""
        widest = self.settings.max_chain_length + 1
        for slot, row in zip(slots, rows, strict=True):
            if len(slot.tokens) - slot.draft_length > widest:
                self._catch_up(slot, row, draft)
        pending = [slot.tokens[slot.draft_length :] for slot in slots]
        width = widest if self.cache.static else max(map(len, pending))
        ids = on_device([row + [0] * (width - len(row)) for row in pending], self._device)
        return ids, [slot.draft_length for slot in slots], [len(row) - 1 for row in pending]

    def _catch_up(self, slot: Slot, row: int, draft: Draft) -> None:
        """Bring all but the last token of a row into the draft's cache."""
        self._caught_up = True
        known = slot.tokens[:-1]
        if not slot.draft_length:
            slot.draft_length = self.prefixes.recall(row, known, draft.name)
        chunk = self.settings.prefill_chunk_tokens
        self.cache.prefill(row, known, slot.draft_length, len(known), chunk, model=draft.model)
        slot.draft_length = len(known)
        self.prefixes.remember(row, known, draft.name)
