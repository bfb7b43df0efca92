"""A PostgreSQL of one's own in a temporary folder: started, frozen, killed and started again."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import psycopg

from unbind_core.errors import UnbindError

START_SECONDS = 30.0
_FLAGS = ("fsync=off", "max_connections=80", "shared_buffers=16MB")


def programs() -> Path | None:
    """The folder that holds ``initdb`` and ``postgres``; None where they are not installed."""
    on_path = shutil.which("postgres")
    folders = [
        *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),
        Path(on_path).resolve().parent if on_path else None,
    ]
    return next((folder for folder in folders if folder and (folder / "initdb").exists()), None)


class Postgres:
    """One server. What was committed outlives its process, though not a power failure: it does not wait for the disk."""

    def __init__(self, port: int | None = None) -> None:
        """``port``: of loopback, by which it is reached; where there is none, by its socket alone."""
        self._port = port
        found = programs()
        if found is None:
            raise UnbindError("PostgreSQL's initdb and postgres are not installed (Debian: apt-get install postgresql)")
        self._programs = found
        self.folder = Path(tempfile.mkdtemp(prefix="unbind-pg-"))
        self._user = None
        if os.geteuid() == 0:  # it refuses to run as root
            self._user = next(name for name in ("postgres", "nobody") if name in {e.pw_name for e in pwd.getpwall()})
            shutil.chown(self.folder, self._user)
        data = self.folder / "data"
        subprocess.run(
            [found / "initdb", "-D", data, "-U", "unbind", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"],
            check=True,
            capture_output=True,
            user=self._user,
            cwd="/",
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and come back when it answers. Raises UnbindError."""
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process is None or self._process.poll() is not None:
                # After a kill the first start may be refused: what it had started is still about to notice.
                self._process = self._started()
            if time.monotonic() > deadline:
                raise UnbindError("PostgreSQL did not start")
            time.sleep(0.05)

    def _started(self) -> subprocess.Popen[bytes]:
        over = ("listen_addresses=127.0.0.1", f"port={self._port}") if self._port else ("listen_addresses=",)
        flags = [part for flag in (*_FLAGS, *over) for part in ("-c", flag)]
        return subprocess.Popen(
            [self._programs / "postgres", "-D", self.folder / "data", "-k", self.folder, *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=self._user,
            cwd="/",
        )

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def connect(self) -> psycopg.Connection:
        """To the database that is always there. Raises psycopg.OperationalError."""
        return psycopg.connect(
            host=str(self.folder), port=self._port or 5432, user="unbind", dbname="postgres", autocommit=True
        )

    def new_database(self) -> str:
        """The address of an empty database."""
        name = f"t{uuid.uuid4().hex[:12]}"
        with contextlib.closing(self.connect()) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        if self._port is not None:
            return f"postgresql+psycopg://unbind@127.0.0.1:{self._port}/{name}"
        return f"postgresql+psycopg://unbind@/{name}?host={self.folder}"

    def kill(self) -> None:
        """End it as a crash does: its other processes notice, and end as well."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Let all its processes stand still: it takes what is sent and says nothing."""
        assert self._process is not None
        main = psutil.Process(self._process.pid)
        main.suspend()  # first, as it starts the others
        for child in main.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.suspend()

    def thaw(self) -> None:
        """Let them go on."""
        assert self._process is not None
        main = psutil.Process(self._process.pid)
        for process in (*main.children(recursive=True), main):
            process.resume()

    def close(self) -> None:
        """End it and delete what it kept."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # its fast shutdown
            self._process.wait(START_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def postgres(port: int | None = None) -> Iterator[Postgres]:
    """A server, ended on leaving."""
    made = Postgres(port)
    try:
        yield made
    finally:
        made.close()
