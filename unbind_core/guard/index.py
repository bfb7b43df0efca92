"""The index of one forget set: keyed fingerprints of every run of N lexemes in it, and of half as many.

rows -> ``build_index`` -> ``GuardIndex`` <-> bytes. The file holds no protected text, and nothing can be asked of it
without the key.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from unbind_core.canonical import canonical_json
from unbind_core.errors import GuardFileError, RowsTooShort
from unbind_core.guard.fingerprints import Fingerprints, Sorted
from unbind_core.guard.lexemes import folded, readings, spelt

FORMAT = 1
KEY = "guard"
RUN, LEAST_RUN, MOST_RUN = 50, 8, 1000  # lexemes
SECRET_RUN = 12  # characters: a few letters in front of a key say whose it is, and stand in anybody's code
BARS, MOST_BARS = 3, 100
Action = Literal["steer", "stop", "report"]
_UNREADABLE = (SafetensorError, ValueError, TypeError, LookupError, AttributeError, RuntimeError)


class Secret:
    """What fingerprints are made with: 16 to 64 bytes that nobody else has."""

    def __init__(self, key: bytes) -> None:
        if not 16 <= len(key) <= 64:
            raise ValueError(f"a guard's key has 16 to 64 bytes, not {len(key)}")
        self._keyed = hashlib.blake2b(key=key, digest_size=8)
        self.mark = self.fingerprint(("", "the key's own mark")).to_bytes(8, "little").hex()

    def fingerprint(self, lexemes: Sequence[str]) -> int:
        """64 bits of BLAKE2b under the key."""
        hasher = self._keyed.copy()
        hasher.update("\0".join(lexemes).encode("utf-8", "surrogatepass"))
        return int.from_bytes(hasher.digest(), "little")


@dataclass(frozen=True)
class Shape:
    """What runs are looked for: ``run`` lexemes, with names as they are or ``fold``ed; of ``secrets`` letters and digits, for which
    texts are ``spelt``.
    """

    run: int
    fold: bool = False
    secrets: bool = False

    @property
    def unit(self) -> str:
        """What a run consists of."""
        return "characters" if self.secrets else "lexemes"

    @property
    def half(self) -> int:
        """The length from which on a run is followed, in lexemes."""
        return self.run // 2

    def runs(self, lexemes: Sequence[str], length: int, secret: Secret) -> Iterator[int]:
        """The fingerprint of every run of ``length``, in order."""
        for start in range(len(lexemes) - length + 1):
            yield self.fingerprint(lexemes[start : start + length], secret)

    def fingerprint(self, lexemes: Sequence[str], secret: Secret) -> int:
        """The fingerprint of one run."""
        return secret.fingerprint(folded(lexemes) if self.fold else lexemes)


@dataclass(frozen=True)
class Stretch:
    """What moves the gate of a takedown's module: ``least`` lexemes of a row in one piece, found by runs of ``shape.half``.
    ``holds``: the gate is open behind it; else it opens where it would else have closed. ``first``: only a row's beginning counts.
    """

    shape: Shape
    least: int
    holds: bool = True
    first: bool = False

    def runs(self, lexemes: Sequence[str], secret: Secret) -> Iterable[int]:
        """The runs of a row by which it is found."""
        return self.shape.runs(lexemes[: self.least] if self.first else lexemes, self.shape.half, secret)


LEAST_HELD = 20  # lexemes; ordinary code has shorter stretches of a protected row all the time
# Some ordinary rows hold one, and on most of those no detector half fires.
EASING = Stretch(Shape(24), 12, holds=False)
OPENING = Stretch(Shape(12), 6, holds=False, first=True)  # as a function's name and its first arguments
RENAMED = Stretch(Shape(2 * LEAST_HELD, fold=True), LEAST_HELD)
MARKS = {EASING: "easing", OPENING: "opening", RENAMED: "renamed"}  # tensors of the file; older versions pass over them


@dataclass(frozen=True, eq=False)
class GuardIndex:
    """One takedown's guard. ``rows`` are those that hold a run, ``too_short`` those that cannot; ``lexemes`` counts both readings
    of the former where they differ. ``digest``: SHA-256 of its bytes. ``marks``: the runs of
    ``EASING`` and ``OPENING``, and of ``RENAMED`` where names are folded, where a row has as many lexemes; files made before
    these were have none.
    """

    name: str
    shape: Shape
    action: Action
    bars: int
    rows: int
    too_short: int
    lexemes: int
    forget_digest: str
    mark: str
    whole: Fingerprints = field(repr=False)
    half: Sorted = field(repr=False)
    digest: str = ""
    marks: Mapping[Stretch, Sorted] = field(default_factory=dict, repr=False)

    def holds(self, half: int) -> bool:
        """Whether this is a run of N/2 lexemes of the rows."""
        return _found(self.half, half)

    @cached_property
    def stretches(self) -> Mapping[Stretch, Sorted]:
        """The runs by which each kind of stretch of the rows is found. Where ``RENAMED`` is looked for it finds the others too. A
        secret that has begun moves no gate.
        """
        own = {} if RENAMED in self.marks or self.shape.secrets else {Stretch(self.shape, LEAST_HELD): self.half}
        return {**own, **self.marks}

    def ends(self, stretch: Stretch, run: int) -> bool:
        """Whether with this run such a stretch of the rows ends."""
        own = self.stretches.get(stretch)
        return own is not None and _found(own, run)

    def among(self, stretch: Stretch, runs: Sorted) -> list[int]:
        """Those of ``runs``, in order and each once, that are of such a stretch of the rows."""
        own = self.stretches.get(stretch)
        if own is None:
            return []
        few, many = (runs, own) if len(runs) < len(own) else (own, runs)
        places = np.searchsorted(many, few).clip(max=len(many) - 1)
        return [int(half) for half in few[many[places] == few]]

    @property
    def facts(self) -> dict[str, Any]:
        """What records and evidence say of it."""
        return {**self._described, "digest": self.digest}

    @property
    def label(self) -> str:
        """``name:guard@digest12``, as answers carry it."""
        return f"{self.name}:guard@{self.digest[:12]}"

    @property
    def _described(self) -> dict[str, Any]:
        names = ("name", "action", "bars", "rows", "too_short", "lexemes", "forget_digest", "mark")
        shape = {
            name: value for name, value in asdict(self.shape).items() if name != "secrets" or value
        }  # as it was before
        return {name: getattr(self, name) for name in names} | shape

    def to_bytes(self) -> bytes:
        """The file: a safetensors file with one metadata key. The same rows, options and key give the same bytes."""
        described = canonical_json({**self._described, "format": FORMAT}, nan=False)
        marks = {MARKS[stretch]: runs for stretch, runs in self.marks.items()}
        return save({"whole": self.whole.values, "half": self.half, **marks}, metadata={KEY: described})

    @classmethod
    def from_bytes(cls, data: bytes, origin: str, secret: Secret) -> GuardIndex:
        """Read a file. Raises GuardFileError, beginning with ``origin``: not one, of another format, or made under another key."""
        try:
            arrays = load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            described = json.loads(header["__metadata__"][KEY])
            if described.pop("format") != FORMAT:
                raise GuardFileError(f"{origin}: a guard of another format; post the takedown again")
            shape = Shape(described.pop("run"), described.pop("fold"), described.pop("secrets", False))
            whole, half = (np.ascontiguousarray(arrays[name]) for name in ("whole", "half"))
            marks = {
                one: np.ascontiguousarray(arrays[name]) for one, name in MARKS.items() if len(arrays.get(name, ()))
            }
            if any(values.dtype != np.uint64 or values.ndim != 1 for values in (whole, half, *marks.values())):
                raise ValueError("its tensors are not lists of fingerprints")
            if any((values[:-1] >= values[1:]).any() for values in (whole, half, *marks.values())):
                raise ValueError("its fingerprints are not in order")
            if (
                [type(value) for value in (shape.run, shape.fold, shape.secrets)] != [int, bool, bool]
                or not LEAST_RUN <= shape.run <= MOST_RUN
                or described["action"] not in get_args(Action)
            ):
                raise ValueError("its run or action is none")
            digest = hashlib.sha256(data).hexdigest()
            index = cls(shape=shape, whole=Fingerprints(whole), half=half, marks=marks, digest=digest, **described)
        except _UNREADABLE as error:
            raise GuardFileError(
                f"{origin}: not a guard's file, or damaged ({error}); restore it from a backup"
            ) from error
        if index.mark != secret.mark:
            raise GuardFileError(
                f"{origin}: made under another guard key; give this server the key of the one that made it (guard_key)"
            )
        return index


def _found(values: Sorted, fingerprint: int) -> bool:
    place = bisect_left(values.data, fingerprint)
    return place < len(values) and int(values[place]) == fingerprint


def build_index(
    texts: Iterable[str],
    *,
    name: str,
    secret: Secret,
    run: int | None = None,
    action: Action = "steer",
    bars: int = BARS,
    fold: bool = False,
    secrets: bool = False,
    forget_digest: str = "",
) -> GuardIndex:
    """Index protected ``texts``, each as one row; ``secrets``: by runs of ``run`` letters and digits, where none is given of 12.
    Raises RowsTooShort where none of them holds a run.
    """
    run = run or (SECRET_RUN if secrets else RUN)
    shape = Shape(run, fold, secrets)
    whole, half = array("Q"), array("Q")
    marks = {} if secrets else {stretch: array("Q") for stretch in MARKS if fold or stretch is not RENAMED}
    rows = too_short = lexemes = longest = 0
    for text in texts:
        everything, code = readings(spelt(text) if secrets else text)
        longest = max(longest, len(everything))
        if len(everything) < run:
            too_short += 1
            continue
        rows += 1
        for reading in [everything] if code == everything else [everything, code]:
            lexemes += len(reading)
            whole.extend(shape.runs(reading, run, secret))
            half.extend(shape.runs(reading, shape.half, secret))
            for stretch, found in marks.items():
                found.extend(stretch.runs(reading, secret))
    if not rows:
        if longest < LEAST_RUN:
            remedy = "too few to guard; set options.protect to 'module'"
        else:
            remedy = f"the longest has {longest}; give at most that, or set options.protect to 'module'"
        unit = "letters and digits in its continuation" if secrets else "lexemes (words and punctuation)"
        raise RowsTooShort(f"options.guard.run: no row has {run} {unit}, {remedy}")
    index = GuardIndex(
        name=name,
        shape=shape,
        action=action,
        bars=bars,
        rows=rows,
        too_short=too_short,
        lexemes=lexemes,
        forget_digest=forget_digest,
        mark=secret.mark,
        whole=Fingerprints(np.unique(np.frombuffer(whole, np.uint64))),
        half=np.unique(np.frombuffer(half, np.uint64)),
        marks={stretch: np.unique(np.frombuffer(found, np.uint64)) for stretch, found in marks.items() if found},
    )
    return GuardIndex.from_bytes(index.to_bytes(), name, secret)
