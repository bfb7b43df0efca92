"""Module files on disk -> the modules the engine offers: the folder that ships, and the folder that workers publish to.

Files that are dropped in are picked up; a file that is damaged or of another model is reported and skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unbind_core.architecture import ModelIdentity
from unbind_core.errors import ModuleFileError
from unbind_core.module import UnbindModule

log = logging.getLogger("unbind.modules")
_Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class StoredModule:
    """A module and the file it is from."""

    module: UnbindModule
    digest: str
    path: Path


@dataclass(frozen=True)
class Scan:
    """What the folders hold: modules by name, and why files were skipped."""

    modules: dict[str, StoredModule]
    problems: dict[str, str]


class ModuleStore:
    """Reads each file once per change (inode, size, time); later folders win over earlier ones."""

    def __init__(self, folders: Sequence[Path], identity: ModelIdentity) -> None:
        self._folders = tuple(folders)
        self._identity = identity
        self._seen: dict[Path, tuple[_Stamp, StoredModule | str]] = {}

    def scan(self) -> Scan:
        """Look at the folders; never raises for what is in them."""
        found: dict[Path, tuple[_Stamp, StoredModule | str]] = {}
        for folder in self._folders:
            for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
                try:
                    status = path.stat()
                except OSError:
                    continue  # removed since it was listed
                stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
                known = self._seen.get(path)
                found[path] = known if known is not None and known[0] == stamp else (stamp, self._read(path))
        self._seen = found
        modules: dict[str, StoredModule] = {}
        problems: dict[str, str] = {}
        for path, (_, content) in found.items():
            if isinstance(content, str):
                problems[str(path)] = content
            else:
                modules[content.module.name] = content
        return Scan(modules, problems)

    def _read(self, path: Path) -> StoredModule | str:
        try:
            module = UnbindModule.load(path, self._identity)
        except ModuleFileError as error:
            log.warning("module file skipped: %s", error)
            return str(error)
        return StoredModule(module, module.digest, path)
