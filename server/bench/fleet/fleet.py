"""Two servers and two workers with folders of their own, on one PostgreSQL and one store, behind one proxy."""

from __future__ import annotations

import json
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from server.bench.fleet.parts import BUCKET, Part, S3Store, answers, environment, free_port, nginx, wait_for
from server.bench.fleet.postgres import Postgres, postgres
from server.registry.database import connect, upgrade
from server.registry.objects import ObjectStore
from server.registry.registry import Registry
from server.service import load_served
from server.settings import Settings

ADMIN_KEY = "fleet-admin-key"
READY_SECONDS = 180.0
LEASE_SECONDS = 3.0


class Fleet:
    """Everything that runs. ``outages``: when the registry was away, by the monotonic clock."""

    def __init__(
        self, folder: Path, model: Path | None, database: Postgres, store: S3Store | None, python: str
    ) -> None:
        self.database, self.store = database, store
        url = database.new_database()
        engine = connect(url)
        upgrade(engine)
        self.registry = Registry(engine)
        self.outages: list[tuple[float, float]] = []
        self._away_since: float | None = None
        self._turn = threading.Lock()
        served: dict[str, object] = {"model": model} if model else {}
        (folder / "identity.json").write_text(json.dumps(asdict(load_served(Settings.model_validate(served)).identity)))
        bucket = f"s3://{BUCKET}" if store else str(folder / "store")
        common = {
            **served,
            "database_url": url,
            "module_store": f"{bucket}/modules",
            "private_store": f"{bucket}/private",
            "private_key": secrets.token_hex(32),
            "guard_key": secrets.token_hex(32),
            "admin_key": ADMIN_KEY,
            "modules_dir": folder / "shipped",
            "log_level": "info",
        }
        self._local = None if store else ObjectStore(f"{bucket}/modules")
        libraries = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FLEET_IDENTITY": str(folder / "identity.json")}
        libraries |= store.settings() if store else {}
        self.ports = [free_port(), free_port()]
        self.port = free_port()
        self.servers = [
            Part(
                f"server-{number}",
                [python, "-P", "-m", "server", "serve", "--json"],
                environment(
                    {
                        **common,
                        "port": port,
                        "data_dir": folder / f"server-{number}",
                        "worker": False,
                        "max_model_len": 256,
                        "max_slots": 8,
                        "threads": 1,
                        "drain_timeout": 20,
                    },
                    libraries,
                ),
                folder,
            )
            for number, port in enumerate(self.ports)
        ]
        worker = {"lease_seconds": LEASE_SECONDS, "max_attempts": 10_000, "prepare": False, "worker_nice": 0}
        self.workers = [
            Part(
                f"worker-{number}",
                [python, "-P", "-m", "server.bench.fleet.stages", "worker"],
                environment(
                    {**common, **worker, "data_dir": folder / f"worker-{number}", "device": f"cpu:{number}"},
                    {**libraries, "PYTHONPATH": str(Path(__file__).parents[3])},
                ),
                folder,
            )
            for number in range(2)
        ]
        self.proxy = nginx(folder, self.port, self.ports)

    def start(self) -> float:
        """Start everything; seconds until all servers are ready. Raises UnbindError."""
        began = time.monotonic()
        for part in (*self.servers, *self.workers, self.proxy):
            part.start()
        for part, port in zip(self.servers, self.ports, strict=True):
            wait_for(lambda: answers(port), part, READY_SECONDS)  # noqa: B023 - called here
        return time.monotonic() - began

    def kill_database(self) -> None:
        """End PostgreSQL at once."""
        self._lose_database(self.database.kill)

    def start_database(self) -> None:
        """Have it again."""
        self._regain_database(self.database.start)

    def freeze_database(self) -> None:
        """Let PostgreSQL take what is sent and say nothing."""
        self._lose_database(self.database.freeze)

    def thaw_database(self) -> None:
        """Let it go on."""
        self._regain_database(self.database.thaw)

    def _lose_database(self, by: Callable[[], None]) -> None:
        with self._turn:
            self._away_since = time.monotonic()
            by()

    def _regain_database(self, by: Callable[[], None]) -> None:
        with self._turn:
            by()
            if self._away_since is not None:
                self.outages.append((self._away_since, time.monotonic()))
                self._away_since = None

    def object(self, key: str) -> bytes:
        """What the store holds under a record's file."""
        if self.store is not None:
            return self.store.read(key)
        assert self._local is not None and self._local.folder is not None
        return (self._local.folder / key).read_bytes()

    def close(self) -> None:
        """End everything."""
        if self.store is not None:
            self.store.part.signal(signal.SIGCONT)
        for part in (*self.workers, *self.servers, self.proxy):
            part.signal(signal.SIGTERM)
        for part in (*self.workers, *self.servers, self.proxy):
            part.close()
        self.registry.close()


@contextmanager
def fleet(folder: Path, model: Path | None, python: str | None) -> Iterator[Fleet]:
    """All of it, ended on leaving. ``python`` has what S3 needs; where there is none the store is a folder. Raises UnbindError."""
    with ExitStack() as parts:
        database = parts.enter_context(postgres(free_port()))
        store = S3Store(python, folder) if python else None
        if store is not None:
            parts.callback(store.part.close)
        made = Fleet(folder, model, database, store, python or sys.executable)
        parts.callback(made.close)
        yield made
