"""What is compared: our sides, one line each, what a side is asked and what it shows.

``ours`` and ``peers`` run sides; ``compare`` lets them take turns.  Nothing here touches a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from adaptive_spec.errors import SettingsError

PLAIN = "ours plain"  # what every ratio is to
REFERENCE = "transformers generate"  # what every answer is compared with


@dataclass(frozen=True, slots=True)
class OurSide:
    """One way to use our engine: what differs from the defaults of ``SamplingParams`` and ``DecoderSettings``."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    decoder: Mapping[str, Any] = field(default_factory=dict)
    recorded: bool = False  # everything is written to SQLite, traces too

    @property
    def speculates(self) -> bool:
        return self.params.get("chain_length") != 0

    @property
    def chooses(self) -> bool:
        """Whether a length policy is at work that must first see how chains fare: it explores."""
        return "chain_length" not in self.params and self.decoder.get("explore_share") != 0


OURS = (
    OurSide(PLAIN, {"chain_length": 0}),
    OurSide("ours plain recorded", {"chain_length": 0}, recorded=True),
    OurSide("ours model fixed 2", {"drafter": "model", "chain_length": 2}),
    OurSide("ours model fixed 4", {"drafter": "model", "chain_length": 4}),
    OurSide("ours model threshold", {"drafter": "model"}, {"policy": "threshold"}),
    OurSide("ours model stopping", {"drafter": "model"}, {"policy": "stopping"}),
    OurSide("ours ngram", {"drafter": "ngram"}),
    OurSide("ours combined", {"drafter": "combined"}),
)
PEERS = (REFERENCE, "transformers assisted", "transformers prompt lookup", "flashspec")
NAMES = (*(side.name for side in OURS), *PEERS)


@dataclass(frozen=True, slots=True)
class Task:
    """What all sides of one turn are asked: to answer these prompts, together in one batch, greedily."""

    domain: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    ignore_eos: bool
    context_tokens: int  # the most that any task of the workload needs
    warms_up: bool = False


@dataclass(frozen=True, slots=True)
class DecodePhase:
    """What came after every row had its first token.

    draft_seconds and verify_seconds are the part of ``seconds`` spent in the drafter and in the target; None where they
    cannot be told apart.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    draft_seconds: float | None = 0.0
    verify_seconds: float | None = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_tokens / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side showed in one turn."""

    tokens: list[list[int]]  # one answer per prompt
    seconds: float
    first_token_seconds: float
    num_row_steps: int
    decode: DecodePhase
    num_draft_tokens: int = 0  # that were verified; of peers not known

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class Runner(Protocol):
    """One side, ready to take its turns."""

    def refusal(self, task: Task) -> str | None:
        """Why this side cannot do the task; None when it can."""
        ...

    def run(self, task: Task) -> Turn:
        """Do the task and measure it."""
        ...

    def close(self) -> None:
        """Release what the side holds."""
        ...


def choose(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the sides whose name contains one of ``wanted``, all when none is given; plain decoding always.

    Raises:
        SettingsError: a filter that no side matches.
    """
    for part in wanted:
        if not any(part in name for name in NAMES):
            raise SettingsError(f"No side is called like {part!r}; choose of: {', '.join(NAMES)}.")
    return tuple(name for name in NAMES if name == PLAIN or not wanted or any(part in name for part in wanted))
