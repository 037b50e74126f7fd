"""Other people's length policies in our decoder: a ``Proposer`` with other floors, or one that cuts what it drafted.

Called by ``policies``, which puts them into engines; nothing that serves uses them.  They run the very rules that
``calibration`` judges on records, so what is simulated and what is measured is one rule.
"""

import random
import time
from collections import defaultdict

import torch
from torch import Tensor

from adaptive_spec.calibration.baselines import RocThreshold
from adaptive_spec.calibration.logistic import Verification
from adaptive_spec.core import StepCost
from adaptive_spec.decoding.propose import Chains, Proposer
from adaptive_spec.decoding.sampling import Sampling
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.drafting.policy import fixed_floors


class SteadyProposer(Proposer):
    """Ours, charged what was measured first: all sides know the same cost, however long they have run."""

    def __init__(self, other: Proposer) -> None:
        """Take over the releases and the cache of a proposer that has not drafted yet."""
        super().__init__(other.lineup, other.cache, other.settings, random.Random(0))

    def note_cost(self, chains: Chains, context_tokens: int, verify_seconds: float) -> None:
        """Count nothing."""


class TransformersProposer(SteadyProposer):
    """The dynamic confidence threshold of transformers' assisted generation, as ``baselines.transformers_rule`` has it.

    A chain goes on while its last token's own probability is at least the threshold, so here the reach is that
    probability.  A request is one ``generate`` call: it begins at 0.4 with nothing seen.
    (``AssistedCandidateGenerator`` copies the assistant's generation config, moves the copy, and of the state
    ``generate`` writes back the chain length only, and that under the schedule "heuristic", which is not the default.)
    It would also end a chain at the end token; here the last chain of an answer may go beyond it.
    """

    def __init__(self, other: Proposer) -> None:
        super().__init__(other)
        self._rules: dict[str, RocThreshold] = defaultdict(RocThreshold)  # of the requests that run

    def floors(self, slot: Slot, room: int, cost: StepCost | None, rows: int) -> tuple[float, ...]:
        """One token, then on while the one before is at least as probable as the threshold."""
        threshold = self._rules[slot.request.request_id].threshold
        return (0.0, *[threshold] * (room - 1))[:room]

    def reach_after(self, reach: Tensor, tops: Tensor, scaling: Tensor) -> Tensor:
        """The last token's probability alone, uncalibrated."""
        return tops

    def learn(self, slot: Slot, chains: Chains, row: int, length: int, accepted: int) -> None:
        """Move the request's threshold; it is forgotten with the request."""
        super().learn(slot, chains, row, length, accepted)
        request = slot.request.request_id
        self._rules[request].judge(chains.confidences[row, :length].tolist(), accepted)
        if slot.finish_reason:
            del self._rules[request]


class LogisticProposer(SteadyProposer):
    """The pooled logistic estimator: every chain is drafted whole, and as much of it verified as is worth the time.

    For greedy requests only.  Whether a token is verified depends on confidences after it, and these on the token
    itself: among sampled ones that would favour some tokens, and the output would no longer be the target's.

    Args:
        step_cost: that ``plan`` was made with.
    """

    def __init__(self, other: Proposer, plan: Verification, step_cost: StepCost) -> None:
        super().__init__(other)
        self.plan = plan
        self.step_cost = step_cost

    def floors(self, slot: Slot, room: int, cost: StepCost | None, rows: int) -> tuple[float, ...]:
        """Always the depth that was planned."""
        return fixed_floors(min(self.plan.depth, room))

    def propose(self, slots: list[Slot], sampling: Sampling | None, compares: bool = False) -> Chains:
        """Draft, then leave unverified what is not worth it."""
        assert sampling is None, "only greedy answers stay what they were"
        chains = super().propose(slots, sampling, compares)
        began = time.perf_counter()
        drafted = chains.lengths.tolist()
        verified = [self._verified(chains.confidences[row, :length]) for row, length in enumerate(drafted)]
        for slot, length in zip(slots, drafted, strict=True):
            if length:
                slot.draft_length = len(slot.tokens)  # the draft has read them; a chain cut to nothing would forget it
        chains.lengths = torch.tensor(verified, dtype=chains.lengths.dtype, device=chains.lengths.device)
        if not self.cache.static:
            chains.narrow()
        chains.seconds += time.perf_counter() - began
        return chains

    def _verified(self, confidence: Tensor) -> int:
        """Of one drafted chain.  confidence: [drafted]"""
        choice = self.plan.choose(confidence.double().cpu().numpy()[None], self.step_cost)
        return int(choice.verified[0])
