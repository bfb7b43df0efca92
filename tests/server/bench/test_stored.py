"""The benchmark of many stored takedowns: what it stores is what servers load, and a start on it is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.bench.many import FITTED
from server.bench.stored.place import fill
from server.bench.stored.start import stored_figures
from server.guarding import guard_secret
from server.guards import GuardStore
from server.registry.objects import ObjectStore
from server.registry.registry import open_registry
from server.registry.store import ModuleStore
from server.settings import Settings
from unbind_core.module import UnbindModule
from unbind_core.progress import silent


def test_what_is_stored_is_loaded_where_it_is_in_force_and_left_alone_elsewhere(tmp_path: Path) -> None:
    settings = Settings.model_validate({"data_dir": tmp_path / "data", "modules_dir": tmp_path})
    one_more = fill(settings, 5, 3, 2, silent)
    registry, objects = open_registry(settings), ObjectStore(settings.published_store)
    identity = UnbindModule.load(FITTED).model
    scan = ModuleStore(settings.modules_dir, objects, registry.modules, identity).scan()
    assert scan.problems == {} and scan.enforced(["global"]) == ["bench00000", "bench00001", "bench00002"]
    calibrated = {record["name"] for record in registry.modules.versions() if record["state"] == "calibrated"}
    assert calibrated == {"bench00003", "bench00004", one_more}
    assert len(list((Path(settings.published_store) / "objects").iterdir())) == 6 + 2
    guards = GuardStore(objects, registry.modules, guard_secret(settings)).scan()
    assert guards.problems == {} and guards.enforced(["global"]) == ["guard00000", "guard00001"]
    assert all(registry.modules.get(name)["too_short"] == 0 for name in guards.book.names)
    assert registry.audit_problems() == []
    registry.close()


@pytest.mark.slow
def test_a_start_is_measured_beside_one_of_nothing() -> None:
    figures = stored_figures(
        {"max_slots": 1, "max_model_len": 64},
        modules=4,
        in_force=3,
        guards=1,
        repeats=1,
        idle=0.5,
        folder=None,
        progress=silent,
    )
    (bare,), (start,) = figures["bare"], figures["starts"]
    assert bare["loaded"] == 0 and start["loaded"] == 3 and start["from_disk"]
    assert start["seconds"] > 0 and len(start["answer_seconds"]) == 3 and start["one_more_seconds"] > 0
    assert start["resident_bytes"] > 10**8 and figures["read_alone_ms"] > 0
