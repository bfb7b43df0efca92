"""Unbind: the modules that a setting names, as shipped, and the fit of the paper to the letter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.errors import UnbindError
from unbind_core.fitting.fit import fit
from unbind_core.fitting.options import FitOptions
from unbind_core.module import UnbindModule
from unbind_core.rows import ForgetRow, forget_digest
from unbind_lab.filters.filter import Filter, Options
from unbind_lab.served import Served
from unbind_lab.setting import Bench


def _shipped(name: str) -> Filter:
    def build(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
        path = bench.setting.modules.get(name)
        if path is None:
            raise UnbindError(
                f"setting: 'modules.{name}' is missing; name the module's file, or leave unbind-{name} out"
            )
        module = UnbindModule.load(path)
        if module.forget_digest != forget_digest(rows):
            raise UnbindError(f"setting: 'modules.{name}' was fitted on other rows than 'forget'; fit one on those")
        module.require(bench.full.identity)
        return served(bench, module)

    return Filter(f"unbind-{name}", build, module=name)


def strict(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """The published fit and nothing else, over all layers; where it finds nothing its module changes nothing."""
    full = bench.full
    path = folder / f"strict-{full.identity.fingerprint[:16]}-{forget_digest(rows)[:16]}.safetensors"
    if not path.is_file():
        module, _ = fit(
            full.model,
            full.tokenizer,
            rows,
            bench.retain_training,
            name="strict",
            retain_calibration=bench.retain_validation,
            identity=full.identity,
            options=FitOptions(gate="paper-strict", seed=bench.setting.seed),
            cache=folder,
        )
        folder.mkdir(parents=True, exist_ok=True)
        module.save(path)
    return served(bench, UnbindModule.load(path))


def served(bench: Bench, module: UnbindModule) -> Served:
    """M_full under one module."""
    model = bench.full.model
    bank = ModuleBank.of([module], next(model.parameters()).device)
    return Served(model, bench.full.tokenizer, editing=lambda: attach(model, bank))


REWRITE, SILENT, PAPER = (_shipped(name) for name in ("rewrite", "silent", "paper"))
STRICT = Filter("unbind-strict", strict)
