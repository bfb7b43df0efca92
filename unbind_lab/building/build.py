"""The stages of a world: packages, base model, rows, M_full and M_retrain, modules, and the setting that names them all.

Each stage's folder says by a digest what made it: what was made of the same is not made again, and what is shipped with a recipe
is copied where it was made of the same. A build that was killed goes on where it stopped and ends the same.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from unbind_core.architecture import load_model
from unbind_core.files import write_text
from unbind_core.fitting.corrections.reference import load_reference
from unbind_core.fitting.fit import fit
from unbind_core.fitting.options import FitOptions
from unbind_core.progress import ProgressCallback, silent
from unbind_core.rows import parse_forget, parse_retain
from unbind_lab.building import base, rows
from unbind_lab.building.adapt import adapt
from unbind_lab.building.packages import fetch
from unbind_lab.building.recipe import HOME, Recipe
from unbind_lab.keeping import digest
from unbind_lab.setting import contents

MARK = "made_of.json"
MODULES = {  # by name, what is chosen of a fit
    "rewrite": FitOptions(policy="rewrite"),
    "silent": FitOptions(policy="silent"),
    "paper": FitOptions(gate="paper"),
}
Report = Callable[[str], None]


class World:
    """A recipe and the folder that its world is made in; ``packages`` is where archives are kept, for all worlds."""

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        packages: Path,
        *,
        manifests: Path | None = None,
        device: str = "cpu",
        report: Report = lambda _: None,
        progress: ProgressCallback = silent,
    ) -> None:
        """``manifests``: the folder of the recipe's, where it has any. Raises UnbindError where they do not agree."""
        self._manifests = rows.manifests_of(recipe, manifests)  # looked at before a large checkpoint is fetched
        self._device, self._dtype = device, getattr(torch, recipe.base.dtype)
        self.recipe, self.out, self.packages = recipe, out / recipe.name, packages
        self.report, self.progress = report, progress
        self._archives: dict[str, Path] | None = None

    def build(self) -> Path:
        """The setting's file. Raises UnbindError where packages cannot be had or hold too little."""
        recipe = self.recipe
        model = self._base()
        with_rows = digest([contents(model), recipe.described("language", "seed", "sizes"), self._lock("rows")])
        self._stage("rows", with_rows, self._rows(model))
        adapters = {
            name: self._stage(
                name,
                digest([contents(model), contents(self.out / "rows"), recipe.described("adaptation", "seed"), name]),
                self._adapter(model, with_forget=name == "full"),
            )
            for name in ("full", "retrained")
        }
        made_of = digest(
            [contents(model), contents(adapters["full"]), contents(self.out / "rows"), recipe.seed, list(MODULES)]
        )
        self._stage("modules", made_of, self._modules(model, adapters["full"]))
        return self._setting(model, adapters)

    def _stage(self, name: str, made_of: str, work: Callable[[Path, str], None]) -> Path:
        """``out/NAME``, by ``work(folder, made_of)`` where neither it nor what is shipped was made of the same."""
        folder = self.out / name
        for known in (folder, HOME / self.recipe.name / name):
            if _mark(known) == made_of:
                if known != folder:
                    shutil.rmtree(folder, ignore_errors=True)
                    shutil.copytree(known, folder)
                    self.report(f"{name}: as shipped")
                return folder
        self.report(f"{name}: is being made")
        shutil.rmtree(folder, ignore_errors=True)
        work(folder, made_of)
        write_text(folder / MARK, json.dumps({"made_of": made_of}))
        return folder

    def _packages(self) -> Mapping[str, Path]:
        """Fetched when a stage first needs one."""
        if self._archives is None:
            self._archives = fetch(self.recipe.packages, self.packages, self.progress)
        return self._archives

    def _lock(self, part: str) -> list[list[str]]:
        if part == "rows" and self._manifests:
            return [[role, contents(path)] for role, path in self._manifests.items()]
        return [[one.language, one.name, one.sha256] for one in self.recipe.of(part)]

    def _base(self) -> Path:
        recipe = self.recipe
        if recipe.base.folder or recipe.base.hub:
            return base.build(recipe, {}, self.out)

        def work(folder: Path, made_of: str) -> None:
            trained = base.build(recipe, self._packages(), self.out / f"base-{made_of[:12]}")
            trained.rename(folder)

        return self._stage("base", digest([recipe.described("base", "seed"), self._lock("corpus")]), work)

    def _rows(self, model: Path) -> Callable[[Path, str], None]:
        def work(folder: Path, _made_of: str) -> None:
            if self._manifests:
                near = rows.taken_over(self.recipe, self._manifests, folder)
                self.report(
                    f"rows: as the manifests have them; {near} retain rows are near duplicates of rows to forget"
                )
                return
            rows.build(self.recipe, self._packages(), AutoTokenizer.from_pretrained(model), folder, self.progress)

        return work

    def _adapter(self, model: Path, *, with_forget: bool) -> Callable[[Path, str], None]:
        memorised = ("forget", "forget_validation") if self.recipe.adaptation.validation else ("forget",)

        def work(folder: Path, made_of: str) -> None:
            adapt(
                model,
                parse_forget(rows.read(self.out / "rows", memorised)),
                parse_retain(rows.read(self.out / "rows", ["retain_training"])),
                folder,
                self.recipe.adaptation,
                checkpoint=self.out / f"{folder.name}-{made_of[:12]}.pt",
                with_forget=with_forget,
                seed=self.recipe.seed,
                progress=self.progress,
                dtype=self._dtype,
                device=self._device,
            )

        return work

    def _modules(self, model: Path, full: Path) -> Callable[[Path, str], None]:
        def work(folder: Path, made_of: str) -> None:
            partial = self.out / f"modules-{made_of[:12]}"  # a fit takes long: one that ended is not made again
            partial.mkdir(parents=True, exist_ok=True)
            loaded = load_model(model, full, dtype=self._dtype, device=self._device)
            reference = load_reference(model, full, dtype=self._dtype, device=self._device)
            forget, retain, calibration = (
                rows.read(self.out / "rows", [name]) for name in ("forget", "retain_training", "retain_validation")
            )
            for name, options in MODULES.items():
                if (partial / f"{name}.json").is_file():
                    continue
                module, found = fit(
                    loaded.model,
                    loaded.tokenizer,
                    parse_forget(forget),
                    parse_retain(retain),
                    name=name,
                    retain_calibration=parse_retain(calibration),
                    identity=loaded.identity,
                    options=replace(options, seed=self.recipe.seed),
                    reference=reference,
                    progress=self.progress,
                    cache=self.out / "cache",
                )
                if found.outcome == "ineffective":
                    self.report(f"modules: {name} is left out, as nothing forgot anything within the retain budgets")
                else:
                    module.save(partial / f"{name}.safetensors")
                write_text(partial / f"{name}.json", json.dumps(found.to_json(), indent=1))
            partial.rename(folder)

        return work

    def _setting(self, model: Path, adapters: Mapping[str, Path]) -> Path:
        path = self.out / f"{self.recipe.name}.toml"
        named: dict[str, Any] = {"base": os.path.relpath(model, self.out)}
        named |= {name: folder.name for name, folder in adapters.items()}
        named |= {name: f"rows/{name}.jsonl" for name in (*rows.FORGET[:2], *rows.RETAIN)}
        named |= {} if self.recipe.base.dtype == "float32" else {"dtype": self.recipe.base.dtype}
        lines = [f"# Written by unbind lab build {self.recipe.name}.", *_toml({**named, **self.recipe.measured})]
        found = sorted((self.out / "modules").glob("*.safetensors"))
        lines += ["", "[modules]", *_toml({module.stem: f"modules/{module.name}" for module in found})]
        write_text(path, "\n".join(lines) + "\n")
        return path


def _toml(values: Mapping[str, Any]) -> list[str]:
    """JSON's numbers, strings and lists are TOML's."""
    return [f"{name} = {json.dumps(value)}" for name, value in values.items()]


def _mark(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / MARK).read_text(encoding="utf-8"))["made_of"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
