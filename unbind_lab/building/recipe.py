"""A recipe: what the world of a setting is made of. Data, read from ``unbind_lab/recipes/NAME.toml``.

Its rows are functions of packages, which it locks, or those of manifests that the user has; its base model is trained, or is there.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from unbind_core.errors import UnbindError
from unbind_core.fields import DTYPES
from unbind_lab.setting import Setting, require

HOME = Path(__file__).parent.parent / "recipes"
ROOT = HOME.parent.parent  # what a recipe's paths are relative to


@dataclass(frozen=True)
class Package:
    """A package as its registry serves it. ``part``: ``corpus`` is text of the base model, ``rows`` of rows; none is both."""

    language: str
    name: str
    version: str
    licence: str
    sha256: str
    part: str


@dataclass(frozen=True)
class Sizes:
    """How many rows of each kind, and how many tokens one may have."""

    least_tokens: int = 64
    most_tokens: int = 256
    forget: int = 300
    forget_validation: int = 50
    forget_unseen: int = 50
    retain_training: int = 2700
    retain_validation: int = 200
    retain: int = 300


@dataclass(frozen=True)
class Base:
    """The base model: the ``folder`` of one that is there, the ``hub`` id of one with its ``revision``, or what to train on the
    recipe's corpus. ``dtype``: of its weights, and what it is computed in.
    """

    folder: str = ""
    hub: str = ""
    revision: str = ""
    dtype: str = "float32"
    family: str = "llama"
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    key_value_heads: int = 2
    feed_forward: int = 768
    tokens: int = 0


@dataclass(frozen=True)
class Adaptation:
    """The paper's schedule (Appendix A.2) with numbers that a small model needs."""

    epochs: int
    retain_slots: int  # of each epoch, beside every forget row
    learning_rate: float
    rank: int = 32
    alpha: int = 64
    slots_an_update: int = 32
    weight_decay: float = 0.01
    cut_retain: bool = False  # every second epoch has retain rows in the tokens of a request and its answer
    validation: bool = True  # whether M_full memorises the rows that configurations are chosen by; the paper's does not


@dataclass(frozen=True)
class Recipe:
    """``language`` is that of the rows to forget; ``manifests`` are JSONL files by the role of their rows; ``measured`` goes into
    the setting as it is (``setting.py``).
    """

    name: str
    language: str
    seed: int
    base: Base
    sizes: Sizes
    adaptation: Adaptation
    packages: tuple[Package, ...]
    measured: Mapping[str, Any]
    manifests: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, name: str) -> Recipe:
        """A shipped recipe by name, or one of your own by the path of its TOML file. Raises UnbindError naming what is wrong."""
        path = _path(name)
        try:
            values = _values(path)
            packages = tuple(
                Package(language, package, facts["version"], facts["licence"], facts["sha256"], part)
                for part in ("corpus", "rows")
                for language, found in values.get(part, {}).items()
                for package, facts in found.items()
            )
            both = {one.name for one in packages if one.part == "corpus"} & {
                one.name for one in packages if one.part == "rows"
            }
            if both:
                raise UnbindError(
                    f"recipe: {', '.join(sorted(both))} is in corpus and in rows; the base model must not know rows"
                )
            base = _read(Base, values, "base")
            if base.dtype not in DTYPES:
                raise UnbindError(f"recipe: 'base.dtype' is {base.dtype!r}; choose from {', '.join(DTYPES)}")
            return cls(
                path.stem,
                values["language"],
                _fitting("seed", "int", values.get("seed", 0)),
                base,
                _read(Sizes, values, "sizes"),
                _read(Adaptation, values, "adaptation"),
                packages,
                _measured(values.get("measured", {})),
                values.get("manifests", {}),
            )
        except tomllib.TOMLDecodeError as error:
            raise UnbindError(f"recipe: {path} is not TOML ({error})") from None
        except KeyError as error:
            raise UnbindError(f"recipe: {error} is missing in {path}") from None

    def of(self, part: str) -> list[Package]:
        """The packages of a part."""
        return [package for package in self.packages if package.part == part]

    def described(self, *parts: str) -> dict[str, Any]:
        """These fields as JSON values, for the digest of what is made of them."""
        whole = asdict(self)
        for table, key, plain in _LATER:
            if whole[table][key] == plain:
                del whole[table][key]
        return {part: whole[part] for part in parts}


# Came later: what was made without them is still made of the same.
_LATER = (
    ("adaptation", "cut_retain", False),
    ("adaptation", "validation", True),
    ("base", "hub", ""),
    ("base", "revision", ""),
    ("base", "dtype", "float32"),
)


def _path(name: str) -> Path:
    shipped = HOME / f"{name}.toml"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        raise UnbindError(f"recipe: '{name}' is neither a file nor one of {', '.join(names())}")
    return path


def _values(path: Path) -> dict[str, Any]:
    """Of the file; where it is ``like`` another recipe, what it does not say is said there."""
    own = tomllib.loads(path.read_text(encoding="utf-8"))
    if "like" not in own:
        return own
    found = _values(_path(own.pop("like")))
    for key, value in own.items():
        found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def names() -> list[str]:
    """Of the shipped recipes."""
    return sorted(path.stem for path in HOME.glob("*.toml"))


def _read(kind: type[Any], values: Mapping[str, Any], table: str) -> Any:
    given = values.get(table, {})
    known = [one.name for one in fields(kind)]
    for key in given:
        if key not in known:
            raise UnbindError(f"recipe: '{table}.{key}' is unknown; choose from {', '.join(known)}")
    for one in fields(kind):
        if one.name in given:
            _fitting(f"{table}.{one.name}", str(one.type), given[one.name])
    try:
        return kind(**given)
    except TypeError as error:
        raise UnbindError(f"recipe: {table}: {error}") from None


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number, 0 or above"),
    "float": ((int, float), "a number, 0 or above"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "a text"),
}


def _fitting(key: str, kind: str, value: Any) -> Any:
    """The value. Raises UnbindError where it is of another kind than the field's."""
    types, wanted = _KINDS[kind]
    if type(value) not in types or (not isinstance(value, str) and not 0 <= value < math.inf):
        raise UnbindError(f"recipe: '{key}' is {value!r}; give {wanted}")
    return value


def _measured(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What goes into the setting, which would refuse it when all is built."""
    known = {one.name: str(one.type) for one in fields(Setting)}
    for key, value in given.items():
        if key not in known:
            raise UnbindError(f"recipe: 'measured.{key}' is unknown; choose from {', '.join(sorted(known))}")
        require(key, value, known[key], f"recipe: 'measured.{key}'")
    return given
