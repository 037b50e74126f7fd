"""Canaries

Revision: 0009, after 0008.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "canaries",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("release", sa.Integer(), nullable=False),
        sa.Column("live", sa.Integer(), nullable=False),
        sa.Column("share", sa.Double(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("report", sa.JSON().with_variant(JSONB(), "postgresql"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_canaries")),
    )
    running = sa.text("state = 'running'")
    op.create_index(
        "uq_canaries_running", "canaries", ["state"], unique=True, sqlite_where=running, postgresql_where=running
    )


def downgrade() -> None:
    """Take back.  A release on trial becomes a candidate again, which no earlier version serves by itself."""
    op.execute("UPDATE releases SET state = 'candidate' WHERE state = 'canary'")
    op.drop_table("canaries")
