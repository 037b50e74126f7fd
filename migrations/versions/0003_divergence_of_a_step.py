"""The verifier of a step, and what its relaxed acceptance gave up

Revision: 0003, after 0002.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_SUMS = ("total_variation", "given_up_nats")


def upgrade() -> None:
    """Apply.  Until now every step was verified exactly."""
    op.add_column("steps", sa.Column("verifier", sa.String(), nullable=False, server_default="exact"))
    op.add_column("steps", sa.Column("num_divergent", sa.Integer(), nullable=False, server_default="0"))
    for name in _SUMS:
        op.add_column("steps", sa.Column(name, sa.Double(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Take back."""
    for name in (*_SUMS, "num_divergent", "verifier"):
        op.drop_column("steps", name)
