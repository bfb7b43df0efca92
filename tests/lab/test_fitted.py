"""Modules that a run fits and those that a setting ships: neither stands in for what is another model's or another setting's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.conftest import make_module
from unbind_core.errors import ModelMismatch
from unbind_core.rows import forget_digest
from unbind_lab.filters.unbind import REWRITE
from unbind_lab.setting import Bench, Setting


def test_a_shipped_module_of_another_dtype_is_refused(setting: Setting, tmp_path: Path) -> None:
    bench = Bench(setting)
    module = make_module(bench.full.identity, "one", forget_digest=forget_digest(bench.forget))
    module = replace(module, calibrated={"dtype": "bfloat16", "quantisation": None})
    module.save(tmp_path / "one.safetensors")
    there = Bench(replace(setting, modules={"rewrite": tmp_path / "one.safetensors"}))
    with pytest.raises(ModelMismatch, match="calibrated in bfloat16, and the model runs in float32"):
        REWRITE.build(there, there.forget, {}, tmp_path)
