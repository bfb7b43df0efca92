"""The databases that registry tests run on: SQLite, and a real PostgreSQL, started here, where its programs are installed."""

from __future__ import annotations

from server.bench.fleet.postgres import programs

PROGRAMS = programs()
KINDS = ("sqlite", "postgresql") if PROGRAMS else ("sqlite",)
NOTE = (
    f"registry tests: SQLite and PostgreSQL ({PROGRAMS})"
    if PROGRAMS
    else "registry tests: SQLite alone; PostgreSQL's initdb and postgres are not installed (Debian: apt-get install postgresql)"
)
