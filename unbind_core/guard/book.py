"""All guards that are loaded, asked as one; and those of them that hold for one request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from unbind_core.guard.fingerprints import Fingerprints, Sorted
from unbind_core.guard.index import MARKS, GuardIndex, Secret, Shape, Stretch

Key = TypeVar("Key")
_REMEMBERED = 256  # selections: nearly all requests have one of a few


@dataclass(frozen=True, eq=False)
class Group:
    """Guards of one shape that are asked together: those that act, or those that only count.

    ``runs``: of N/2 lexemes, of all guards of the shape that are loaded; ``others``: those of them that are not asked here.
    """

    shape: Shape
    guards: tuple[GuardIndex, ...]
    acts: bool
    runs: Fingerprints
    others: tuple[GuardIndex, ...]

    def holds(self, half: int) -> bool:
        """Whether this run of N/2 lexemes is of a row of one of these guards.

        Nearly no text is in the one table of all; what is, may be of a row that is protected from others than this client.
        """
        if half not in self.runs:
            return False
        if len(self.others) < len(self.guards) and not any(index.holds(half) for index in self.others):
            return True
        return any(index.holds(half) for index in self.guards)


@dataclass(frozen=True, eq=False)
class Marks:
    """A kind of ``stretch`` by which gates are moved; ``runs``: those of all guards that are loaded."""

    stretch: Stretch
    runs: Fingerprints

    @property
    def shape(self) -> Shape:
        """That of the runs."""
        return self.stretch.shape


@dataclass(frozen=True, eq=False)
class GuardSet:
    """What holds for one request. ``measured``: guards that only count, whatever their action. ``groups``: all of them by what
    they look for; those that act come first. ``stretches``: what moves gates, of those that act.
    """

    secret: Secret
    applied: tuple[GuardIndex, ...]
    measured: tuple[GuardIndex, ...]
    groups: tuple[Group, ...]
    stretches: tuple[Marks, ...]

    @cached_property
    def acting(self) -> frozenset[GuardIndex]:
        """Those that do more than count."""
        return frozenset(index for group in self.groups if group.acts for index in group.guards)

    @cached_property
    def withholds(self) -> bool:
        """Whether a guard stops answers, so that text of a run is withheld until it is known how the run goes on."""
        return any(index.action == "stop" for index in self.acting)

    @property
    def labels(self) -> tuple[str, ...]:
        """``name:guard@digest12`` of each that is applied."""
        return tuple(index.label for index in self.applied)


class GuardBook:
    """What is loaded, by name; never changes. The runs of all guards of a shape are one table, whatever their number."""

    def __init__(
        self,
        secret: Secret,
        indexes: Mapping[str, GuardIndex],
        halves: Mapping[Shape, Fingerprints],
        marks: Mapping[Stretch, Fingerprints],
    ) -> None:
        self.secret, self.indexes, self._halves, self._marks = secret, indexes, halves, marks
        self._selected: dict[tuple[frozenset[str], frozenset[str]], GuardSet] = {}

    @classmethod
    def of(cls, secret: Secret, indexes: Iterable[GuardIndex] = (), before: GuardBook | None = None) -> GuardBook:
        """The book of these guards; what ``before`` has merged already is not merged again."""
        named = {index.name: index for index in indexes}
        now, were = tuple(named.values()), tuple(before.indexes.values()) if before else ()
        halves = _tables(lambda index: {index.shape: index.half}, now, were, before._halves if before else {})
        marks = _tables(_marks, now, were, before._marks if before else {})
        return cls(secret, named, halves, marks)

    @property
    def names(self) -> frozenset[str]:
        """The names of all guards."""
        return frozenset(self.indexes)

    def select(self, applied: Collection[str], measured: Collection[str] = ()) -> GuardSet | None:
        """What holds where ``applied`` act and ``measured`` only count; None where that is nothing. Raises KeyError."""
        if not applied and not measured:
            return None
        names = frozenset(applied), frozenset(measured) - frozenset(applied)
        if names not in self._selected:
            if len(self._selected) >= _REMEMBERED:
                self._selected.clear()
            act, count = (tuple(self.indexes[name] for name in sorted(part)) for part in names)
            groups = tuple(self._groups(act, count))
            acting = [index for group in groups if group.acts for index in group.guards]
            kinds = dict.fromkeys(stretch for index in acting for stretch in index.stretches)
            tables = {kind: self._halves[kind.shape] for kind in kinds if kind not in self._marks} | dict(self._marks)
            stretches = tuple(Marks(kind, tables[kind]) for kind in kinds)
            self._selected[names] = GuardSet(self.secret, act, count, groups, stretches)
        return self._selected[names]

    def _groups(self, applied: Sequence[GuardIndex], measured: Sequence[GuardIndex]) -> Iterator[Group]:
        acting = tuple(index for index in applied if index.action != "report")
        counting = (*(index for index in applied if index.action == "report"), *measured)
        for guards in (acting, counting):
            for shape in dict.fromkeys(index.shape for index in guards):
                asked = tuple(index for index in guards if index.shape == shape)
                rest = set(self.indexes.values()) - set(asked)
                others = tuple(index for index in rest if index.shape == shape)
                yield Group(shape, asked, guards is acting, self._halves[shape], others)

    @property
    def nbytes(self) -> int:
        """Bytes that the fingerprints take in memory."""
        guards = self.indexes.values()
        own = sum(index.whole.nbytes + index.half.nbytes for index in guards)
        marks = sum(runs.nbytes for index in guards for runs in index.marks.values())
        return own + marks + sum(table.nbytes for table in (*self._halves.values(), *self._marks.values()))


def _marks(index: GuardIndex) -> Mapping[Stretch, Sorted]:
    return {stretch: runs for stretch, runs in index.stretches.items() if stretch in MARKS}


def _tables(
    runs_of: Callable[[GuardIndex], Mapping[Key, Sorted]],
    now: Iterable[GuardIndex],
    were: Iterable[GuardIndex],
    before: Mapping[Key, Fingerprints],
) -> dict[Key, Fingerprints]:
    """By key the runs of all guards ``now`` in one table. What ``before`` has of those that ``were`` is not merged again."""
    own, old = ({index.digest: runs_of(index) for index in some} for some in (now, were))
    found: dict[Key, Fingerprints] = {}
    for key in dict.fromkeys(key for runs in own.values() for key in runs):
        there = {digest: runs[key] for digest, runs in own.items() if key in runs}
        known = {digest for digest, runs in old.items() if key in runs}
        if known and known <= there.keys():
            added = [runs for digest, runs in there.items() if digest not in known]
            found[key] = _merged([before[key].values, *added]) if added else before[key]
        else:
            found[key] = _merged(list(there.values()))
    return found


def _merged(parts: list[Sorted]) -> Fingerprints:
    if len(parts) == 1:
        return Fingerprints(parts[0])
    values = np.concatenate(parts)
    values.sort(kind="stable")  # which takes what is in order as it is
    return Fingerprints(values[np.append(True, values[1:] != values[:-1])[: len(values)]])
