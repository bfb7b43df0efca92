"""The databases that registry tests run on: SQLite, and a real PostgreSQL, started here, where its programs are installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg


def _programs() -> Path | None:
    """The folder that holds ``initdb`` and ``postgres``."""
    on_path = shutil.which("postgres")
    folders = [
        *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),
        Path(on_path).resolve().parent if on_path else None,
    ]
    return next((folder for folder in folders if folder and (folder / "initdb").exists()), None)


PROGRAMS = _programs()
KINDS = ("sqlite", "postgresql") if PROGRAMS else ("sqlite",)
NOTE = (
    f"registry tests: SQLite and PostgreSQL ({PROGRAMS})"
    if PROGRAMS
    else "registry tests: SQLite alone; PostgreSQL's initdb and postgres are not installed (Debian: apt-get install postgresql)"
)


@contextmanager
def postgresql() -> Iterator[str]:
    """A server on a socket in a temporary folder, ended on leaving; yields the folder. It refuses to run as root."""
    assert PROGRAMS is not None
    folder = Path(tempfile.mkdtemp(prefix="unbind-pg-"))
    user = None
    if os.geteuid() == 0:
        user = next(name for name in ("postgres", "nobody") if name in {entry.pw_name for entry in pwd.getpwall()})
        shutil.chown(folder, user)
    data = folder / "data"
    initdb = [PROGRAMS / "initdb", "-D", data, "-U", "unbind", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"]
    subprocess.run(initdb, check=True, capture_output=True, user=user, cwd="/")
    flags = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=50", "-c", "shared_buffers=16MB"]
    server = subprocess.Popen(
        [PROGRAMS / "postgres", "-D", data, "-k", folder, *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=user,
        cwd="/",
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(host=str(folder), user="unbind", dbname="postgres").close()
                break
            except psycopg.OperationalError:
                assert time.monotonic() < deadline and server.poll() is None, "PostgreSQL did not start"
                time.sleep(0.1)
        yield str(folder)
    finally:
        server.send_signal(2)  # its fast shutdown
        server.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def new_database(folder: str) -> str:
    """The address of an empty database on the server of ``postgresql()``."""
    name = f"t{uuid.uuid4().hex[:12]}"
    with psycopg.connect(host=folder, user="unbind", dbname="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return f"postgresql+psycopg://unbind@/{name}?host={folder}"
