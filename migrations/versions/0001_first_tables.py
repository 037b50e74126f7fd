"""First tables

Revision: 0001, after none.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Spelt out rather than imported from the package: a migration must not change when the tables do.
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "requests",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("domain", sa.String(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("num_steps", sa.Integer(), nullable=False),
        sa.Column("num_draft_tokens", sa.Integer(), nullable=False),
        sa.Column("num_accepted_draft_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(), nullable=False),
        sa.Column("releases", JSON, nullable=False),
        sa.Column("first_release", sa.Integer(), nullable=False),
        sa.Column("last_release", sa.Integer(), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("finished_at", TIME, nullable=False),
        sa.Column("time_to_first_token_seconds", sa.Double(), nullable=False),
        sa.Column("decode_seconds", sa.Double(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_requests"),
    )
    op.create_index("ix_requests_finished_at", "requests", ["finished_at"])
    op.create_index("ix_requests_domain_finished_at", "requests", ["domain", "finished_at"])

    op.create_table(
        "steps",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("step_index", sa.Integer(), nullable=False),
        sa.Column("domain", sa.String(), nullable=False),
        sa.Column("release", sa.Integer(), nullable=False),
        sa.Column("chain_length", sa.Integer(), nullable=False),
        sa.Column("num_accepted", sa.Integer(), nullable=False),
        sa.Column("num_emitted", sa.Integer(), nullable=False),
        sa.Column("num_reached", sa.Integer(), nullable=False),
        sa.Column("num_reached_accepted", sa.Integer(), nullable=False),
        sa.Column("overlap_sum", sa.Double(), nullable=False),
        sa.Column("confidences", sa.LargeBinary(), nullable=False),
        sa.Column("overlaps", sa.LargeBinary(), nullable=False),
        sa.Column("explored", sa.Boolean(), nullable=False),
        sa.Column("draft_seconds", sa.Double(), nullable=False),
        sa.Column("verify_seconds", sa.Double(), nullable=False),
        sa.Column("batch_size", sa.Integer(), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_steps"),
    )
    op.create_index("ix_steps_at", "steps", ["at"])
    op.create_index("ix_steps_request_id_step_index", "steps", ["request_id", "step_index"], unique=True)
    op.create_index("ix_steps_domain_release_at", "steps", ["domain", "release", "at"])

    op.create_table(
        "traces",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("shard", sa.String(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("domain", sa.String(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("release", sa.Integer(), nullable=False),
        sa.Column("held_out", sa.Boolean(), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_traces"),
        sa.UniqueConstraint("digest", name="uq_traces_digest"),
    )
    op.create_index("ix_traces_shard", "traces", ["shard"])
    op.create_index("ix_traces_domain_held_out_id", "traces", ["domain", "held_out", "id"])

    op.create_table(
        "releases",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("folder", sa.String()),
        sa.Column("parent", sa.Integer()),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("report", JSON, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_releases"),
    )
    live = sa.text("state = 'live'")
    op.create_index("uq_releases_live", "releases", ["state"], unique=True, sqlite_where=live, postgresql_where=live)

    op.create_table(
        "runs",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("trigger", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("settings", JSON, nullable=False),
        sa.Column("progress", JSON, nullable=False),
        sa.Column("report", JSON, nullable=False),
        sa.Column("error", sa.String()),
        sa.Column("release", sa.Integer()),
        sa.Column("pid", sa.Integer()),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.Column("finished_at", TIME),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("ix_runs_state", "runs", ["state"])

    op.create_table(
        "calibrations",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("domain", sa.String(), nullable=False),
        sa.Column("release", sa.Integer(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("stop_below", sa.Double(), nullable=False),
        sa.Column("max_chain_length", sa.Integer(), nullable=False),
        sa.Column("survival", JSON, nullable=False),
        sa.Column("num_observations", sa.Integer(), nullable=False),
        sa.Column("report", JSON, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_calibrations"),
    )
    op.create_index("ix_calibrations_domain_id", "calibrations", ["domain", "id"])

    op.create_table(
        "events",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("domain", sa.String()),
        sa.Column("release", sa.Integer()),
        sa.Column("detail", JSON, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
    )
    op.create_index("ix_events_kind_id", "events", ["kind", "id"])


def downgrade() -> None:
    """Take back."""
    for table in ("events", "calibrations", "runs", "releases", "traces", "steps", "requests"):
        op.drop_table(table)
