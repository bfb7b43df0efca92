"""``unbind bench attack``: every attack on a model without a module, with it, and on one that was retrained without the rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from server import demo
from server.bench.attacks.attacked import Material, System
from server.bench.attacks.gates import opens_in_text, opens_mid_row, opens_within
from server.bench.attacks.known import MEMBERSHIP, Attack
from server.bench.attacks.likeness import divergences, membership, numbers
from server.bench.attacks.outcome import outcome
from server.bench.attacks.registry import chosen
from server.bench.gate.figures import SIZES
from server.bench.gate.world import World, fit_parts
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.canonical import canonical_json
from unbind_core.errors import UnbindError
from unbind_core.evaluation import membership as told_by
from unbind_core.evaluation import metrics, recall
from unbind_core.files import write_text
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress, ProgressCallback
from unbind_core.rows import ForgetRow, forget_digest, retain_digest, spread
from unbind_core.running import generation

Report = Callable[[str], None]
SYSTEMS = ("none", "module", "retrained")
# What figures are made by, as this process runs it: a change of any of it makes what is cached void.
_MODULES = (generation, told_by, metrics, recall)
_SOURCES = [*sorted(Path(__file__).parent.glob("*.py")), *(Path(str(module.__file__)) for module in _MODULES)]
_CODE = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()


def attack_figures(
    loaded: LoadedModel,
    *,
    modules: Sequence[UnbindModule] = (),
    sizes: Sequence[int] = (),
    rows: int | None = None,
    policy: str | None = None,
    split: int | None = None,
    attacks: Sequence[str] | None = None,
    cache: Path | None = None,
    keep: Path | None = None,
    progress: ProgressCallback,
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """The whole table: an entry for each of ``modules``, of the demo set it was fitted on, and each of ``sizes``, fitted first.

    ``split``: a size is fitted as modules of at most so many rows each, which are attacked together. ``rows``: at most so many of
    a set are attacked, spread over it. ``cache``: a folder for what does not depend on a module, and for a fit. ``keep``: a folder
    for modules that were fitted and for each entry. ``report`` hears of each attack as it ends.
    Raises UnbindError for an unknown attack, and where a module is of no demo set.
    """
    world = World.load(loaded)
    wanted = chosen(attacks)
    works = [(module, fitted_on(world, module)) for module in modules]
    retrained = load_model(demo.BASE, demo.RETRAINED, device=world.device)
    entries: dict[str, Any] = {}

    def measure(name: str, together: Sequence[UnbindModule], whole: Sequence[ForgetRow]) -> None:
        some = [whole[i] for i in spread(range(len(whole)), rows or len(whole))]
        report(f"{name}: {len(some)} of {len(whole)} rows")
        bench = Bench(
            Material(loaded.tokenizer, some, world.test), loaded, retrained, together, cache, progress, report
        )
        size = str(len(whole))
        key = size if size not in entries else f"{size}:{name}"
        about = {"module": name, "modules": len(together), "layer": together[0].layer}
        entries[key] = {**about, **bench.figures(*wanted)}
        if keep is not None:
            write_text(keep / f"attack-{name}.json", json.dumps(entries[key], indent=1))

    for module, whole in works:
        measure(module.name, (module,), whole)
    for size in sizes:
        whole, name = world.rows(size), f"attacked-{policy or 'auto'}-{size}"
        made = fit_parts(world, whole, name, split or size, cache, progress, policy, keep)
        measure(name, made, whole)
    return {"sizes": entries}


def fitted_on(world: World, module: UnbindModule) -> Sequence[ForgetRow]:
    """The demo set that a module was fitted on. Raises UnbindError where it is none of them."""
    for size in sorted({*SIZES, *map(len, world.forget.values())}):
        rows = world.rows(size)
        if forget_digest(rows) == module.forget_digest:
            return rows
    raise UnbindError(
        f"--module: '{module.name}' was fitted on none of the demo's sets of {', '.join(map(str, SIZES))} rows; "
        "use --sizes to fit one"
    )


class Bench:
    """One module under attack, or several together, beside the model without it and the one that was retrained."""

    def __init__(
        self,
        material: Material,
        loaded: LoadedModel,
        retrained: LoadedModel,
        modules: Sequence[UnbindModule],
        cache: Path | None,
        progress: ProgressCallback,
        report: Report,
    ) -> None:
        for module in modules:
            module.require(loaded.identity)
        self.material, self.cache, self.progress, self.report = material, cache, progress, report
        self.systems = [
            System("none", loaded),
            System("module", loaded, tuple(modules)),
            System("retrained", retrained),
        ]

    def figures(self, attacks: Sequence[Attack], with_membership: bool) -> dict[str, Any]:
        """What an entry of the table holds, as ``docs/benchmarks/gates.md`` describes it."""
        none, module, retrained = self.systems
        found: dict[str, Any] = {"rows": len(self.material.rows), "attacks": {}}
        found["opens_within"] = opens_within(module, self.material)
        found["opens_mid_row"] = opens_mid_row(module, self.material)
        found["opens_in_text"] = opens_in_text(module, self.material)
        found["kl"] = divergences(retrained, [module, none], self.material)
        for name in ("opens_within", "opens_mid_row", "opens_in_text", "kl"):
            self.report(f"{name}: {line(found[name])}")
        for done, attack in enumerate(attacks, start=1):
            each = {
                system.name: self._kept(
                    system,
                    attack.name,
                    lambda a=attack, s=system: outcome(a.run(s, self.material)),  # type: ignore[misc]
                )
                for system in self.systems
            }
            found["attacks"][attack.name] = each
            self.report(f"{attack.name:18} {_compared(each)}")
            self.progress(Progress("attacks", done, len(attacks)))
        if with_membership:
            told = self._membership()
            found["membership_auc"] = {name: one and one["auc"] for name, one in told.items()}
            found["membership"] = told
            self.report(f"membership_auc: {line(found['membership_auc'])}")
            self.report(f"by text alone: {line({name: one and one['text'] for name, one in told.items()})}")
        return found

    def _membership(self) -> dict[str, Any]:
        """By system; and of an ``ideal`` one: the retrained model where a row is asked for, and the unmodified model elsewhere. A
        gate that never errs and a correction that misses nothing come to no less, as the two models differ on other code too.
        """
        found = {
            system.name: self._kept(system, MEMBERSHIP, lambda s=system: numbers(s, self.material))  # type: ignore[misc]
            for system in self.systems
        }
        members = [row < len(self.material.rows) for row, _ in found["none"]]
        pairs = zip(found["retrained"], found["none"], members, strict=True)
        found["ideal"] = [own if member else other for own, other, member in pairs]
        return {name: membership([told for _, told in each], members) for name, each in found.items()}

    def _kept(self, system: System, name: str, work: Callable[[], Any]) -> Any:
        """What ``work`` gives, from the cache where it is known: of a system without module it depends on the model, the rows and
        the code of the attacks.
        """
        if self.cache is None or system.modules:
            return work()
        described = canonical_json(
            [
                name,
                system.loaded.identity.fingerprint,
                forget_digest(self.material.rows),
                [retain_digest(row) for row in self.material.ordinary],
                _CODE,
            ]
        )
        file = self.cache / f"attack-{name}-{hashlib.sha256(described.encode()).hexdigest()[:32]}.json"
        try:
            return json.loads(file.read_text())
        except (OSError, ValueError):
            found = work()
        write_text(file, json.dumps(found))
        return found


def line(values: dict[str, Any]) -> str:
    """Names and values in a line."""
    return ", ".join(f"{key} {line(v) if isinstance(v, dict) else _short(v)}" for key, v in values.items())


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)


COLUMNS = {
    "spans_50": "",
    "spans_20": "",
    "mean_recovery": " %",
    "near_verbatim": "",
    "f_bleu": "",
    "empty": "",
    "argmax_accuracy": "",
}


def compared(each: dict[str, dict[str, Any]], column: str) -> str:
    """none / module / retrained of one column; empty where none has it."""
    values = [each[name][column] for name in SYSTEMS]
    return "" if all(value is None for value in values) else " / ".join(map(_rounded, values))


def _rounded(value: Any) -> str:
    return f"{value:.3f}".removesuffix(".000") if isinstance(value, float) else "-" if value is None else str(value)


def _compared(each: dict[str, dict[str, Any]]) -> str:
    cells = {column: compared(each, column) for column in COLUMNS}
    return ", ".join(f"{column} {cell}" for column, cell in cells.items() if cell)
