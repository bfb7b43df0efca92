"""The modules that requests can name, each version pinned for as long as some request uses it.

The bank knows modules by an internal key of this table, so a new version of a name can be loaded while streams run
under the old one. An entry leaves the bank when neither the table nor any request refers to it any more.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from server.engine.pinned import LoadedModule, PinnedSet
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.looks import Look
from unbind_core.errors import UnbindError, UnknownModule
from unbind_core.module import UnbindModule

Counts = dict[str, dict[str, tuple[int, int]]]


class Gates(NamedTuple):
    """What gates did, by the names of modules. ``looks`` is empty where nobody looks at scores."""

    counts: Counts
    looks: Mapping[str, Look]


NO_GATES = Gates({}, {})


def unknown(name: str, known: Collection[str]) -> UnknownModule:
    """That there is no such module, and which are near of those that are known."""
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    remedy = f"did you mean {', '.join(near)}?" if near else f"loaded: {', '.join(sorted(known)) or 'none'}"
    return UnknownModule(f"module '{name[:80]}' is not loaded; {remedy}")


class ModuleTable:
    """Name -> current version. ``sync`` and ``collect`` run on the engine's thread, the rest anywhere."""

    def __init__(
        self, bank: ModuleBank, numerics: Mapping[str, Any], reserve: Callable[[], None] = lambda: None
    ) -> None:
        """``numerics``: what the model runs in. ``reserve`` makes room for what the bank holds, before anything new can be named;
        what it raises ends a ``sync``.
        """
        self._bank, self._numerics, self._reserve = bank, numerics, reserve
        self._current: dict[str, LoadedModule] = {}
        self._names: dict[str, str] = {}  # by key, of every version ever loaded: counts never go back
        self._unused: deque[str] = deque()
        self._serial = itertools.count()

    @property
    def current(self) -> Mapping[str, LoadedModule]:
        """The modules a new request can name."""
        return self._current

    def bank_names(self) -> tuple[str, ...]:
        """The keys of the versions in the bank, current or still in use."""
        return self._bank.names

    def pin(self, names: Iterable[str] | Mapping[str, float]) -> PinnedSet:
        """The current versions of ``names``, duplicates dropped; a mapping gives each a multiple of its strength.

        Raises UnknownModule naming near matches.
        """
        current = self._current
        entries = []
        factors = tuple(float(factor) for factor in names.values()) if isinstance(names, Mapping) else ()
        for name in dict.fromkeys(names):
            if name not in current:
                raise unknown(name, current)
            entries.append(current[name])
        return PinnedSet(tuple(entries), factors)

    def sync(self, modules: Iterable[tuple[UnbindModule, str]]) -> None:
        """Make exactly these (module, digest) the current ones; running requests keep what they have.

        Raises UnbindError, and leaves all as it was, where the memory for them is not there; ModelMismatch where one was
        calibrated in other numerics than the model runs in.
        """
        self.collect()  # what requests since ended have left takes no room from what comes
        wanted: dict[str, LoadedModule] = {}
        modules = list(modules)
        for module, _ in modules:
            module.require_numerics(self._numerics)
        for module, digest in modules:
            present = self._current.get(module.name)
            wanted[module.name] = present if present and present.digest == digest else self._add(module, digest)
        try:
            self._reserve()
        except UnbindError:
            wanted.clear()  # so that nothing refers to the new ones, and the bank is rid of them at once
            self.collect()
            raise
        self._current = wanted
        self.collect()

    def _add(self, module: UnbindModule, digest: str) -> LoadedModule:
        key = f"m{next(self._serial)}"
        self._bank.add(module.known_as(key))
        self._names[key] = module.name
        entry = LoadedModule(key, module, digest)
        weakref.finalize(entry, self._unused.append, key).atexit = False
        return entry

    def collect(self) -> None:
        """Take out of the bank what nothing refers to any more."""
        while self._unused:
            self._bank.remove(self._unused.popleft())

    def counts(self) -> Counts:
        """Module name -> phase -> (positions evaluated, gates open) since start, over all versions of a name."""
        totals: Counts = {}
        for key, phases in self._bank.counts().items():
            total = totals.setdefault(self._names[key], {})
            for phase, (positions, opened) in phases.items():
                before = total.get(phase, (0, 0))
                total[phase] = (before[0] + positions, before[1] + opened)
        return totals

    def gates(self) -> Gates:
        """``counts``, and how near gates came to opening, in the same way."""
        looks: dict[str, Look] = {}
        for key, look in self._bank.looks().items():
            name = self._names[key]
            before = looks.get(name)  # seldom there, and adding up nothing took most of the time
            looks[name] = look if before is None else before.and_of(look)
        return Gates(self.counts(), looks)

    def describe(self, name: str) -> dict[str, Any]:
        """What the admin API tells of a loaded module."""
        entry = self._current[name]
        module = entry.module
        return {
            "name": name,
            "digest": entry.digest,
            "detector": module.detector,
            "correction": module.correction,
            "rank": module.rank,
            "policy": module.policy,
            "calibrated": dict(module.calibrated),
            "layer": module.layer,
            "s_ref": module.s_ref,
            "tau": module.tau,
            "kappa": module.kappa,
            "quantile": module.quantile,
            "forms": list(module.forms),
            "created_at": module.created_at,
            "forget_digest": module.forget_digest,
            "budgets": dict(module.budgets),
            "measured": dict(module.measured),
        }
