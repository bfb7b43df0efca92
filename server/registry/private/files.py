"""A takedown's files where they lie: under the data directory, or in a private store that several machines share.

The admin API and the evidence read and write through this; a worker beside a private store brings what it needs to its own machine
(``server/worker/scratch.py``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from server.registry import files
from server.registry.private.store import PrivateStore
from server.settings import Settings
from unbind_core.rows import ForgetRow, forget_digest, json_lines, parse_forget


class TakedownFiles:
    """``store`` is None where they lie under the data directory."""

    def __init__(self, settings: Settings) -> None:
        self.data_dir = settings.data_dir
        self.store = _store(settings.private_store, *settings.private_keys) if settings.private_store else None

    def save_forget(self, rows: Sequence[ForgetRow]) -> str:
        """Keep a forget set under its digest, which is returned. Raises OSError, StoreUnreachable."""
        if self.store is None:
            return files.save_forget(self.data_dir, rows)
        digest = forget_digest(rows)
        self.store.put(forget_name(digest), "".join(json.dumps(asdict(row)) + "\n" for row in rows).encode())
        return digest

    def has_forget(self, digest: str) -> bool:
        """Whether the rows are still kept. Raises StoreUnreachable."""
        return files.has_forget(self.data_dir, digest) if self.store is None else self.store.has(forget_name(digest))

    def kept_forget(self) -> set[str]:
        """The digests of all forget sets that are kept. Raises OSError, StoreUnreachable."""
        names = [path.name for path in files.forget_file(self.data_dir, "").parent.glob("*.jsonl")]
        if self.store is not None:
            names += [name.rpartition("/")[2] for name in self.store.names("forget")]
        return {name.removesuffix(".jsonl") for name in names}

    def kept_jobs(self) -> set[str]:
        """The jobs that have left files. Raises OSError, StoreUnreachable."""
        found = {path.name for path in (self.data_dir / "jobs").glob("job_*") if path.is_dir()}
        if self.store is not None:
            found |= {name.split("/")[1] for name in self.store.names("jobs") if name.startswith("jobs/job_")}
        return found

    def load_forget(self, digest: str) -> list[ForgetRow]:
        """The rows of a forget set that is kept. Raises OSError, StoreUnreachable, DataError."""
        if self.store is None:
            return files.load_forget(files.forget_file(self.data_dir, digest))
        return parse_forget(json_lines(self.store.get(forget_name(digest)), "forget rows"))

    def purge(self, digest: str, job_ids: Sequence[str]) -> None:
        """Delete a forget set (none where ``digest`` is empty) and whatever its jobs left that holds pieces of it.

        Raises OSError, StoreUnreachable where it is not all gone.
        """
        files.purge(self.data_dir, digest, job_ids)
        if self.store is not None:
            for name in (*([forget_name(digest)] if digest else []), *(f"jobs/{job_id}" for job_id in job_ids)):
                self.store.delete(name)

    def tidy(self) -> None:
        """Delete what processes that were killed left half written; what is being written stays."""
        files.tidy_forget(self.data_dir)
        if self.store is not None:
            self.store.tidy()

    def read_json(self, job_id: str, folder: str, name: str) -> Any:
        """A document that an attempt of a job left; None where it is not there. Raises StoreUnreachable, Unreadable."""
        try:
            if self.store is None:
                return json.loads((self.data_dir / "jobs" / job_id / folder / name).read_text(encoding="utf-8"))
            return json.loads(self.store.get(f"jobs/{job_id}/{folder}/{name}"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None


@cache
def _store(where: str, *keys: bytes) -> PrivateStore:
    """One a process, which so knows whether it has been seen."""
    return PrivateStore(where, keys)


def forget_name(digest: str) -> str:
    """Where a forget set is in a private store."""
    return f"forget/{digest}.jsonl"
