"""Keys may have a limit of tokens a minute beside that of requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004_key_token_rates"
down_revision = "0003"


def upgrade() -> None:
    """Add the column; keys that exist have no such limit."""
    op.add_column("api_keys", sa.Column("tokens_per_minute", sa.Double))
