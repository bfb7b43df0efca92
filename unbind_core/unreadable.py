"""Why a checkpoint's or an adapter's folder could not be loaded, in one line: what the library says, which files, what to do."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn

# What settings raise that the library takes for others, or does not check before it computes with them.
ODD_SETTINGS = (StrictDataclassError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)
# What a checkpoint raises that cannot be loaded.
UNLOADABLE = (
    *(OSError, ValueError, RuntimeError, ImportError, SafetensorError, UnpicklingError),
    *ODD_SETTINGS,
)
INDEX = "model.safetensors.index.json"
WEIGHTS = (INDEX, "model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json")
SETTINGS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
)
POINTER = b"version https://git-lfs"  # what the stand-in for a file begins with in a clone without Git LFS
_BOTH = "config.json and weights of one checkpoint"
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
    elif isinstance(error, ODD_SETTINGS):
        said = f"the library makes nothing of its settings ({type(error).__name__}: {' '.join(text.split())})"
    else:
        said = " ".join(text.split()).removesuffix(".")
    found = _pointers(folder) + _damaged(folder) + _left_out(folder)
    if not found and isinstance(error, ODD_SETTINGS):
        found = "; mend what it names, or take the folder's *.json files as they were published"
    return said + found


def require_alike(report: dict[str, Any], model: Any, layers: list[nn.Module]) -> None:
    """Raise ValueError where a loaded model is not what its files hold, by the library's ``report``: it would go on with random
    weights in place of those that are missing, and without layers that config.json does not tell of.
    """
    if report["missing_keys"]:
        first = ", ".join(sorted(report["missing_keys"])[:3])
        raise ValueError(f"weights are missing: {first}; download it again, or take {_BOTH}")
    for name, weight, wanted in sorted(report["mismatched_keys"])[:1]:
        raise ValueError(f"{name} has the shape {list(weight)}, and config.json asks for {list(wanted)}; take {_BOTH}")
    path = next(path for path, part in model.named_modules() if isinstance(part, nn.ModuleList) and [*part] == layers)
    ahead = ("num_nextn_predict_layers", "num_mtp_modules")  # layers behind the last one, which guess further tokens
    guessing = sum(getattr(model.config.get_text_config(), name, 0) or 0 for name in ahead)
    for name in sorted(report["unexpected_keys"]):
        number = re.match(rf"{re.escape(path)}\.(\d+)\.", name)
        if number and int(number[1]) >= len(layers) + guessing:
            raise ValueError(
                f"config.json tells of {len(layers)} layers, and there are weights of more ({name}); take {_BOTH}"
            )


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


def require_json(folder: Path) -> None:
    """Raise ValueError that names the files of settings that are no JSON object. Of some the library tells without a name, and
    goes on without the end tokens of a ``generation_config.json`` that is none.
    """
    found = []
    for path in (folder / name for name in SETTINGS):
        with contextlib.suppress(OSError):
            try:
                whole = isinstance(json.loads(path.read_bytes()), dict)
            except ValueError:
                whole = False
            found += [path.name] * (not whole and not _begins_as_pointer(path))
    if found:
        raise ValueError(f"not a JSON object: {', '.join(found)}; download it again")


def _left_out(folder: Path) -> str:
    """Of files of weights that a model's folder lacks. Empty where it has all."""
    found = []
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
        named = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
        found = sorted(name for name in set(named) if not (folder / name).exists())
    if (folder / "config.json").exists() and not any((folder / name).exists() for name in WEIGHTS):
        found = [INDEX if any(folder.glob("model-*.safetensors")) else "model.safetensors"]
    return f"; missing: {', '.join(found[:3])}; download it again" if found else ""
