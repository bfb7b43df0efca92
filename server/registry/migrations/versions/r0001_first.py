"""The schema of the first databases: takedowns, jobs, modules by digest, a plain audit trail."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "takedowns",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False, index=True),
        sa.Column("row_count", sa.Integer, nullable=False),
        sa.Column("forget_digest", sa.String, nullable=False),
        sa.Column("notice", sa.JSON, nullable=False),
        sa.Column("options", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("takedown_id", sa.String, sa.ForeignKey("takedowns.id"), nullable=False, index=True),
        sa.Column("module", sa.String, nullable=False, index=True),
        sa.Column("state", sa.String, nullable=False, index=True),
        sa.Column("stage", sa.String, nullable=False),
        sa.Column("progress", sa.Double, nullable=False),
        sa.Column("message", sa.String, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("lease_owner", sa.String),
        sa.Column("lease_expires", sa.Double, nullable=False),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("idempotency_key", sa.String, unique=True),
        sa.Column("request_digest", sa.String, nullable=False),
        sa.Column("stages", sa.JSON, nullable=False),
        sa.Column("result", sa.JSON),
        sa.Column("error", sa.String),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
    )
    op.create_index("jobs_claim", "jobs", ["state", "created_at"])
    op.create_table(
        "modules",
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False, index=True),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), nullable=False, unique=True),
        sa.Column("takedown_id", sa.String, sa.ForeignKey("takedowns.id"), nullable=False),
        sa.Column("file", sa.String, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
    )
