"""Unbind: the modules that a setting names, as shipped, and the fit of the paper to the letter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from unbind_core import fitting
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import numerics
from unbind_core.errors import UnbindError
from unbind_core.fitting.corrections.reference import Kind, Reference
from unbind_core.fitting.fit import fit
from unbind_core.fitting.options import FitOptions, possible_layers
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_core.rows import ForgetRow, forget_digest
from unbind_lab.filters.filter import Absent, Filter, Options
from unbind_lab.keeping import code_of, digest
from unbind_lab.served import Served
from unbind_lab.setting import Bench

PAPER_GATE = "paper"


def _shipped(name: str, options: FitOptions) -> Filter:
    """``options``: what it was fitted with, for fits of other rows and at other layers."""

    def build(bench: Bench, rows: Sequence[ForgetRow], _options: Options, folder: Path) -> Served:
        path = bench.setting.modules.get(name)
        if path is None:
            raise Absent(f"setting: 'modules.{name}' is missing; name the module's file, or leave unbind-{name} out")
        module = UnbindModule.load(path)
        if module.forget_digest != forget_digest(rows):
            raise UnbindError(f"setting: 'modules.{name}' was fitted on other rows than 'forget'; fit one on those")
        module.require(bench.full.identity)
        module.require_numerics(numerics(bench.full.model))
        made = replace(served(bench, module), apart=partial(_apart, bench, folder, options))
        if options.gate != PAPER_GATE:
            return made
        layers = possible_layers(options.gate, bench.full.identity.num_layers)
        fits = {
            layer: partial(fitted, bench, rows, folder, f"layer-{layer}", replace(options, layers=(layer,)))
            for layer in layers
        }
        return replace(made, layers=fits)

    return Filter(f"unbind-{name}", build, module=name)


def strict(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """The published fit and nothing else, over all layers; where it finds nothing its module changes nothing."""
    return served(bench, fitted(bench, rows, folder, "strict", FitOptions(gate="paper-strict")))


def _apart(
    bench: Bench,
    folder: Path,
    options: FitOptions,
    sets: Sequence[Sequence[ForgetRow]],
    progress: ProgressCallback,
) -> Served:
    """M_full under a module for each of the sets, fitted as one that is on beside those before it."""
    found = [
        fitted(bench, rows, folder, f"set-{number + 1}", replace(options, beside=number), progress)
        for number, rows in counted(list(enumerate(sets)), len(sets), "takedowns", progress)
    ]
    bank = ModuleBank.of(found, next(bench.full.model.parameters()).device)
    return Served(bench.full.model, bench.full.tokenizer, editing=lambda: attach(bench.full.model, bank))


def fitted(
    bench: Bench,
    rows: Sequence[ForgetRow],
    folder: Path,
    name: str,
    options: FitOptions,
    progress: ProgressCallback = silent,
) -> UnbindModule:
    """A module of these rows with the setting's seed, kept in ``folder`` under the digest of what it is made of.

    One that needs a reference is led towards the base, which the model's fingerprint covers.
    """
    full, options = bench.full, replace(options, seed=bench.setting.seed)
    path = folder / f"{name}-{_made_of(bench, rows, options)[:32]}.safetensors"
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
        options=options,
        reference=Reference(Kind.BASE, bench.base.model, bench.base.identity) if options.gate == "auto" else None,
        progress=progress,
        cache=folder,
    )
    folder.mkdir(parents=True, exist_ok=True)
    module.save(path)
    return module


def _made_of(bench: Bench, rows: Sequence[ForgetRow], options: FitOptions) -> str:
    every = [[asdict(row) for row in part] for part in (rows, bench.retain_training, bench.retain_validation)]
    made_on = bench.full.identity.fingerprint, numerics(bench.full.model), options.to_json()
    return digest([*made_on, every, code_of(fitting)])


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


REWRITE, SILENT = (_shipped(policy, FitOptions(policy=policy)) for policy in ("rewrite", "silent"))
PAPER = _shipped("paper", FitOptions(gate=PAPER_GATE))
STRICT = Filter("unbind-strict", strict, further=(fitting,))
