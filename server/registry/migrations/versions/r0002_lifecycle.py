"""Modules get versions, states and revisions; jobs get kinds; the audit trail becomes a chain that the database guards."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from server.registry.audit import ORIGIN, digest_of

revision = "0002"
down_revision = "0001"

_MAKING = sa.text("state IN ('queued', 'running')")
_LIVE = sa.text("state IN ('active', 'shadow')")
_SAYS = "rows of the audit trail are never changed"


def upgrade() -> None:
    """Change the tables and carry over what they hold."""
    modules = _rows("SELECT * FROM modules ORDER BY created_at")
    op.drop_table("modules")
    op.add_column("takedowns", sa.Column("purged_at", sa.Double))
    with op.batch_alter_table("jobs") as jobs:
        jobs.alter_column("takedown_id", existing_type=sa.String, nullable=True)
        jobs.add_column(sa.Column("kind", sa.String, nullable=False, server_default="takedown"))
        jobs.add_column(sa.Column("module_id", sa.String))
        jobs.add_column(sa.Column("stage_progress", sa.Double, nullable=False, server_default="0"))
        jobs.add_column(sa.Column("stage_started_at", sa.Double))
        jobs.add_column(sa.Column("options", sa.JSON, nullable=False, server_default="{}"))
    op.create_index("jobs_making", "jobs", ["module"], unique=True, sqlite_where=_MAKING, postgresql_where=_MAKING)
    # What an old worker left half done is in another form: the next worker begins anew.
    op.execute("UPDATE jobs SET stages = '{}' WHERE state IN ('queued', 'running')")
    _modules(modules)
    _audit()


def _rows(query: str) -> list[dict[str, Any]]:
    return [dict(row) for row in op.get_bind().execute(sa.text(query)).mappings()]


def _modules(old: list[dict[str, Any]]) -> None:
    modules = op.create_table(
        "modules",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False, index=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("digest", sa.String, nullable=False, unique=True),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("origin", sa.String, nullable=False),
        sa.Column("fingerprint", sa.String, nullable=False),
        sa.Column("file", sa.String, nullable=False),
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), unique=True),
        sa.Column("takedown_id", sa.String, sa.ForeignKey("takedowns.id")),
        sa.Column("scope", sa.String, nullable=False),
        sa.Column("effective_at", sa.Double),
        sa.Column("expires_at", sa.Double),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("changed_at", sa.Double, nullable=False),
    )
    op.create_index("modules_version", "modules", ["name", "fingerprint", "version"], unique=True)
    op.create_index(
        "modules_live", "modules", ["name", "fingerprint"], unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE
    )
    versions: dict[str, int] = {}
    for row in old:
        versions[row["name"]] = versions.get(row["name"], 0) + 1
        row |= {
            "id": f"mod_{row['digest'][:16]}",
            "version": versions[row["name"]],
            "revision": 1,
            "origin": "takedown",
            "fingerprint": "",
            "scope": "",
            "changed_at": row["created_at"],
        }
        # Whose model it is stands in the file: the store reads it when it takes the file up, as it does for any found file.
        row["file"] = row["file"].rpartition("/")[2]
    if old:
        op.bulk_insert(modules, old)


def _audit() -> None:
    bind = op.get_bind()
    names = ("id", "at", "actor", "action", "subject")
    former = sa.table("audit", *(sa.column(name) for name in names), sa.column("detail", sa.JSON))
    old = [dict(row) for row in bind.execute(sa.select(former).order_by(former.c.id)).mappings()]
    op.drop_table("audit")
    audit = op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Double, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("actor", "source", "action", "subject")),
        sa.Column("detail", sa.JSON, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("before", "after", "previous", "digest")),
    )
    previous = ORIGIN
    for number, row in enumerate(old, start=1):
        row |= {"id": number, "source": "", "before": "", "after": "", "previous": previous}
        row["digest"] = previous = digest_of(row)
    if old:
        op.bulk_insert(audit, old)
    if bind.dialect.name == "sqlite":
        for what in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{what.lower()} BEFORE {what} ON audit "
                f"BEGIN SELECT RAISE(ABORT, '{_SAYS}'); END"
            )
    else:
        op.execute(
            "CREATE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{_SAYS}'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse()"
        )
