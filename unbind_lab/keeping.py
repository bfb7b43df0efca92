"""What a run has made, kept with the digest of what made it: a run that was killed goes on after its last whole file."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from unbind_core.canonical import canonical_json
from unbind_core.files import write_text, write_whole


def digest(made_of: Any) -> str:
    """SHA-256 of JSON values in their canonical form."""
    return hashlib.sha256(canonical_json(made_of).encode()).hexdigest()


def code_of(*modules: ModuleType | None) -> str:
    """SHA-256 of what modules are written in: their files, or those of a package, tables in TOML among them."""
    return hashlib.sha256(
        b"".join(file.read_bytes() for module in modules if module for file in files_of(module))
    ).hexdigest()


def files_of(module: ModuleType) -> list[Path]:
    """A module's file, or those of a package and of the packages in it."""
    path = Path(str(module.__file__))
    return [path] if path.name != "__init__.py" else sorted({*path.parent.rglob("*.py"), *path.parent.rglob("*.toml")})


class Kept:
    """A folder of artifacts. What was made of something else, or is damaged, is made again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def value(self, name: str, made_of: str, work: Callable[[], Any]) -> Any:
        """The JSON value ``NAME.json`` holds if it was made of the same; else what ``work`` gives, with the seconds it took."""
        path = self.folder / f"{name}.json"
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["made_of"] == made_of:
                return known["value"]
        except (OSError, ValueError, LookupError, TypeError):
            pass  # not there, or not whole: it is made again
        begun = time.monotonic()
        value = json.loads(json.dumps(work()))  # as it is read again
        seconds = round(time.monotonic() - begun, 1)
        write_text(path, json.dumps({"made_of": made_of, "seconds": seconds, "value": value}, indent=1))
        return value

    def tensors(self, name: str, made_of: str, work: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The same of tensors by name, in ``NAME.safetensors``."""
        path = self.folder / f"{name}.safetensors"
        try:
            with safe_open(path, "pt") as file:
                same = (file.metadata() or {}).get("made_of") == made_of
            if same:
                return load_file(path)
        except (OSError, SafetensorError):
            pass
        found = {key: tensor.contiguous() for key, tensor in work().items()}
        write_whole(path, lambda temporary: save_file(found, temporary, {"made_of": made_of}))
        return found
