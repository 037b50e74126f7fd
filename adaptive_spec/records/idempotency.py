"""Orders that carry a key: carried out once, and answered the same for a day, by whichever process is asked.

Only what was done is remembered: an order that was refused has changed nothing, and its key is free again.
"""

from datetime import timedelta
from typing import Any

from sqlalchemy import delete

from adaptive_spec.errors import OrderConflict
from adaptive_spec.records.database import Database
from adaptive_spec.records.locks import LockKey
from adaptive_spec.records.tables import IdempotencyRow

KEPT = timedelta(days=1)
_LONGEST = timedelta(minutes=10)  # that an order may take; one without an answer after that died with its process


def begin_order(database: Database, key: str, digest: str) -> dict[str, Any] | None:
    """Return what the order was answered; None: nothing yet, and the caller is now the one to carry it out.

    Raises:
        OrderConflict: the key is that of another order, or this one is under way.
    """
    with database.session_scope() as session:
        database.take_turns(session, LockKey.ORDERS)
        now = database.clock(session)
        session.execute(delete(IdempotencyRow).where(IdempotencyRow.begun_at < now - KEPT))
        row = session.get(IdempotencyRow, key, populate_existing=True)
        if row is None:
            session.add(IdempotencyRow(key=key, digest=digest, begun_at=now))
            return None
        if row.digest != digest:
            raise OrderConflict(f"The key {key!r} belongs to another order of the last day. Use a new one.")
        if row.answer is None and now - row.begun_at < _LONGEST:
            raise OrderConflict(f"The order with the key {key!r} is under way. Ask again for its answer.")
        if row.answer is None:
            row.begun_at = now
        return row.answer


def end_order(database: Database, key: str, answer: dict[str, Any] | None) -> None:
    """Keep the answer of an order; None: it was refused, and the key is free again."""
    with database.session_scope() as session:
        row = session.get(IdempotencyRow, key)
        if row is not None and answer is None:
            session.delete(row)
        elif row is not None:
            row.answer = answer
