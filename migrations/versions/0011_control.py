"""What the control plane keeps: thresholds set by hand, what runs tell and why they are cancelled, answered orders

Revision: 0011, after 0010.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "threshold_overrides",
        sa.Column("domain", sa.String(), nullable=False),
        sa.Column("numbers", _JSON, nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("begun_at", _TIME, nullable=False),
        sa.Column("until", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("domain", name=op.f("pk_threshold_overrides")),
    )
    op.create_table(
        "run_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("detail", _JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run_log")),
    )
    op.create_index(op.f("ix_run_log_run_id_id"), "run_log", ["run_id", "id"])
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("answer", _JSON, nullable=True),
        sa.Column("begun_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_idempotency_keys")),
    )
    op.add_column("runs", sa.Column("cancel_reason", sa.String(), nullable=True))


def downgrade() -> None:
    """Take back."""
    op.drop_column("runs", "cancel_reason")
    op.drop_table("idempotency_keys")
    op.drop_table("run_log")
    op.drop_table("threshold_overrides")
