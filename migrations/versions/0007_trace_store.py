"""What a trace weighs, and why traces were dropped

Revision: 0007, after 0006.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply.  Traces that are there have neither number; the first sweep rewrites their shards and fills them in."""
    op.add_column("traces", sa.Column("num_bytes", sa.Integer()))
    op.add_column("traces", sa.Column("tail_mass", sa.Double()))
    op.create_index("ix_traces_request_id", "traces", ["request_id"])
    op.create_table(
        "trace_drops",
        sa.Column("domain", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("num_traces", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("domain", "reason", name=op.f("pk_trace_drops")),
    )


def downgrade() -> None:
    """Take back."""
    op.drop_table("trace_drops")
    op.drop_index("ix_traces_request_id", "traces")
    with op.batch_alter_table("traces") as table:
        table.drop_column("tail_mass")
        table.drop_column("num_bytes")
