"""Chains measured whole, for calibrating verifiers: a small share of steps, of rows that may be recorded.

Exact verification stops at the first refusal and a relaxed one at its threshold; what any other threshold would have
done is only known where every position was looked at.  Measuring decides nothing: the step is judged as if unseen, and
which steps are measured is drawn from a stream of its own.  Called by the decoder.
"""

import logging
import random
from datetime import UTC, datetime
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptive_spec.core import CALIBRATED_VERIFIERS, ChainEvidence, Request
from adaptive_spec.decoding.propose import Chains
from adaptive_spec.decoding.rules import Rules
from adaptive_spec.decoding.sampling import Sampling
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.decoding.verdict import evidence_of, look
from adaptive_spec.settings import VerificationSettings
from adaptive_spec.verification.transfer import read

logger = logging.getLogger(__name__)


class EvidenceTaker:
    """Chooses which rows of which steps are measured, and measures them.

    Args:
        eos: tokens that end an answer.
    """

    def __init__(self, settings: VerificationSettings, rules: Rules, eos: frozenset[int], seed: int) -> None:
        self._settings = settings
        self._rules = rules
        self._eos = eos
        self._random = random.Random(f"evidence {seed}")
        known = {settings.verifier, *settings.domain_verifiers.values(), *settings.allowed}
        self._share = settings.evidence_share if known & set(CALIBRATED_VERIFIERS) else 0.0

    def choose(self, slots: list[Slot]) -> dict[int, str]:
        """The rows to measure in this step, each under the measure that its rule compares with; mostly none."""
        if not self._share or self._random.random() >= self._share:
            return {}
        return {
            row: self._rules.rule_of(slot.request, slot.release).similarity
            for row, slot in enumerate(slots)
            if self._concerns(slot.request)
        }

    def _concerns(self, request: Request) -> bool:
        """Whether it may be recorded and leaves its verifier to its domain, where one may be relaxed."""
        params = request.params
        return params.record and params.verifier is None and bool(self._settings.calibrated(request.domain))

    def take(
        self,
        wanted: dict[int, str],
        slots: list[Slot],
        logits: Tensor,
        chains: Chains,
        sampling: Sampling | None,
    ) -> list[ChainEvidence]:
        """Measure the rows before their tokens are emitted.  What fails is left out: decoding goes on without it.

        Args:
            wanted: as ``choose`` returned it; the chains were drafted with ``compares``.
            logits: [rows, chain + 1, vocab], the target's.
        """
        try:
            return self._measured(wanted, slots, logits, chains, sampling)
        except Exception:
            logger.exception("chains are not measured")
            return []

    def _measured(
        self,
        wanted: dict[int, str],
        slots: list[Slot],
        logits: Tensor,
        chains: Chains,
        sampling: Sampling | None,
    ) -> list[ChainEvidence]:
        seen = look(slots, logits, chains, sampling)
        alike = torch.zeros(seen.strict.shape, device=logits.device)
        evidence = evidence_of(seen, chains, sampling)
        for measure in sorted(set(wanted.values())) if alike.numel() else ():
            rows = [row for row, its in wanted.items() if its == measure]
            alike[rows] = evidence.similarity(rows, measure)
        shown = read(chains.ids, seen.own[:, :-1], seen.strict, alike, chains.lengths)
        at = datetime.now(UTC)
        return [self._of_row(row, wanted[row], slots[row], chains, shown, at) for row in wanted]

    def _of_row(
        self,
        row: int,
        measure: str,
        slot: Slot,
        chains: Chains,
        shown: list[NDArray[Any]],
        at: datetime,
    ) -> ChainEvidence:
        length = int(shown[-1][row])
        ids, own, strict, alike = (values[row, :length].tolist() for values in shown[:-1])
        request, thresholds = slot.request, slot.release.for_domain(slot.request.domain)
        ends = () if request.params.ignore_eos else self._eos
        return ChainEvidence(
            request_id=request.request_id,
            domain=request.domain,
            release=slot.release.version,
            step_index=slot.num_steps,
            drafter=chains.drafter(row) if length else "",
            chain=tuple(ids),
            target_tokens=tuple(own),
            strict=tuple(strict),
            measure=measure,
            similarities=tuple(alike),
            greedy=request.params.greedy,
            temperature=1.0 if request.params.greedy else thresholds.sampling_temperature,
            most_emitted=next((place for place, token in enumerate(ids, 1) if token in ends), length + 1),
            at=at,
        )
