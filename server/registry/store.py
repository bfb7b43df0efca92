"""Records and files -> the modules the engine offers.

Shipped files are read where they lie. Files dropped into the folder of the store are taken up into it. Each gets a record, and the
record says whether it is loaded. What is damaged, of another format or of another model is refused with the reason, and moved
to ``quarantine/`` where it was dropped. A name that a takedown's record holds is never served from a file. No file, whatever it
holds or is, keeps another from being read.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from server.registry.lifecycle import LIVE, demanded
from server.registry.modules import Modules
from server.registry.objects import DamagedObject, ObjectStore, quarantine
from server.registry.records import NewModule
from server.registry.refusals import AWAY
from server.registry.tables import ModuleState, Origin
from unbind_core.errors import ModuleFileError
from unbind_core.files import MAX_BYTES, read_regular
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule

log = logging.getLogger("unbind.modules")
READERS = 4  # threads that read a store elsewhere
FOLDER_READERS = (
    2  # and a folder: they read and hash, mostly without Python's lock, while another checks what they read
)
MANY = 100  # modules; Python's collector of garbage is not had look through so many that have just come
SETTLED_SECONDS = 2.0  # a dropped file that cannot be read may still be being copied
_MOST_TOLD = 600  # characters of an error: a file may have put anything into it
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
    """The modules to load, by name; why files were refused.

    ``absent``: name -> record of the modules that should be loaded and cannot be.
    """

    modules: dict[str, StoredModule]
    problems: dict[str, str]
    absent: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def shadow(self) -> frozenset[str]:
        """The modules that are measured and never applied."""
        return frozenset(name for name, stored in self.modules.items() if stored.shadow)

    def enforced(self, scopes: Collection[str]) -> list[str]:
        """The active modules whose records say that they apply in one of these scopes, loaded or not."""
        absent = (name for name, record in self.absent.items() if demanded(record, scopes))
        return [*(name for name, stored in self.modules.items() if demanded(stored.record, scopes)), *absent]

    def measured(self, scopes: Collection[str]) -> list[str]:
        """The modules in shadow whose scope is one of these, or that have none and are measured everywhere."""
        return [name for name, stored in self.modules.items() if stored.shadow and stored.scope in ("", *scopes)]


@dataclass(frozen=True)
class _Refused:
    """Why a file is not offered. ``passing``: it may be another time; ``stays``: it cannot be moved away either."""

    reason: str
    passing: bool = False
    stays: bool = False


_Content = StoredModule | _Refused


class ModuleStore:
    """Reads each file once per change (inode, size, time) and each object once."""

    def __init__(self, shipped: Path | None, objects: ObjectStore, records: Modules, identity: ModelIdentity) -> None:
        self._shipped, self._objects, self._records, self._identity = shipped, objects, records, identity
        self._seen: dict[Path, tuple[_Stamp, _Content]] = {}
        self._objects_read: dict[str, UnbindModule] = {}
        self._last: tuple[Any, Scan] | None = None  # what was found of files and records, and what came of it

    def scan(self) -> Scan:
        """Look at files and records; the same scan again where both are as before and nothing is absent, which may come late.

        Never raises for what a file holds; SQLAlchemyError where the database is gone.
        """
        self._records.pass_time(time.time())
        shipped, problems = self._found_files()
        records = self._records.live(self._identity.fingerprint)
        found = (shipped, dict(problems), records)
        if self._last is not None and self._last[0] == found and not self._last[1].absent:
            return self._last[1]
        modules: dict[str, StoredModule] = {}
        absent: dict[str, dict[str, Any]] = {}
        failed = self._read_objects(records)
        for record in records:
            try:
                if (reason := failed.get(record["digest"])) is not None:
                    raise reason
                module = self._of(record, shipped)
            except Exception as error:  # noqa: BLE001 - of one module; it must not keep the others away
                problems[f"{record['name']} ({record['id']})"] = told(error)
                absent[record["name"]] = record
                continue
            if module is not None:
                modules[record["name"]] = module
        self._last = found, Scan(modules, problems, absent)
        return self._last[1]

    def _of(self, record: dict[str, Any], shipped: dict[str, StoredModule]) -> StoredModule | None:
        digest = str(record["digest"])
        if record["origin"] == Origin.SHIPPED:
            if (found := shipped.get(digest)) is not None:
                return StoredModule(found.module, digest, found.path, record)
            content = self._seen.get(Path(record["file"]), (None, None))[1]
            if isinstance(content, _Refused):
                raise ModuleFileError(content.reason)
            return None  # somebody took the file away, and with it the module
        module = self._objects_read[digest]
        if module.name != record["name"]:
            raise DamagedObject(f"{record['file']}: holds the module '{module.name}'; the record was changed")
        return StoredModule(module, digest, f"{self._objects.where}/{record['file']}", record)

    def _read_objects(self, records: Iterable[dict[str, Any]]) -> dict[str, Exception]:
        """Have the objects of these records, and no others, in memory; by digest, why some could not be read."""
        files = {str(record["digest"]): str(record["file"]) for record in records if record["origin"] != Origin.SHIPPED}
        missing = [(digest, file) for digest, file in files.items() if digest not in self._objects_read]
        read = {digest: module for digest, module in self._objects_read.items() if digest in files}
        failed: dict[str, Exception] = {}
        if missing:
            readers = min(len(missing), READERS if self._objects.folder is None else FOLDER_READERS)
            staying = _staying() if len(missing) >= MANY else nullcontext()
            with staying, ThreadPoolExecutor(readers, "unbind-modules") as pool:
                coming = [(digest, file, pool.submit(self._objects.soon, file, digest)) for digest, file in missing]
                for digest, file, data in coming:
                    try:
                        module = UnbindModule.from_bytes(data.result(), file, digest)
                        module.require(self._identity)
                        read[digest] = module
                    except Exception as error:  # noqa: BLE001 - of one module; it must not keep the others away
                        failed[digest] = error
        self._objects_read = read
        return failed

    def _found_files(self) -> tuple[dict[str, StoredModule], dict[str, str]]:
        """Shipped modules by digest, and why other files were refused; takes up what was dropped."""
        seen: dict[Path, tuple[_Stamp, _Content]] = {}
        shipped: dict[str, StoredModule] = {}
        problems: dict[str, str] = {}
        for origin, path in self._files():
            try:
                status = path.stat(follow_symlinks=origin == Origin.SHIPPED)
            except FileNotFoundError:
                continue  # removed since it was listed
            except OSError as error:
                problems[_shown(path)] = told(error)
                continue
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            known = self._seen.get(path)
            content = known[1] if known is not None and known[0] == stamp else None
            if content is None or (isinstance(content, _Refused) and content.passing):
                content = self._read(path, origin, content)
            if isinstance(content, _Refused):
                problems[_shown(path)] = content.reason
                if origin == Origin.DROPPED and time.time() - status.st_mtime > SETTLED_SECONDS:
                    content = _put_away(path, content)
            elif origin == Origin.SHIPPED:
                shipped[content.digest] = content
            seen[path] = (stamp, content)
        self._seen = seen
        return shipped, problems

    def _files(self) -> Iterator[tuple[Origin, Path]]:
        folders = ((Origin.SHIPPED, self._shipped), (Origin.DROPPED, self._objects.folder))
        for origin, folder in folders:
            if folder is not None and folder.is_dir():
                for path in sorted(folder.glob("*.safetensors")):
                    yield origin, path

    def _read(self, path: Path, origin: Origin, before: _Refused | None) -> _Content:
        """The module of a file, which has a record from here on; or why it is refused. Raises what is AWAY: the database."""
        try:
            return self._take_up(path, origin)
        except AWAY:
            raise
        except (ModuleFileError, _Unreadable) as error:
            refused = _Refused(told(error))
        except OSError as error:  # nothing is wrong with the file: the store cannot take it
            refused = _Refused(f"{_shown(path)}: {told(error)}", passing=True)
        except Exception as error:  # noqa: BLE001 - whatever a file makes happen is that file's
            refused = _Refused(f"{_shown(path)}: cannot be used ({type(error).__name__}: {told(error)})")
        if refused != before:
            log.warning("module file refused: %s", refused.reason)
        return refused

    def _take_up(self, path: Path, origin: Origin) -> StoredModule:
        dropped = origin == Origin.DROPPED
        try:  # a link in the folder of dropped files may lead anywhere
            data = read_regular(path, MAX_BYTES, follow=not dropped)
        except OSError as error:
            raise _Unreadable(f"{_shown(path)}: cannot be read ({error.strerror or error}); check the file") from error
        module = UnbindModule.from_bytes(data, _shown(path))
        module.require(self._identity)
        if not float(torch.tensor(module.kappa)) > 0:
            raise ModuleFileError(f"{_shown(path)}: kappa is 0, so that the module does nothing; fit it again")
        if self._records.held(module.name, module.digest):
            raise ModuleFileError(
                f"{_shown(path)}: '{module.name}' is the name of a takedown's module, which no file stands in for; "
                "bring it under another name"
            )
        file = self._objects.put(bytes(data)) if dropped else str(path)
        record = self._records.adopt(
            NewModule(module.name, module.digest, self._identity.fingerprint, file, origin), time.time()
        )
        if record["state"] not in LIVE:
            state = record["state"]
            log.warning("%s: module '%s' is %s, and a file does not change that", _shown(path), module.name, state)
        if dropped:
            path.unlink(missing_ok=True)
        return StoredModule(module, module.digest, _shown(path), record)


@contextmanager
def _staying() -> Iterator[None]:
    """Make a hundred objects a module, which stay: Python's collector of garbage would go through them again and again. It waits
    meanwhile, and leaves out from then on what is there in the end.
    """
    gc.unfreeze()
    gc.collect()  # else what is garbage by now would stay as well
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Unreadable(Exception):
    """A file that is not there to be read as one."""


def _put_away(path: Path, content: _Refused) -> _Refused:
    """Move a refused file into quarantine; where that fails it is said once."""
    if content.passing or content.stays:
        return content
    try:
        log.warning("quarantined as %s", _shown(quarantine(path, content.reason)))
    except OSError as error:
        log.warning("%s cannot be quarantined: %s", _shown(path), told(error))
        return replace(content, stays=True)
    return content


def _shown(path: Path) -> str:
    """A path as text that every log and database takes: names of files need not be text."""
    return os.fsencode(path).decode("utf-8", "replace")


def told(error: Exception) -> str:
    """What an error says, as far as logs and answers hold it."""
    return ascii(str(error))[1:-1][:_MOST_TOLD] if not str(error).isprintable() else str(error)[:_MOST_TOLD]
