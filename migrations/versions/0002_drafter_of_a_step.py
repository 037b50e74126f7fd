"""The drafter of a step

Revision: 0002, after 0001.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply.  Until now only the model drafted."""
    op.add_column("steps", sa.Column("drafter", sa.String(), nullable=False, server_default=""))
    op.execute("UPDATE steps SET drafter = 'model' WHERE chain_length > 0")


def downgrade() -> None:
    """Take back."""
    op.drop_column("steps", "drafter")
