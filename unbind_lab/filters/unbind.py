"""Unbind: the modules that a setting names, as shipped, and the fit of the paper to the letter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.errors import UnbindError
from unbind_core.fitting.fit import fit
from unbind_core.fitting.options import FitOptions, possible_layers
from unbind_core.module import UnbindModule
from unbind_core.rows import ForgetRow, forget_digest
from unbind_lab.filters.filter import Absent, Filter, Options
from unbind_lab.served import Served
from unbind_lab.setting import Bench


def _shipped(name: str, gate: str | None = None) -> Filter:
    """``gate``: which it has, where it can be fitted at one layer and another."""

    def build(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
        path = bench.setting.modules.get(name)
        if path is None:
            raise Absent(f"setting: 'modules.{name}' is missing; name the module's file, or leave unbind-{name} out")
        module = UnbindModule.load(path)
        if module.forget_digest != forget_digest(rows):
            raise UnbindError(f"setting: 'modules.{name}' was fitted on other rows than 'forget'; fit one on those")
        module.require(bench.full.identity)
        made = served(bench, module)
        if gate is None:
            return made
        layers = possible_layers(gate, bench.full.identity.num_layers)
        fits = {
            layer: partial(fitted, bench, rows, folder, f"layer-{layer}", FitOptions(gate=gate, layers=(layer,)))
            for layer in layers
        }
        return replace(made, layers=fits)

    return Filter(f"unbind-{name}", build, module=name)


def strict(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """The published fit and nothing else, over all layers; where it finds nothing its module changes nothing."""
    return served(bench, fitted(bench, rows, folder, "strict", FitOptions(gate="paper-strict")))


def fitted(bench: Bench, rows: Sequence[ForgetRow], folder: Path, name: str, options: FitOptions) -> UnbindModule:
    """A module of these rows with the setting's seed, kept in ``folder``."""
    full = bench.full
    path = folder / f"{name}-{full.identity.fingerprint[:16]}-{forget_digest(rows)[:16]}.safetensors"
    if path.is_file():
        return UnbindModule.load(path)
    module, _ = fit(
        full.model,
        full.tokenizer,
        rows,
        bench.retain_training,
        name=name,
        retain_calibration=bench.retain_validation,
        identity=full.identity,
        options=replace(options, seed=bench.setting.seed),
        cache=folder,
    )
    folder.mkdir(parents=True, exist_ok=True)
    module.save(path)
    return module


@dataclass(frozen=True, kw_only=True)
class Modular(Served):
    """M_full under one module. ``layers``: where it can be fitted besides, by layer what fits it there."""

    module: UnbindModule
    layers: Mapping[int, Callable[[], UnbindModule]] = field(default_factory=dict)

    def at(self, strength: float) -> Served:
        """In so many times the correction."""
        return _under(self, self.module, strength)

    def under(self, module: UnbindModule) -> Served:
        """Another module in its place."""
        return _under(self, module)


def served(bench: Bench, module: UnbindModule) -> Modular:
    """M_full under one module."""
    return _under(Served(bench.full.model, bench.full.tokenizer), module)


def _under(full: Served, module: UnbindModule, strength: float = 1.0) -> Modular:
    bank = ModuleBank.of([module], next(full.model.parameters()).device)
    chosen = {module.name: strength}
    return Modular(full.model, full.tokenizer, editing=lambda: attach(full.model, bank, modules=chosen), module=module)


REWRITE, SILENT, PAPER = _shipped("rewrite"), _shipped("silent"), _shipped("paper", gate="paper")
STRICT = Filter("unbind-strict", strict)
