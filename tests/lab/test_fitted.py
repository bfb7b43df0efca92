"""Modules that a run fits and those that a setting ships: neither stands in for what is another model's or another setting's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.conftest import make_module
from unbind_core.errors import ModelMismatch
from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.options import FitOptions
from unbind_core.module import UnbindModule
from unbind_core.rows import forget_digest
from unbind_lab.filters.unbind import REWRITE, _made_of, fitted
from unbind_lab.setting import Bench, Setting

QUICK = FitOptions(
    gate="paper",
    forms=("plain",),
    quantiles=(0.5,),
    norm_strengths=(1.0,),
    strengths=(),
    budgets=Budgets(kl=9.0, nll=9.0, bleu=1.0),
)


def test_a_fit_is_used_again_only_where_what_it_depends_on_is_the_same(setting: Setting, tmp_path: Path) -> None:
    def made(setting: Setting, options: FitOptions = QUICK) -> UnbindModule:
        bench = Bench(setting)
        return fitted(bench, bench.forget, tmp_path, "one", options)

    first, other = made(setting), replace(setting, seed=1)
    assert made(setting).digest == first.digest and len(list(tmp_path.glob("one-*"))) == 1
    assert made(other).partitions != first.partitions and made(setting).digest == first.digest
    settings = (
        setting,
        replace(setting, retain_training=setting.retain),
        replace(setting, retain_validation=setting.retain),
        replace(setting, forget=setting.forget_validation),
        replace(setting, dtype="bfloat16"),
    )
    benches = [Bench(one) for one in settings]
    names = {_made_of(bench, bench.forget, QUICK) for bench in benches}
    names |= {_made_of(benches[0], benches[0].forget, replace(QUICK, quantiles=(0.25,)))}
    assert len(names) == len(settings) + 1


def test_a_shipped_module_of_another_dtype_is_refused(setting: Setting, tmp_path: Path) -> None:
    bench = Bench(setting)
    module = make_module(bench.full.identity, "one", forget_digest=forget_digest(bench.forget))
    module = replace(module, calibrated={"dtype": "bfloat16", "quantisation": None})
    module.save(tmp_path / "one.safetensors")
    there = Bench(replace(setting, modules={"rewrite": tmp_path / "one.safetensors"}))
    with pytest.raises(ModelMismatch, match="calibrated in bfloat16, and the model runs in float32"):
        REWRITE.build(there, there.forget, {}, tmp_path)
