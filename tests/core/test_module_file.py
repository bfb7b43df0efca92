"""A module file is whole and unaltered, or refused with the reason."""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from tests.core.conftest import lowrank, make_module, make_network_module
from tests.core.test_module import (
    MODEL,
)
from tests.support.modules import rectified
from unbind_core.errors import ModuleFileError
from unbind_core.module import UnbindModule
from unbind_core.partitions import PARTITIONS


def metadata_of(data: bytes) -> dict[str, Any]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["unbind"])


def with_metadata(data: bytes, described: dict[str, Any] | str) -> bytes:
    text = described if isinstance(described, str) else json.dumps(described, sort_keys=True, separators=(",", ":"))
    return save_tensors(load_tensors(data), metadata={"unbind": text})


@pytest.mark.parametrize("correction", [{}, lowrank(16), rectified(16)], ids=["push", "lowrank", "network"])
def test_a_network_file_that_was_damaged_or_lost_a_tensor_is_refused(correction: dict[str, Any]) -> None:
    data = make_network_module(MODEL, **correction).to_bytes()
    tensors, text = load_tensors(data), json.dumps(metadata_of(data), sort_keys=True, separators=(",", ":"))
    for name in tensors:
        fewer = {key: part for key, part in tensors.items() if key != name}
        with pytest.raises(ModuleFileError, match="holds tensors"):
            UnbindModule.from_bytes(save_tensors(fewer, metadata={"unbind": text}))
        changed = tensors | {name: tensors[name] + 1}
        with pytest.raises(ModuleFileError, match="altered"):
            UnbindModule.from_bytes(save_tensors(changed, metadata={"unbind": text}))
    with pytest.raises(ModuleFileError, match="holds tensors"):
        UnbindModule.from_bytes(with_metadata(data, metadata_of(data) | {"detector": "fisher"}))
    for position in random.Random(4).sample(range(len(data)), 100):
        damaged = bytearray(data)
        damaged[position] ^= 0x01
        with pytest.raises(ModuleFileError):
            UnbindModule.from_bytes(bytes(damaged))


def test_the_metadata_is_one_canonical_json_string_with_the_documented_fields() -> None:
    data = make_module(MODEL).to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header["__metadata__"]) == ["unbind"]
    described = metadata_of(data)
    wanted = (
        "format name layer s_ref tau kappa quantile model partitions budgets measured forget_digest created_at versions"
    )
    assert set(wanted.split()) <= set(described)
    assert set(described["model"]) == {"fingerprint", "name", "hidden_size", "num_layers"}
    assert set(described["partitions"]) == set(PARTITIONS)


def test_a_file_without_a_certificate_part_loads_and_keeps_its_bytes() -> None:
    parts = {part: rows for part, rows in make_module(MODEL).partitions.items() if part != "retain_certificate"}
    data = replace(make_module(MODEL), partitions=parts).to_bytes()
    assert "retain_certificate" not in metadata_of(data)["partitions"]
    again = UnbindModule.from_bytes(data)
    assert again.to_bytes() == data


def test_modules_of_the_same_rows_have_these_once_in_memory() -> None:
    one, two = (UnbindModule.from_bytes(make_module(MODEL, name=name).to_bytes()) for name in ("one", "two"))
    assert all(rows is two.partitions[part] for part, rows in one.partitions.items())
    other = replace(make_module(MODEL), partitions={**one.partitions, "retain_certificate": (99,)})
    assert UnbindModule.from_bytes(other.to_bytes()).partitions["retain_certificate"] == (99,)


@pytest.mark.parametrize(
    "settings",
    [
        {"partitions": {"forget_fit": [9]}},
        {"partitions": None},
        {"a": {"partitions": {}}, "told": '"partitions":{"forget_fit":[9]}'},
        {"told": '"partitions":'},
    ],
)
def test_partitions_are_the_metadata_s_own_whatever_else_is_called_so(settings: dict[str, Any]) -> None:
    module, plain = (
        replace(make_module(MODEL), settings=settings),
        UnbindModule.from_bytes(make_module(MODEL).to_bytes()),
    )
    for digest in (None, module.digest):
        again = UnbindModule.from_bytes(module.to_bytes(), digest=digest)
        assert (again.partitions, again.settings) == (plain.partitions, settings)


def test_a_truncated_file_is_refused_at_every_length() -> None:
    data = make_module(MODEL).to_bytes()
    lengths = {0, 1, 7, 8, 9, len(data) - 1, *random.Random(0).sample(range(len(data)), 200)}
    for length in lengths:
        with pytest.raises(ModuleFileError, match="truncated"):
            UnbindModule.from_bytes(data[:length])


def test_any_flipped_byte_is_refused() -> None:
    data = make_module(MODEL).to_bytes()
    for position in random.Random(1).sample(range(len(data)), 300):
        damaged = bytearray(data)
        damaged[position] ^= 0x01
        if bytes(damaged) != data:
            with pytest.raises(ModuleFileError):
                UnbindModule.from_bytes(bytes(damaged))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (random.Random(2).randbytes(4096), "truncated"),
        (b"PK\x03\x04 not ours", "truncated"),
        (save_tensors({"w": torch.ones(16), "v": torch.ones(16)}), "not a module"),
        (save_tensors({"w": torch.ones(16)}, metadata={"format": "pt"}), "not a module"),
        (save_tensors({"w": torch.ones(16)}, metadata={"unbind": "{}", "more": "x"}), "not a module"),
        (save_tensors({"w": torch.ones(16)}, metadata={"unbind": "{"}), "not JSON"),
        (save_tensors({"w": torch.ones(16)}, metadata={"unbind": "[]"}), "not an object"),
        (save_tensors({"w": torch.ones(16)}, metadata={"unbind": "{}"}), "format None"),
        (save_tensors({"w": torch.ones(16)}, metadata={"unbind": '{"format":1}'}), "holds tensors"),
    ],
)
def test_a_foreign_file_is_refused_and_told_what_it_is(data: bytes, reason: str) -> None:
    with pytest.raises(ModuleFileError, match=reason):
        UnbindModule.from_bytes(data)


@pytest.mark.parametrize(
    ("field", "value"), [("kappa", 0.0), ("tau", 1e9), ("layer", 2), ("name", "other"), ("checksum", "0" * 64)]
)
def test_an_edited_value_is_refused(field: str, value: Any) -> None:
    data = make_module(MODEL).to_bytes()
    with pytest.raises(ModuleFileError, match="altered"):
        UnbindModule.from_bytes(with_metadata(data, metadata_of(data) | {field: value}))


def test_metadata_in_another_spelling_is_refused() -> None:
    data = make_module(MODEL).to_bytes()
    with pytest.raises(ModuleFileError, match="altered"):
        UnbindModule.from_bytes(with_metadata(data, json.dumps(metadata_of(data), indent=1)))


def test_exchanged_tensors_are_refused() -> None:
    data = make_module(MODEL).to_bytes()
    tensors = load_tensors(data)
    text = json.dumps(metadata_of(data), sort_keys=True, separators=(",", ":"))
    with pytest.raises(ModuleFileError, match="altered"):
        UnbindModule.from_bytes(save_tensors({"w": tensors["v"], "v": tensors["w"]}, metadata={"unbind": text}))


def test_with_a_digest_held_against_a_known_one_fields_and_tensors_are_still_looked_at() -> None:
    data = make_module(MODEL).to_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert UnbindModule.from_bytes(data, digest=digest) == UnbindModule.from_bytes(data)
    for field, value in (("tau", math.inf), ("layer", 99), ("kappa", "1")):
        with pytest.raises(ModuleFileError, match=field):
            UnbindModule.from_bytes(with_metadata(data, metadata_of(data) | {field: value}), digest=digest)
    tensors, text = load_tensors(data), json.dumps(metadata_of(data))
    for spoilt in (tensors["w"] * torch.nan, tensors["w"] * 0):
        with pytest.raises(ModuleFileError, match="must be finite and not all zero"):
            UnbindModule.from_bytes(save_tensors(tensors | {"w": spoilt}, metadata={"unbind": text}), digest=digest)
    far = tensors | {"w": tensors["w"] * 1e30}  # finite, though its square is not
    UnbindModule.from_bytes(save_tensors(far, metadata={"unbind": text}), digest=digest)


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({}, 1),
        (lowrank(16), 2),
        ({"hold": 9}, 3),
        ({"hold": 9, **lowrank(16)}, 3),
        (rectified(16), 4),
        ({"hold": 9, **rectified(16)}, 4),
    ],
)
def test_a_module_is_written_in_the_first_format_that_says_it_all(changes: dict[str, Any], version: int) -> None:
    module = make_network_module(MODEL, **changes)
    data = module.to_bytes()
    described = metadata_of(data)
    assert described["format"] == version and ("hold" in described) == (version >= 3)
    again = UnbindModule.from_bytes(data)
    assert again == module and again.hold == changes.get("hold")
    if version > 1:
        other = with_metadata(data, described | {"format": version - 1})
        with pytest.raises(ModuleFileError, match=f"not those of format {version - 1}"):
            UnbindModule.from_bytes(other, digest=hashlib.sha256(other).hexdigest())


def test_a_later_format_asks_for_an_upgrade() -> None:
    data = make_module(MODEL).to_bytes()
    with pytest.raises(ModuleFileError, match=r"format 5 .* upgrade"):
        UnbindModule.from_bytes(with_metadata(data, metadata_of(data) | {"format": 5}))


def test_not_a_number_in_the_file_is_refused() -> None:
    data = make_module(MODEL).to_bytes()
    with pytest.raises(ModuleFileError, match="not finite"):
        UnbindModule.from_bytes(with_metadata(data, metadata_of(data) | {"tau": math.nan}))


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ModuleFileError, match="nowhere"):
        UnbindModule.load(tmp_path / "nowhere.safetensors")


def test_a_module_lies_in_the_memory_that_it_was_read_from_and_leaves_bytes_of_others_alone() -> None:
    data = make_network_module(MODEL).to_bytes()
    memory = bytearray(data)
    module = UnbindModule.from_bytes(memory, digest=hashlib.sha256(data).hexdigest())
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert all(start < part.data_ptr() < start + len(memory) for part in module.tensors.values())
    assert module.to_bytes() == data
    other = UnbindModule.from_bytes(data)
    other.w.zero_()
    assert UnbindModule.from_bytes(data).to_bytes() == data


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def with_header(header: Any, rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_offsets", [0, 64]),  # where another tensor lies
        ("data_offsets", [68, 132]),
        ("data_offsets", [64, 124]),
        ("data_offsets", [-64, 0]),
        ("data_offsets", [64]),
        ("data_offsets", None),
        ("shape", [4, 3]),
        ("shape", [-4, -4]),
        ("shape", [16.0]),
        ("shape", ["16"]),
        ("shape", 16),
        ("dtype", "I32"),
        ("dtype", "F16"),
        ("dtype", None),
    ],
)
def test_a_header_whose_tensors_lie_elsewhere_is_refused_whatever_its_digest(field: str, value: Any) -> None:
    data = make_module(MODEL).to_bytes()
    header, rest = header_of(data)
    assert UnbindModule.from_bytes(with_header(header, rest), digest="0" * 64) == UnbindModule.from_bytes(
        data, digest="0" * 64
    )
    name = max(header.keys() - {"__metadata__"}, key=lambda one: header[one]["data_offsets"])
    header[name] = header[name] | {field: value}
    for digest in (None, "0" * 64):
        with pytest.raises(ModuleFileError, match="truncated, or not a safetensors file"):
            UnbindModule.from_bytes(with_header(header, rest), digest=digest)


@pytest.mark.parametrize("more", [b"", b"0000", b"\0" * 64])
def test_bytes_that_no_tensor_has_are_refused_whatever_their_digest(more: bytes) -> None:
    data = make_module(MODEL).to_bytes()
    changed = data + more if more else data[:-4]
    for digest in (None, hashlib.sha256(changed).hexdigest()):
        with pytest.raises(ModuleFileError, match="truncated"):
            UnbindModule.from_bytes(changed, digest=digest)


@pytest.mark.parametrize("header", [[], "text", 7, None, {"__metadata__": []}, {"w": None}, {"w": {}}])
def test_a_header_of_another_kind_is_refused_whatever_its_digest(header: Any) -> None:
    with pytest.raises(ModuleFileError):
        UnbindModule.from_bytes(with_header(header, b""), digest="0" * 64)
