"""The match length of an n-gram step, the temperature of a step's request, and thresholds of a calibration as one value

Revision: 0005, after 0004.
"""

import json

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
_PARTS = (
    ("temperature", sa.Double(), 1.0),
    ("stop_below", sa.Double(), 0.4),
    ("max_chain_length", sa.Integer(), 4),
    ("survival", _JSON, []),
    ("num_observations", sa.Integer(), 0),
)
_NAMES = [name for name, _, _ in _PARTS]


def upgrade() -> None:
    """Apply.  Match lengths and temperatures of earlier steps are not known; those steps count as greedy."""
    op.add_column("steps", sa.Column("match_length", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("steps", sa.Column("request_temperature", sa.Double(), nullable=False, server_default="0"))
    op.add_column("calibrations", sa.Column("thresholds", _JSON, nullable=False, server_default="{}"))
    table = _calibrations()
    for row in op.get_bind().execute(sa.select(table.c.id, *(table.c[name] for name in _NAMES))).mappings().all():
        thresholds = {name: row[name] for name in _NAMES}
        op.get_bind().execute(table.update().where(table.c.id == row["id"]).values(thresholds=thresholds))
    with op.batch_alter_table("calibrations") as batch:
        for name in _NAMES:
            batch.drop_column(name)


def downgrade() -> None:
    """Take back.  What only the new thresholds can say is lost."""
    for name, kind, default in _PARTS:
        given = json.dumps(default) if isinstance(default, list) else str(default)
        op.add_column("calibrations", sa.Column(name, kind, nullable=False, server_default=given))
    table = _calibrations()
    for row in op.get_bind().execute(sa.select(table.c.id, table.c.thresholds)).mappings().all():
        values = {name: row["thresholds"].get(name, default) for name, _, default in _PARTS}
        op.get_bind().execute(table.update().where(table.c.id == row["id"]).values(values))
    with op.batch_alter_table("calibrations") as batch:
        batch.drop_column("thresholds")
    with op.batch_alter_table("steps") as batch:
        batch.drop_column("request_temperature")
        batch.drop_column("match_length")


def _calibrations() -> sa.Table:
    columns = [sa.Column(name, kind) for name, kind, _ in _PARTS]
    return sa.Table(
        "calibrations", sa.MetaData(), sa.Column("id", sa.BigInteger()), *columns, sa.Column("thresholds", _JSON)
    )
