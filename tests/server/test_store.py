"""Module files on disk: picked up, replaced, skipped with a reason, never fatal."""

from __future__ import annotations

from pathlib import Path

from server.registry.store import ModuleStore
from tests.core.conftest import save_checkpoint
from tests.server.conftest import MakeModule, build_module
from unbind_core.architecture import LoadedModel, load_model


def test_files_are_picked_up_replaced_and_dropped(tmp_path: Path, loaded: LoadedModel, make_module: MakeModule) -> None:
    shipped, published = tmp_path / "shipped", tmp_path / "published"
    store = ModuleStore([shipped, published], loaded.identity)
    assert store.scan().modules == {}  # folders need not exist
    first, second = make_module("one"), make_module("one", seed=9)
    first.save(shipped / "one.safetensors")
    assert store.scan().modules["one"].digest == first.digest
    second.save(published / "one.safetensors")
    assert store.scan().modules["one"].digest == second.digest  # the later folder wins
    (published / "one.safetensors").unlink()
    assert store.scan().modules["one"].digest == first.digest
    second.save(shipped / "one.safetensors")
    assert store.scan().modules["one"].digest == second.digest


def test_damaged_and_foreign_files_are_reported_by_name_and_reason(
    tmp_path: Path, loaded: LoadedModel, make_module: MakeModule
) -> None:
    make_module("good").save(tmp_path / "good.safetensors")
    whole = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-10])
    (tmp_path / "text.safetensors").write_text("not a module")
    (tmp_path / "ignored.txt").write_text("not even named like one")
    other = load_model(save_checkpoint("qwen2", tmp_path / "other", seed=3))
    build_module(other.identity, "foreign").save(tmp_path / "foreign.safetensors")
    scan = ModuleStore([tmp_path], loaded.identity).scan()
    assert list(scan.modules) == ["good"]
    assert sorted(Path(file).name for file in scan.problems) == [
        "cut.safetensors",
        "foreign.safetensors",
        "text.safetensors",
    ]
    assert all(len(reason) > 20 for reason in scan.problems.values())
