"""A module's bytes: safetensors with one metadata key, ``unbind``, that holds canonical JSON and a checksum over everything."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save as save_tensors
from torch import Tensor

from unbind_core.canonical import canonical_json
from unbind_core.errors import ModuleFileError
from unbind_core.files import Memory
from unbind_core.partitions import RowsByPart, are_whole_numbers

FORMAT = 4
KEY = "unbind"
# What reading bytes that mean to do harm can raise, of safetensors, torch and json.
UNREADABLE = (SafetensorError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
TENSORS = ("w", "v", "b", "heads", "heads_b", "u", "a", "c", "e")
DETECTORS = {"fisher": {"w"}, "network": {"w", "b", "heads", "heads_b"}}  # kind -> the tensors it has
CORRECTIONS = {"push": {"v"}, "lowrank": {"u", "a", "c"}, "network": {"u", "a", "c", "e"}}
FLOAT32: Mapping[str, Any] = {"dtype": "float32", "quantisation": None}
# What formats before had no fields for. A module that is all of this is still written so: its bytes and its digest stay.
_SECOND: Mapping[str, Any] = {"hold": None}
_FIRST: Mapping[str, Any] = {
    "correction": "push",
    "policy": "silent",
    "calibrated": FLOAT32,
    "first": 0,
    "least": 1,
    **_SECOND,
}
_IMPLIED = {1: _FIRST, 2: _SECOND}


def _checksum(tensors: Mapping[str, Tensor], unsealed: str) -> str:
    """SHA-256 over the tensors and the canonical JSON without the checksum itself, so that damage and hand edits show."""
    digest = hashlib.sha256()
    for key in TENSORS:
        if key in tensors:
            digest.update(tensors[key].contiguous().view(torch.uint8).numpy().data)
    digest.update(unsealed.encode())
    return digest.hexdigest()


def filed(described: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as a file holds it, with its format: the first that says it all, without the fields that it implies."""
    if described.get("correction") == "network":
        return {**described, "format": FORMAT}
    for version, implied in _IMPLIED.items():
        if all(described.get(key) == value for key, value in implied.items()):
            return {key: value for key, value in described.items() if key not in implied} | {"format": version}
    return {**described, "format": 3}


def written(tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> bytes:
    """The file as bytes; the same content gives the same bytes. TypeError, ValueError or RecursionError where ``described``
    is not JSON.
    """
    checksum = _checksum(tensors, canonical_json(described, nan=False))
    return save_tensors(dict(tensors), metadata={KEY: canonical_json({**described, "checksum": checksum}, nan=False)})


def read(data: Memory, origin: str, known: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a whole, unaltered file of this format; raises ModuleFileError, beginning with ``origin``.

    The tensors are views of ``data``, which nobody may change from here on. ``known``: the bytes are those of a file that was read
    before, so that neither its own checksum nor the library's opinion of them, half of the work, is asked.
    """
    try:
        if not known:
            deserialize(bytes(data))
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(str(data[8:start], "utf-8"))
        metadata = header.pop("__metadata__", None) or {}
        tensors = _views(data, header, start)
    except (*UNREADABLE, RecursionError) as error:
        raise ModuleFileError(f"{origin}: truncated, or not a safetensors file ({error}); copy it again") from error
    text = metadata.get(KEY)
    if text is None or len(metadata) != 1:
        raise ModuleFileError(
            f"{origin}: a safetensors file, but not a module ('{KEY}' must be its one metadata key); give a module file"
        )
    try:
        described = _parsed(text)
    except (ValueError, RecursionError) as error:
        raise ModuleFileError(f"{origin}: its metadata is not JSON ({error}); restore the original file") from error
    if not isinstance(described, dict):
        raise ModuleFileError(f"{origin}: its metadata is not an object; restore the original file")
    version = described.get("format")
    if type(version) is not int or not 1 <= version <= FORMAT:
        newer = type(version) is int and version > FORMAT
        remedy = "upgrade this software" if newer else "fit it again"
        told = type(version).__name__ if isinstance(version, (list, dict)) else shown(version)
        raise ModuleFileError(f"{origin}: format {told} is not one that this version reads (1 to {FORMAT}); {remedy}")
    if set(tensors) not in _tensor_sets(described):
        raise ModuleFileError(f"{origin}: holds tensors {sorted(tensors)}, not those of a module; give a module file")
    claimed = described.pop("checksum", None)
    if not known:
        _require_unaltered(tensors, text, described, claimed, origin)
    whole = {**_IMPLIED.get(version, {}), **described}
    if filed(whole) != described:
        raise ModuleFileError(f"{origin}: its fields are not those of format {version}; restore the original file")
    return tensors, {key: value for key, value in whole.items() if key != "format"}


def _views(data: Memory, header: Mapping[str, Any], start: int) -> dict[str, Tensor]:
    """The tensors of a safetensors ``header``, as views of ``data``: one behind the other, from ``start`` to its end.

    Raises what is UNREADABLE.
    """
    tensors, at = dict[str, Tensor](), 0
    for name, told in sorted(header.items(), key=lambda named: named[1]["data_offsets"]):
        shape = told["shape"]
        if told["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {ascii(name)[:80]} is {shown(told['dtype'])}, not {' or '.join(_DTYPES)}")
        width, read_as, dtype = _DTYPES[told["dtype"]]
        size = width * math.prod(shape)
        if told["data_offsets"] != [at, at + size] or min(shape, default=0) < 0:
            raise ValueError(f"tensor {ascii(name)[:80]} is not where it should be")
        view = np.ndarray(shape, read_as, data, start + at)
        if not view.flags.aligned:  # behind a header of another length than the library's
            view = view.copy()
        tensors[name] = torch.from_numpy(view).view(dtype)  # a third of torch.frombuffer's time
        at += size
    if start + at != len(data):
        raise ValueError("more or fewer bytes than its tensors have")
    return tensors


# By their names in files: bytes of a number, what numpy, which has no bfloat16, reads them as, and what they are.
_DTYPES: Mapping[str, tuple[int, type[np.generic], torch.dtype]] = {
    "F32": (4, np.float32, torch.float32),
    "BF16": (2, np.int16, torch.bfloat16),
}


def _parsed(text: str) -> Any:
    """The metadata of its JSON. Most of that are the partitions, and thousands of modules that were fitted on the same retain rows
    have the same: they are parsed once, and are one in memory.
    """
    before, _, rest = text.partition(_PARTITIONS)
    rows, end, after = rest.partition("}")
    if rows.startswith("{") and _PARTITIONS not in rest:
        with suppress(ValueError):  # where an object is nested in them, or all of it is no JSON: the whole text says so
            described = json.loads(f"{before}{_PARTITIONS}null{after}")
            if isinstance(described, dict) and described.get("partitions", "") is None:  # else not the metadata's own
                described["partitions"] = _rows(rows + end)
                return described
    return json.loads(text)


_PARTITIONS = '"partitions":'  # as it stands in no text within JSON, where quotes are escaped


@lru_cache(maxsize=64)
def _rows(text: str) -> Any:
    found = json.loads(text)
    return RowsByPart(found) if are_whole_numbers(found) else found


def _require_unaltered(
    tensors: Mapping[str, Tensor], text: str, described: Mapping[str, Any], claimed: Any, origin: str
) -> None:
    try:
        canonical = canonical_json({**described, "checksum": claimed}, nan=False, plain=dict)
    except UNREADABLE as error:
        raise ModuleFileError(f"{origin}: a value is not finite or of a wrong type ({error}); fit it again") from error
    # Less its checksum the text is what the checksum is of.
    if canonical != text or claimed != _checksum(tensors, text.replace(f'"checksum":"{claimed}",', "", 1)):
        raise ModuleFileError(
            f"{origin}: altered after it was written (the checksum differs); restore the original file"
        )


def _tensor_sets(described: Mapping[str, Any]) -> list[set[str]]:
    """The sets of tensors that a module of this detector and correction may have; of any, where it does not say."""
    parts = []
    for kinds, kind in ((DETECTORS, described.get("detector")), (CORRECTIONS, described.get("correction"))):
        parts.append([kinds[kind]] if isinstance(kind, str) and kind in kinds else list(kinds.values()))
    return [detector | correction for detector in parts[0] for correction in parts[1]]


def shown(value: Any) -> str:
    """A value as a message shows it; Python does not write out whole numbers of more than 4,300 digits."""
    return "a very large number" if type(value) is int and abs(value) >= 2**63 else repr(value)[:80]
