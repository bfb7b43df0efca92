"""All guards that are loaded, asked as one; and those of them that hold for one request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unbind_core.guard.fingerprints import Fingerprints, Sorted
from unbind_core.guard.index import GuardIndex, Secret, Shape

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
class GuardSet:
    """What holds for one request. ``measured``: guards that only count, whatever their action. ``groups``: all of them by what
    they look for; those that act come first.
    """

    secret: Secret
    applied: tuple[GuardIndex, ...]
    measured: tuple[GuardIndex, ...]
    groups: tuple[Group, ...]

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

    def __init__(self, secret: Secret, indexes: Mapping[str, GuardIndex], halves: Mapping[Shape, Fingerprints]) -> None:
        self.secret, self.indexes, self._halves = secret, indexes, halves
        self._selected: dict[tuple[frozenset[str], frozenset[str]], GuardSet] = {}

    @classmethod
    def of(cls, secret: Secret, indexes: Iterable[GuardIndex] = (), before: GuardBook | None = None) -> GuardBook:
        """The book of these guards; what ``before`` has merged already is not merged again."""
        named = {index.name: index for index in indexes}
        halves: dict[Shape, Fingerprints] = {}
        for shape in dict.fromkeys(index.shape for index in named.values()):
            there = {index.digest: index for index in named.values() if index.shape == shape}
            known = {index.digest for index in before.indexes.values() if index.shape == shape} if before else set()
            if before is not None and known and known <= there.keys():
                added = [index.half for digest, index in there.items() if digest not in known]
                merged = before._halves[shape]
                halves[shape] = _merged([merged.values, *added]) if added else merged
            else:
                halves[shape] = _merged([index.half for index in there.values()])
        return cls(secret, named, halves)

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
            self._selected[names] = GuardSet(self.secret, act, count, tuple(self._groups(act, count)))
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
        own = sum(index.whole.nbytes + index.half.nbytes for index in self.indexes.values())
        return own + sum(merged.nbytes for merged in self._halves.values())


def _merged(parts: list[Sorted]) -> Fingerprints:
    if len(parts) == 1:
        return Fingerprints(parts[0])
    values = np.concatenate(parts)
    values.sort(kind="stable")  # which takes what is in order as it is
    return Fingerprints(values[np.append(True, values[1:] != values[:-1])])
