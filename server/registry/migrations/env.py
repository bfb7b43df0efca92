"""Alembic's entry: it runs the migrations on the connection that ``database.py`` hands over, in its transaction."""

from __future__ import annotations

from alembic import context

from server.registry.tables import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
context.run_migrations()
