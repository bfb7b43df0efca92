"""Records and files -> the modules the engine offers.

Shipped files are read where they lie. Files dropped into the folder of the store are taken up into it. Each gets a record, and the
record says whether it is loaded. What is damaged, of another format or of another model is refused with the reason, and moved
to ``quarantine/`` where it was dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server.registry.lifecycle import LIVE
from server.registry.modules import Modules, NewModule
from server.registry.objects import DamagedObject, ObjectStore, StoreUnreachable, quarantine
from server.registry.tables import ModuleState, Origin
from unbind_core.errors import ModuleFileError
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule

log = logging.getLogger("unbind.modules")
SETTLED_SECONDS = 2.0  # a dropped file that cannot be read may still be being copied
_Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class StoredModule:
    """A module, and its record as it was when it was read."""

    module: UnbindModule
    digest: str
    path: str
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def shadow(self) -> bool:
        """Whether it is to be measured and not applied."""
        return bool(self.record.get("state") == ModuleState.SHADOW)

    @property
    def scope(self) -> str:
        """For whom it is enforced: "" nobody, "global", "profile:NAME", "key:ID"."""
        return str(self.record.get("scope") or "")


@dataclass(frozen=True)
class Scan:
    """The modules to load, by name; why files were refused; which shipped files there are, by digest.

    ``absent``: name -> record of the modules that should be loaded and cannot be.
    """

    modules: dict[str, StoredModule]
    problems: dict[str, str]
    present: frozenset[str] = frozenset()
    absent: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def shadow(self) -> frozenset[str]:
        """The modules that are measured and never applied."""
        return frozenset(name for name, stored in self.modules.items() if stored.shadow)

    def enforced(self, scopes: Collection[str]) -> list[str]:
        """The active modules whose records say that they apply in one of these scopes, loaded or not."""
        absent = (name for name, record in self.absent.items() if _demanded(record, scopes))
        return [*(name for name, stored in self.modules.items() if _demanded(stored.record, scopes)), *absent]

    def measured(self, scopes: Collection[str]) -> list[str]:
        """The modules in shadow whose scope is one of these, or that have none and are measured everywhere."""
        return [name for name, stored in self.modules.items() if stored.shadow and stored.scope in ("", *scopes)]


def _demanded(record: Mapping[str, Any], scopes: Collection[str]) -> bool:
    return record.get("state") == ModuleState.ACTIVE and record.get("scope") in scopes


class ModuleStore:
    """Reads each file once per change (inode, size, time) and each object once."""

    def __init__(self, shipped: Path, objects: ObjectStore, records: Modules, identity: ModelIdentity) -> None:
        self._shipped, self._objects, self._records, self._identity = shipped, objects, records, identity
        self._seen: dict[Path, tuple[_Stamp, StoredModule | str]] = {}
        self._objects_read: dict[str, UnbindModule] = {}

    def scan(self) -> Scan:
        """Look at files and records. Never raises for what a file holds; SQLAlchemyError where the database is gone."""
        self._records.pass_time(time.time())
        shipped, problems = self._found_files()
        modules: dict[str, StoredModule] = {}
        absent: dict[str, dict[str, Any]] = {}
        for record in self._records.live(self._identity.fingerprint):
            try:
                module = self._of(record, shipped)
            except (ModuleFileError, DamagedObject, StoreUnreachable, OSError) as error:
                problems[f"{record['name']} ({record['id']})"] = str(error)
                absent[record["name"]] = record
                continue
            if module is not None:
                modules[record["name"]] = module
        return Scan(modules, problems, frozenset(shipped), absent)

    def _of(self, record: dict[str, Any], shipped: dict[str, StoredModule]) -> StoredModule | None:
        digest = str(record["digest"])
        if record["origin"] == Origin.SHIPPED:
            found = shipped.get(digest)  # None: somebody took the file away, and with it the module
            return StoredModule(found.module, digest, found.path, record) if found else None
        if digest not in self._objects_read:
            data = self._objects.get(record["file"], digest)
            module = UnbindModule.from_bytes(data, record["file"])
            module.require(self._identity)
            self._objects_read[digest] = module
        return StoredModule(self._objects_read[digest], digest, f"{self._objects.where}/{record['file']}", record)

    def _found_files(self) -> tuple[dict[str, StoredModule], dict[str, str]]:
        """Shipped modules by digest, and why other files were refused; takes up what was dropped."""
        seen: dict[Path, tuple[_Stamp, StoredModule | str]] = {}
        shipped: dict[str, StoredModule] = {}
        problems: dict[str, str] = {}
        for origin, path in self._files():
            try:
                status = path.stat()
            except OSError:
                continue  # removed since it was listed
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            known = self._seen.get(path)
            content = known[1] if known is not None and known[0] == stamp else self._read(path, origin)
            seen[path] = (stamp, content)
            if isinstance(content, str):
                problems[str(path)] = content
                if origin == Origin.DROPPED and time.time() - status.st_mtime > SETTLED_SECONDS:
                    log.warning("quarantined as %s", quarantine(path, content))
            elif origin == Origin.SHIPPED:
                shipped[content.digest] = content
        self._seen = seen
        return shipped, problems

    def _files(self) -> Iterator[tuple[Origin, Path]]:
        folders = ((Origin.SHIPPED, self._shipped), (Origin.DROPPED, self._objects.folder))
        for origin, folder in folders:
            if folder is not None and folder.is_dir():
                for path in sorted(folder.glob("*.safetensors")):
                    yield origin, path

    def _read(self, path: Path, origin: Origin) -> StoredModule | str:
        """The module of a file, which has a record from here on; or why it is refused."""
        try:
            module = UnbindModule.load(path, self._identity)
        except ModuleFileError as error:
            log.warning("module file refused: %s", error)
            return str(error)
        dropped = origin == Origin.DROPPED
        file = self._objects.put(module.to_bytes()) if dropped else str(path)
        record = self._records.adopt(
            NewModule(module.name, module.digest, self._identity.fingerprint, file, origin), time.time()
        )
        if record["state"] not in LIVE:
            log.warning("%s: module '%s' is %s, and a file does not change that", path, module.name, record["state"])
        if dropped:
            path.unlink(missing_ok=True)
        return StoredModule(module, module.digest, str(path), record)
