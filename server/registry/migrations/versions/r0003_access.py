"""Keys and the rules of scopes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the tables; databases from before revisions were recorded may have them."""
    there = sa.inspect(op.get_bind())
    if not there.has_table("api_keys"):
        op.create_table(
            "api_keys",
            sa.Column("id", sa.String, primary_key=True),
            sa.Column("name", sa.String, nullable=False),
            sa.Column("digest", sa.String, nullable=False, unique=True),
            sa.Column("scopes", sa.JSON, nullable=False),
            sa.Column("profile", sa.String),
            sa.Column("per_minute", sa.Double),
            sa.Column("burst", sa.Integer, nullable=False),
            sa.Column("created_at", sa.Double, nullable=False),
            sa.Column("expires_at", sa.Double),
            sa.Column("revoked_at", sa.Double),
        )
    if not there.has_table("policies"):
        op.create_table(
            "policies",
            sa.Column("scope", sa.String, primary_key=True),
            sa.Column("rules", sa.JSON, nullable=False),
            sa.Column("updated_at", sa.Double, nullable=False),
        )
