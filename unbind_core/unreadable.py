"""Why a checkpoint's or an adapter's folder could not be loaded, in one line: what the library says, which files, what to do."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from pickle import UnpicklingError

from safetensors import SafetensorError, safe_open

# What a checkpoint raises that cannot be loaded; the last two of settings that the library takes for others.
UNLOADABLE = (
    *(OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, UnpicklingError),
    *(TypeError, AttributeError),
)
POINTER = b"version https://git-lfs"  # what the stand-in for a file begins with in a clone without Git LFS
_SIZES = re.compile(r"size mismatch for (\S+): .* shape torch\.Size\(\[(.*?)\]\) from .* is torch\.Size\(\[(.*?)\]\)")


def reason(error: Exception, folder: Path) -> str:
    """What to say of ``error``, which a library raised as it loaded ``folder``."""
    text = str(error)
    if isinstance(error, UnpicklingError):
        said = "a file of weights is damaged or holds more than tensors, and code in it is never run; take safetensors"
    elif "trust_remote_code" in text:  # the library's advice is no option here
        said = "it needs code that the checkpoint brings (auto_map), and that is never run"
    elif sizes := _SIZES.search(text):  # of a line for every tensor
        name, theirs, ours = sizes.groups()
        said = f"its {name} has the shape [{theirs}], and this model takes [{ours}]; give one that was trained on this model"
    else:
        said = " ".join(text.split())
    return said + _pointers(folder) + _damaged(folder)


def _begins_as_pointer(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER
    return False


def _pointers(folder: Path) -> str:
    """Of files that a clone left out, with Git LFS's pointers in their place. Empty where there are none."""
    found = [path.name for path in sorted(folder.glob("*.*")) if _begins_as_pointer(path)]
    return f"; Git LFS has left {', '.join(found[:3])} out: run `git lfs pull` where it was cloned" if found else ""


def _damaged(folder: Path) -> str:
    """Of files of weights that are not whole: the library tells of one without its name, and of many shards one may be so."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with contextlib.suppress(OSError), safe_open(path, "pt"):
                pass
        except SafetensorError:
            found += [path.name] * (not _begins_as_pointer(path))
    return f"; not whole: {', '.join(found[:3])}; download it again" if found else ""
