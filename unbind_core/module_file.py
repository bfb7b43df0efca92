"""A module's bytes: safetensors with one metadata key, ``unbind``, that holds canonical JSON and a checksum over everything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from unbind_core.canonical import canonical_json
from unbind_core.errors import ModuleFileError

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


def read(data: bytes, origin: str, known: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a whole, unaltered file of this format; raises ModuleFileError, beginning with ``origin``.

    ``known``: the bytes are those of a file that was read before, so that its own checksum, a quarter of the work, is not asked.
    """
    try:
        tensors = load_tensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header.get("__metadata__") or {}
    except UNREADABLE as error:
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


def _parsed(text: str) -> Any:
    """The metadata of its JSON. Most of that are the partitions, and thousands of modules that were fitted on the same retain rows
    have the same: they are parsed once, and are one in memory, with tuples in place of lists.
    """
    before, _, rest = text.partition(_PARTITIONS)
    rows, end, after = rest.partition("}")
    if rows.startswith("{") and _PARTITIONS not in rest:
        with suppress(ValueError):  # where an object is nested in them, or all of it is no JSON: the whole text says so
            described = json.loads(f"{before}{_PARTITIONS}null{after}")
            if isinstance(described, dict) and described.get("partitions", "") is None:  # else not the metadata's own
                return {**described, "partitions": _rows(rows + end)}
    return json.loads(text)


_PARTITIONS = '"partitions":'  # as it stands in no text within JSON, where quotes are escaped


@lru_cache(maxsize=64)
def _rows(text: str) -> Any:
    found = json.loads(text)
    if not isinstance(found, dict):
        return found
    return {key: tuple(rows) if isinstance(rows, list) else rows for key, rows in found.items()}


def _require_unaltered(
    tensors: Mapping[str, Tensor], text: str, described: Mapping[str, Any], claimed: Any, origin: str
) -> None:
    try:
        canonical = canonical_json({**described, "checksum": claimed}, nan=False)
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
