"""Chains measured whole

Revision: 0006, after 0005.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "evidence",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("step_index", sa.Integer(), nullable=False),
        sa.Column("domain", sa.String(), nullable=False),
        sa.Column("release", sa.Integer(), nullable=False),
        sa.Column("drafter", sa.String(), nullable=False),
        sa.Column("chain", sa.LargeBinary(), nullable=False),
        sa.Column("target_tokens", sa.LargeBinary(), nullable=False),
        sa.Column("strict", sa.LargeBinary(), nullable=False),
        sa.Column("measure", sa.String(), nullable=False),
        sa.Column("similarities", sa.LargeBinary(), nullable=False),
        sa.Column("greedy", sa.Boolean(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("most_emitted", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evidence")),
    )
    op.create_index("ix_evidence_request_id_step_index", "evidence", ["request_id", "step_index"], unique=True)
    op.create_index("ix_evidence_domain_release", "evidence", ["domain", "release"])


def downgrade() -> None:
    """Take back."""
    op.drop_table("evidence")
