"""Idempotency keys: an order that is sent again, because its answer was lost, is answered and not repeated."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pydantic import BaseModel

from adaptive_spec.records.database import Database
from adaptive_spec.records.idempotency import begin_order, end_order


@dataclass(frozen=True, slots=True)
class Once:
    """Carries out an order once per key; without a key, whenever it is asked."""

    database: Database
    key: str | None

    def __call__(self, order: str, asked: BaseModel, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what ``act`` answers, or did answer.

        Args:
            order: what is to be done; with ``asked`` it says whether two orders are the same.

        Raises:
            OrderConflict: the key is taken; or what ``act`` raises.
        """
        if self.key is None:
            return act()
        digest = sha256(f"{order} {asked.model_dump_json()}".encode()).hexdigest()
        earlier = begin_order(self.database, self.key, digest)
        if earlier is not None:
            return earlier
        try:
            answer = act()
        except BaseException:
            end_order(self.database, self.key, None)
            raise
        end_order(self.database, self.key, answer)
        return answer
