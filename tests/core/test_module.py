"""The module file: what is written comes back, and nothing else is ever taken for a module."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.conftest import lowrank, make_module, make_network_module
from tests.support.modules import rectified
from unbind_core.errors import ModelMismatch, ModuleFileError
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.module_checks import MAX_GATE_WINDOW

MODEL = ModelIdentity("f" * 64, "tiny", 16, 4)


def test_a_saved_module_comes_back_as_it_was(tmp_path: Path) -> None:
    module = make_module(MODEL)
    digest = module.save(tmp_path / "a.safetensors")
    again = UnbindModule.load(tmp_path / "a.safetensors", MODEL)
    assert again == module and hash(again) == hash(module)
    assert again.digest == module.digest == digest
    assert torch.equal(again.w, module.w) and torch.equal(again.v, module.v)
    assert (again.s_ref, again.tau, again.kappa, again.quantile) == (module.s_ref, module.tau, module.kappa, 0.5)
    assert again.partitions["forget_fit"] == (0, 2) and again.partitions["forget_validation"] == ()
    assert again.model == MODEL and again.forms == ("plain", "fim")


@pytest.mark.parametrize("changes", [{}, {"window": 1, "tau_close": None, "heads": 1, "width": 1}, {"tau_close": 0.0}])
def test_a_network_comes_back_as_it_was(tmp_path: Path, changes: dict[str, Any]) -> None:
    module = make_network_module(MODEL, **changes)
    digest = module.save(tmp_path / "a.safetensors")
    again = UnbindModule.load(tmp_path / "a.safetensors", MODEL)
    assert again == module and again.digest == module.digest == digest
    assert set(again.tensors) == {"w", "b", "heads", "heads_b", "v"}
    assert all(torch.equal(part, module.tensors[name]) for name, part in again.tensors.items())
    assert (again.detector, again.window, again.tau_close) == ("network", module.window, module.tau_close)
    assert again.to_bytes() == module.to_bytes() == make_network_module(MODEL, **changes).to_bytes()
    assert again.renamed("b").window == module.window


CALIBRATED = {"dtype": "bfloat16", "quantisation": None}


@pytest.mark.parametrize("make", [make_module, make_network_module])
@pytest.mark.parametrize(
    ("correction", "kind", "rank", "version"),
    [
        *((lowrank, "lowrank", rank, 2) for rank in (1, 5, 256)),
        *((rectified, "network", units, 4) for units in (1, 5, 1024)),
    ],
)
def test_a_learned_correction_comes_back_as_it_was(
    tmp_path: Path, make: Any, correction: Any, kind: str, rank: int, version: int
) -> None:
    module = make(MODEL, **correction(16, rank), calibrated=CALIBRATED)
    digest = module.save(tmp_path / "a.safetensors")
    again = UnbindModule.load(tmp_path / "a.safetensors", MODEL)
    assert again == module and again.digest == module.digest == digest
    assert again.tensors.keys() == module.tensors.keys() and "v" not in again.tensors
    assert all(torch.equal(part, module.tensors[name]) for name, part in again.tensors.items())
    assert (again.correction, again.rank, again.policy, again.calibrated) == (kind, rank, "rewrite", CALIBRATED)
    assert again.to_bytes() == module.to_bytes() and again.describe() == module.describe() | {"format": version}


@pytest.mark.parametrize(
    "changes", [{"policy": "rewrite"}, {"calibrated": {"dtype": "float32", "quantisation": "gptq"}}]
)
def test_a_push_that_says_more_than_the_first_format_can_comes_back_as_it_was(changes: dict[str, Any]) -> None:
    module = make_module(MODEL, **changes)
    again = UnbindModule.from_bytes(module.to_bytes())
    assert again == module and again.describe() == module.describe() | {"format": 2}


def test_files_of_the_first_format_keep_their_digest_and_mean_a_silent_push() -> None:
    files = sorted(Path("modules").glob("demo-a*.safetensors"))
    assert files
    for path in files:
        data = path.read_bytes()
        module = UnbindModule.load(path)
        if module.describe()["format"] == 1:
            assert (module.correction, module.rank, module.policy) == ("push", 0, "silent")
            assert module.calibrated == {"dtype": "float32", "quantisation": None}
        assert module.to_bytes() == data and module.digest == hashlib.sha256(data).hexdigest()
    plain = make_module(MODEL)
    assert plain.describe()["format"] == 1 and b"correction" not in plain.to_bytes()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"correction": "rotate"}, "correction"),
        ({"correction": "push"}, "correction"),
        ({"v": torch.ones(16) / 4}, "correction"),
        ({"c": None}, "correction"),
        ({"heads": torch.ones(1, 1)}, "detector"),
        ({"u": torch.ones(15, 3)}, "u"),
        ({"u": torch.ones(16, 2)}, "a"),
        ({"u": torch.ones(16)}, "u"),
        ({"u": torch.ones(16, 0), "a": torch.ones(0, 16)}, "u"),
        ({"u": torch.ones(16, 257), "a": torch.ones(257, 16)}, "u"),
        ({"u": torch.full((16, 3), math.nan)}, "u"),
        ({"u": torch.ones(16, 3, dtype=torch.float64)}, "u"),
        ({"a": torch.ones(16, 3)}, "a"),
        ({"a": torch.full((3, 16), math.inf)}, "a"),
        ({"c": torch.ones(15)}, "c"),
        ({"c": torch.full((16,), -math.inf)}, "c"),
        ({"c": torch.zeros(16), "u": torch.zeros(16, 3)}, "c"),
        ({"policy": "loud"}, "policy"),
        ({"calibrated": {"dtype": "float32"}}, "calibrated"),
        ({"calibrated": {"dtype": "int3", "quantisation": None}}, "calibrated"),
        ({"calibrated": {"dtype": "float32", "quantisation": 4}}, "calibrated"),
    ],
)
def test_a_correction_that_cannot_be_applied_is_refused_by_the_fields_name(changes: dict[str, Any], field: str) -> None:
    whole = make_module(MODEL, **lowrank(16))
    with pytest.raises(ModuleFileError, match=f"module '.*': {field} "):
        dataclasses.replace(whole, **changes)
    assert dataclasses.replace(whole, c=torch.zeros(16)).rank == 3  # one of the two may be zero
    assert dataclasses.replace(whole, u=torch.zeros(16, 3)).rank == 3
    network = make_module(MODEL, **rectified(16))
    for spoilt in ({"e": torch.zeros(4)}, {"e": torch.full((3,), math.nan)}, {"e": None}):
        with pytest.raises(
            ModuleFileError, match=r"module '.*': (e |correction 'network' needs the tensors a, c, e, u)"
        ):
            dataclasses.replace(network, **spoilt)


@pytest.mark.parametrize(
    ("running", "said"),
    [
        (
            {"dtype": "float32", "quantisation": None},
            "calibrated in bfloat16, and the model runs in float32; run the model with --dtype bfloat16",
        ),
        (
            {"dtype": "bfloat16", "quantisation": "gptq"},
            "runs in bfloat16 with gptq weights; take the model that it was fitted on",
        ),
    ],
)
def test_other_numerics_than_a_module_was_calibrated_in_are_refused(running: dict[str, Any], said: str) -> None:
    module = make_module(MODEL, calibrated=CALIBRATED)
    module.require_numerics(CALIBRATED)
    with pytest.raises(ModelMismatch, match=f"module 'a' .*{said}, or fit the forget set again"):
        module.require_numerics(running)


def test_only_a_network_has_a_network() -> None:
    assert len(make_network_module(MODEL).network) == 3
    with pytest.raises(ModuleFileError, match="'fisher' has no network"):
        _ = make_module(MODEL).network


def test_every_number_survives_to_the_last_bit(tmp_path: Path) -> None:
    module = make_module(MODEL, s_ref=-1 / 3, tau=math.nextafter(0.1, 1), kappa=1e-300, quantile=None)
    module.save(tmp_path / "a.safetensors")
    again = UnbindModule.load(tmp_path / "a.safetensors")
    assert (again.s_ref, again.tau, again.kappa, again.quantile) == (-1 / 3, math.nextafter(0.1, 1), 1e-300, None)


def test_the_same_module_gives_the_same_bytes(tmp_path: Path) -> None:
    first = make_module(MODEL, settings={"b": 1, "a": 2}, measured={})
    second = make_module(MODEL, settings={"a": 2, "b": 1}, measured={})
    assert first.to_bytes() == second.to_bytes()
    first.save(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == second.to_bytes()
    assert UnbindModule.from_bytes(first.to_bytes()).to_bytes() == first.to_bytes()


def test_another_name_is_another_digest() -> None:
    module = make_module(MODEL)
    assert module.renamed("b").name == "b"
    assert module.renamed("b").digest != module.digest
    assert module.renamed("a") == module


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "a b"}, "name"),
        ({"name": "../a"}, "name"),
        ({"layer": 4}, "layer"),
        ({"layer": -1}, "layer"),
        ({"w": torch.full((16,), math.nan)}, "w"),
        ({"w": torch.full((16,), math.inf)}, "w"),
        ({"w": torch.zeros(16)}, "w"),
        ({"w": torch.ones(15)}, "w"),
        ({"w": torch.ones(16, dtype=torch.float64)}, "w"),
        ({"v": torch.ones(16)}, "v"),
        ({"s_ref": math.inf}, "s_ref"),
        ({"tau": -0.1}, "tau"),
        ({"tau": math.nan}, "tau"),
        ({"kappa": -1.0}, "kappa"),
        ({"kappa": math.inf}, "kappa"),
        ({"kappa": "4"}, "kappa"),
        ({"quantile": 1.5}, "quantile"),
        ({"detector": "network"}, "detector"),
        ({"window": 16}, "window"),
        ({"tau_close": 0.0}, "tau_close"),
        ({"hold": 8}, "hold"),
        ({"partitions": {"test": (1,)}}, "partitions"),
        ({"partitions": {"forget_fit": (1,), "forget_validation": (1,)}}, "partitions"),
        ({"partitions": {"retain_fit": (-1,)}}, "partitions"),
    ],
)
def test_a_value_that_cannot_be_applied_is_refused_by_its_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModuleFileError, match=f"module '.*': {field} "):
        make_module(MODEL, **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"detector": "fisher"}, "detector"),
        ({"detector": "forest"}, "detector"),
        ({"b": None}, "detector"),
        ({"heads": None, "heads_b": None}, "detector"),
        ({"w": torch.ones(6, 15)}, "w"),
        ({"w": torch.ones(5, 16)}, "w"),
        ({"w": torch.ones(16)}, "w"),
        ({"w": torch.zeros(6, 16)}, "w"),
        ({"b": torch.ones(6, 1)}, "b"),
        ({"b": torch.full((6,), math.nan)}, "b"),
        ({"heads": torch.ones(3, 5)}, "heads"),
        ({"heads": torch.full((3, 6), math.inf)}, "heads"),
        ({"heads": torch.ones(3, 6, dtype=torch.float16)}, "heads"),
        ({"heads": torch.ones(0, 6), "heads_b": torch.ones(0)}, "heads"),
        ({"w": torch.ones(0, 16), "b": torch.ones(0), "heads": torch.ones(3, 0)}, "w"),
        ({"heads_b": torch.ones(3, 1)}, "heads_b"),
        ({"heads_b": torch.full((3,), math.inf)}, "heads_b"),
        ({"v": torch.ones(16)}, "v"),
        ({"window": 0}, "window"),
        ({"window": MAX_GATE_WINDOW + 1}, "window"),
        ({"window": 4.0}, "window"),
        ({"window": True}, "window"),
        ({"hold": 4}, "hold"),
        ({"hold": MAX_GATE_WINDOW + 1}, "hold"),
        ({"hold": 8.0}, "hold"),
        ({"tau": 0.0, "tau_close": None}, "tau"),
        ({"tau": math.nan}, "tau"),
        ({"tau": math.inf}, "tau"),
        ({"tau": "1"}, "tau"),
        ({"s_ref": math.nan}, "s_ref"),
        ({"tau_close": -0.1}, "tau_close"),
        ({"tau_close": 1.5}, "tau_close"),
        ({"tau_close": math.nan}, "tau_close"),
        ({"tau_close": "low"}, "tau_close"),
        ({"kappa": -1.0}, "kappa"),
    ],
)
def test_a_network_that_cannot_be_applied_is_refused_by_the_fields_name(changes: dict[str, Any], field: str) -> None:
    whole = make_network_module(MODEL)
    with pytest.raises(ModuleFileError, match=f"module '.*': {field} "):
        dataclasses.replace(whole, **changes)
    assert (
        dataclasses.replace(whole, b=torch.zeros(6), heads_b=torch.zeros(3)).layer == whole.layer
    )  # these may be zero


def test_a_module_under_another_key_is_the_same_module() -> None:
    module = make_module(MODEL)
    other = module.known_as("m7")
    assert (other.name, module.name) == ("m7", "a") and other.digest == module.digest and other.w is module.w


def test_metadata_that_is_not_json_is_refused_on_saving(tmp_path: Path) -> None:
    with pytest.raises(ModuleFileError, match="not JSON"):
        make_module(MODEL, measured={"x": math.nan}).save(tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_module_of_another_model_is_refused(tmp_path: Path) -> None:
    make_module(MODEL).save(tmp_path / "a.safetensors")
    other = ModelIdentity("e" * 64, "other", 16, 4)
    with pytest.raises(ModelMismatch, match=r"'tiny'.*'other'.*fit the forget set again.*where a takedown there made"):
        UnbindModule.load(tmp_path / "a.safetensors", other)


def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    digest = make_module(MODEL).save(path)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        make_module(MODEL, kappa=9.0).save(path)
    assert UnbindModule.load(path).digest == digest
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]
