"""What the control plane keeps: thresholds set by hand

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


def downgrade() -> None:
    """Take back."""
    op.drop_table("threshold_overrides")
