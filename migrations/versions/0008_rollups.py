"""Rollups of outcomes, the policy of a step, and counts of deleted drifts

Revision: 0008, after 0007.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_FRESH = "ix_requests_rolled_up_domain_finished_at"
_SLICE = ("drafter", "verifier", "policy")
_OUTCOME = ("num_reached", "num_reached_accepted")
_STEP_COUNTS = (
    "num_steps",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_emitted_tokens",
    "num_divergent_tokens",
)
_DRIFT = ("domain", "stream", "direction")
_STEP_SUMS = ("overlap_sum", "total_variation", "given_up_nats")


def upgrade() -> None:
    """Apply.  Nothing is rolled up yet: the first round of the service does it, a bounded part at a time."""
    op.add_column("steps", sa.Column("policy", sa.String(), nullable=False, server_default=""))
    op.execute(
        "UPDATE steps SET policy = COALESCE("
        "(SELECT requests.policy FROM requests WHERE requests.request_id = steps.request_id), '')"
    )
    op.drop_index("ix_steps_domain_release_at", "steps")
    op.add_column("requests", sa.Column("rolled_up", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_index(_FRESH, "requests", ["rolled_up", "domain", "finished_at"])
    _create(
        "step_rollups",
        [*_key(*_SLICE), *(sa.Column(name, sa.Integer(), nullable=False) for name in _OUTCOME)],
        [
            *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _STEP_COUNTS),
            *(sa.Column(name, sa.Double(), nullable=False) for name in _STEP_SUMS),
        ],
    )
    _create("request_counts", _key(*_SLICE), [sa.Column("num_requests", sa.BigInteger(), nullable=False)])
    _create(
        "request_rollups",
        _key("policy"),
        [
            sa.Column("num_requests", sa.BigInteger(), nullable=False),
            sa.Column("timed_tokens", sa.BigInteger(), nullable=False),
            sa.Column("decode_seconds", sa.Double(), nullable=False),
        ],
    )
    op.create_table(
        "rollup_state",
        sa.Column("id", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        *(sa.Column(f"{name}_since", sa.DateTime(timezone=True)) for name in ("steps", "minutes", "hours")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollup_state")),
    )
    op.create_table(
        "drift_counts",
        *(sa.Column(name, sa.String(), nullable=False) for name in _DRIFT),
        sa.Column("num_drifts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint(*_DRIFT, name=op.f("pk_drift_counts")),
    )


def downgrade() -> None:
    """Take back.  What was rolled up and deleted is lost."""
    for table in ("drift_counts", "rollup_state", "request_rollups", "request_counts", "step_rollups"):
        op.drop_table(table)
    op.drop_index(_FRESH, "requests")
    op.drop_column("requests", "rolled_up")
    op.create_index("ix_steps_domain_release_at", "steps", ["domain", "release", "at"])
    op.drop_column("steps", "policy")


def _key(*names: str) -> list[sa.Column]:
    return [
        sa.Column("span", sa.String(), nullable=False),
        sa.Column("start", sa.DateTime(timezone=True), nullable=False),
        sa.Column("domain", sa.String(), nullable=False),
        sa.Column("release", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.String(), nullable=False) for name in names),
    ]


def _create(table: str, key: list[sa.Column], values: list[sa.Column]) -> None:
    primary = sa.PrimaryKeyConstraint(*(column.name for column in key), name=op.f(f"pk_{table}"))
    op.create_table(table, *key, *values, primary, sqlite_with_rowid=False)
