"""The schema's history, run by Alembic through ``server/registry/database.py``."""
