"""Guards stand beside modules in their table: a kind, what a guard's file says, and digests that are unique among modules alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005_guards"
down_revision = "0004_key_token_rates"

_FITTED = sa.text("kind = 'module'")
_LIVE = sa.text("state IN ('active', 'shadow')")


def upgrade() -> None:
    """Change the table; what it holds are modules."""
    for index in ("modules_version", "modules_live"):
        op.drop_index(index, "modules")
    if op.get_bind().dialect.name == "sqlite":  # its constraint has no name until the table is made anew
        with op.batch_alter_table(
            "modules", naming_convention={"uq": "%(table_name)s_%(column_0_name)s_key"}
        ) as modules:
            modules.drop_constraint("modules_digest_key", type_="unique")
    else:
        op.drop_constraint("modules_digest_key", "modules", type_="unique")
    op.add_column("modules", sa.Column("kind", sa.String, nullable=False, server_default="module"))
    op.add_column("modules", sa.Column("facts", sa.JSON))
    thing = ["name", "kind", "fingerprint"]
    op.create_index("modules_version", "modules", [*thing, "version"], unique=True)
    op.create_index("modules_live", "modules", thing, unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE)
    op.create_index(
        "modules_digest", "modules", ["digest"], unique=True, sqlite_where=_FITTED, postgresql_where=_FITTED
    )
