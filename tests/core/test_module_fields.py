"""Every field of a module file is looked at before a module is made of it: a file may come from anybody."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors

from tests.core.conftest import lowrank, make_module
from tests.core.test_module_file import metadata_of, with_metadata
from unbind_core.errors import ModelMismatch, ModuleFileError
from unbind_core.files import MAX_BYTES
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.module_file import TENSORS

MODEL = ModelIdentity("f" * 64, "tiny", 16, 4)


def sealed(data: bytes, described: Any) -> bytes:
    """A file with this metadata and a checksum that is right for it, as somebody who means to do harm would make it."""
    tensors = load_tensors(data)
    digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in TENSORS if name in tensors))
    digest.update(json.dumps(described, sort_keys=True, separators=(",", ":")).encode())
    return with_metadata(data, described | {"checksum": digest.hexdigest()})


WHOLE = make_module(MODEL).to_bytes()
DESCRIBED = {key: value for key, value in metadata_of(WHOLE).items() if key != "checksum"}
LOWRANK = make_module(MODEL, **lowrank(16)).to_bytes()
SAID = {key: value for key, value in metadata_of(LOWRANK).items() if key != "checksum"}


def test_a_file_sealed_anew_is_read_where_its_fields_are_right() -> None:
    assert UnbindModule.from_bytes(sealed(WHOLE, DESCRIBED)) == make_module(MODEL)
    assert UnbindModule.from_bytes(sealed(WHOLE, DESCRIBED | {"kappa": 7})).kappa == 7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("detector", [1]),
        ("name", None),
        ("name", 5),
        ("layer", True),
        ("layer", 10**400),
        ("s_ref", "0"),
        ("s_ref", 10**400),
        ("tau", False),
        ("kappa", 10**400),
        ("kappa", 1e39),
        ("kappa", None),
        ("quantile", "half"),
        ("quantile", 10**400),
        ("forms", "plain"),
        ("forms", [None]),
        ("partitions", []),
        ("partitions", {"forget_fit": "12"}),
        ("partitions", {"forget_fit": {"a": [1]}}),
        ("partitions", {"forget_fit": [True]}),
        ("partitions", None),
        ("budgets", []),
        ("measured", {"rate": 10**400}),
        ("measured", {"text": "\ud800"}),
        ("settings", {"a": {"b": [[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]}}),
        ("versions", "1"),
        ("forget_digest", 0),
        ("created_at", None),
        ("window", "1"),
        ("window", 1.0),
        ("tau_close", [1]),
        ("model", "tiny"),
        ("surprise", 1),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_a_field_of_a_wrong_type_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(ModuleFileError, match=f"metadata field {field} "):
        UnbindModule.from_bytes(sealed(WHOLE, DESCRIBED | {field: value}))


@pytest.mark.parametrize("field", sorted(DESCRIBED.keys() - {"format", "detector", "window", "tau_close"}))
def test_a_field_that_is_missing_is_named(field: str) -> None:
    with pytest.raises(ModuleFileError, match=f"metadata field {field} is missing"):
        UnbindModule.from_bytes(sealed(WHOLE, {key: value for key, value in DESCRIBED.items() if key != field}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("correction", 1),
        ("policy", None),
        ("calibrated", None),
        ("calibrated", {"dtype": [], "quantisation": None}),
        ("calibrated", {"dtype": "float32", "quantisation": "\ud800"}),
        ("calibrated", {"dtype": "float32", "quantisation": None, "more": 1}),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_a_correction_of_a_wrong_type_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    with pytest.raises(ModuleFileError, match=f"metadata field {field} must be"):
        UnbindModule.from_bytes(sealed(LOWRANK, SAID | {field: value}))


@pytest.mark.parametrize("field", ["correction", "policy", "calibrated"])
def test_the_second_format_says_what_the_first_implies(field: str) -> None:
    with pytest.raises(ModuleFileError, match=f"metadata field {field} is missing"):
        UnbindModule.from_bytes(sealed(LOWRANK, {key: value for key, value in SAID.items() if key != field}))


@pytest.mark.parametrize(
    ("data", "described"),
    [
        (WHOLE, DESCRIBED | {"correction": "push"}),
        (WHOLE, DESCRIBED | {"policy": "rewrite"}),
        (WHOLE, make_module(MODEL).describe() | {"format": 2}),
        (LOWRANK, SAID | {"format": 1}),
    ],
)
def test_one_module_has_one_way_of_being_written(data: bytes, described: dict[str, Any]) -> None:
    with pytest.raises(ModuleFileError, match=r"its fields are not those of format [12]"):
        UnbindModule.from_bytes(sealed(data, described))


@pytest.mark.parametrize(
    ("field", "value"), [("fingerprint", 1), ("name", None), ("hidden_size", 16.0), ("num_layers", -1)]
)
def test_a_model_of_wrong_types_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    with pytest.raises(ModuleFileError, match=rf"metadata field model\.{field} must be"):
        UnbindModule.from_bytes(sealed(WHOLE, DESCRIBED | {"model": DESCRIBED["model"] | {field: value}}))


def test_a_file_that_claims_other_sizes_for_the_model_is_refused(tmp_path: Path) -> None:
    make_module(MODEL).save(tmp_path / "a.safetensors")
    with pytest.raises(ModelMismatch, match="16 wide with 4 layers; it is 8 wide"):
        UnbindModule.load(tmp_path / "a.safetensors", dataclasses.replace(MODEL, hidden_size=8))


def test_what_is_no_regular_file_or_too_large_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with (tmp_path / "huge.safetensors").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    for name, reason in (("pipe", "not a regular file"), ("folder", "not a regular file"), ("huge", "larger than")):
        with pytest.raises(ModuleFileError, match=reason):
            UnbindModule.load(tmp_path / f"{name}.safetensors")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**310) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(WHOLE, DESCRIBED), (LOWRANK, SAID)]),
    st.dictionaries(st.sampled_from(sorted(SAID)) | st.text(max_size=8), JSON, min_size=1, max_size=3),
)
def test_any_metadata_gives_a_module_that_works_or_a_refusal(
    file: tuple[bytes, dict[str, Any]], changes: dict[str, Any]
) -> None:
    try:
        module = UnbindModule.from_bytes(sealed(file[0], file[1] | changes))
    except ModuleFileError:
        return
    again = UnbindModule.from_bytes(module.to_bytes())
    assert again == module and math.isfinite(float(torch.tensor(module.kappa)))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=8), JSON, max_size=3) | JSON, st.binary(max_size=64))
def test_any_header_gives_a_refusal(header: Any, rest: bytes) -> None:
    text = json.dumps(header).encode()
    for start in (len(text).to_bytes(8, "little"), (2**63).to_bytes(8, "little")):
        with pytest.raises(ModuleFileError):
            UnbindModule.from_bytes(start + text + rest)


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000])
def test_metadata_that_is_nested_without_end_is_refused(deep: str) -> None:
    with pytest.raises(ModuleFileError, match="not JSON"):
        UnbindModule.from_bytes(with_metadata(WHOLE, deep))
    header = deep.encode()
    with pytest.raises(ModuleFileError, match="truncated"):
        UnbindModule.from_bytes(len(header).to_bytes(8, "little") + header)
