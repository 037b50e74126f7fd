"""The processes of the service, and when jobs of the schedule were begun

Revision: 0010, after 0009.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "decoders",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("release", sa.Integer(), nullable=False),
        sa.Column("hashes", sa.JSON().with_variant(postgresql.JSONB(), "postgresql"), nullable=False),
        sa.Column("leads", sa.Boolean(), nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("heartbeat_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decoders")),
    )
    op.create_table(
        "jobs",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("begun_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_jobs")),
    )


def downgrade() -> None:
    """Take back."""
    op.drop_table("jobs")
    op.drop_table("decoders")
