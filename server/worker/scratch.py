"""Where a worker's jobs have their files: the data directory, or, beside a private store, a folder of the worker's own.

There the store is what counts. Rows and the checkpoints of finished stages are brought here before a job, each new checkpoint is
put there before the registry is told of it, and nothing stays here once the job has ended, or the next worker starts after a kill.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from server.registry import files
from server.registry.jobs import Claim
from server.registry.private.files import TakedownFiles, forget_name
from server.registry.private.store import PrivateStore, Unreadable
from server.settings import Settings
from server.worker.patience import Patience, StageFailed
from unbind_core.files import own_folder, remove_unfinished


class Scratch:
    """One worker's."""

    def __init__(self, settings: Settings, patience: Patience) -> None:
        self._patience = patience
        self._store = TakedownFiles(settings).store
        self._put: dict[str, tuple[int, int]] = {}  # what is in the store already, as it was then
        self.folder, self._lock = files.private(settings.data_dir), -1
        if self._store is not None:
            own = files.private(settings.data_dir / "scratch")
            remove_unfinished(own)  # of workers that were killed
            self._lock, self.folder = own_folder(own / "worker")

    def job(self, job_id: str) -> Path:
        """The folder of a job, with one in it for each attempt."""
        return files.job_dir(self.folder, job_id)

    def rows(self, claim: Claim) -> Path:
        """The file of a job's forget rows, which is not there where they were purged. Raises StageFailed."""
        path = files.forget_file(self.folder, claim.forget_digest)
        if self._store is not None and claim.forget_digest and not path.is_file():
            self._bring(claim, self._store, [forget_name(claim.forget_digest)])
        return path

    def has(self, claim: Claim, attempt: str, names: Collection[str]) -> bool:
        """Whether these files of an earlier attempt are there. Raises StageFailed."""
        folder = self.job(claim.job_id) / attempt
        if self._store is not None and not folder.is_dir():
            store, under = self._store, f"jobs/{claim.job_id}/{attempt}"
            self._bring(claim, store, self._ask(claim, "listed", lambda: store.names(under)))
        return folder.is_dir() and all((folder / name).is_file() for name in names)

    def keep(self, claim: Claim, attempt: Path) -> None:
        """A stage has ended: what it left goes to the store. Raises StageFailed, LeaseLost."""
        if self._store is None:
            return
        store = self._store
        self._patience.report(claim, {})  # a stale worker ends here, and leaves nothing in the store
        for path in sorted(path for path in attempt.iterdir() if path.is_file()):
            name = f"jobs/{claim.job_id}/{attempt.name}/{path.name}"
            stamp = (path.stat().st_mtime_ns, path.stat().st_size)
            if self._put.get(name) != stamp:
                self._ask(claim, "kept", lambda: store.put(name, path.read_bytes()))  # noqa: B023 - called here
                self._put[name] = stamp

    def tidy(self, claim: Claim, stages: Mapping[str, Any]) -> None:
        """Delete what the attempts of a job that has ended left and no finished stage refers to; else it goes when it is purged."""
        files.tidy(self.folder, claim.job_id, stages)
        if self._store is None:
            return
        store, kept = self._store, {str(stage.get("folder")) for stage in stages.values()}
        with suppress(OSError):
            for name in store.names(f"jobs/{claim.job_id}"):
                if name.split("/")[2] not in kept:
                    store.delete(name)

    def clear(self) -> None:
        """Between jobs nothing of any is here."""
        if self._store is not None:
            self._put = {}
            for left in ("forget", "jobs"):
                shutil.rmtree(self.folder / left, ignore_errors=True)

    def close(self) -> None:
        """Delete the folder."""
        if self._store is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)

    def _bring(self, claim: Claim, store: PrivateStore, names: list[str]) -> None:
        for name in names:
            try:
                data = self._ask(claim, "read", lambda: store.get(name))  # noqa: B023
            except FileNotFoundError:
                continue
            path = self.folder / name
            files.private(path.parent)
            files.save_bytes(path, data)

    def _ask(self, claim: Claim, what: str, work: Any) -> Any:
        try:
            return self._patience.store(claim, "private store", f"files of the job could not be {what}", work)
        except Unreadable as error:
            raise StageFailed(str(error)) from None
