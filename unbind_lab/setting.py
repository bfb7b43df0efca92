"""A setting: which models and rows a table is of, and the budget that systems are tuned with. Data, read from TOML, and loaded."""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from unbind_core.architecture import LoadedModel, load_model
from unbind_core.errors import UnbindError
from unbind_core.fields import DTYPES
from unbind_core.rows import ForgetRow, RetainRow, parse_forget, parse_retain, spread

T = TypeVar("T")
HERE = Path(__file__).parent
# What systems are made and chosen by, and not measured on.
MADE_WITH = (
    *("retain_training", "forget_validation", "retain_validation", "validation_rows", "validation_completed_rows"),
    *("rows_an_update", "seed", "learning_rates", "updates", "modules"),
)
ROOT = HERE.parent  # what paths of a shipped setting are relative to; those of others are to their own folder
WORLDS = Path(".unbind/worlds")  # where ``unbind lab build`` puts what it makes


@dataclass(frozen=True)
class Setting:
    """Paths of models, rows and modules; sizes; the grid of the trained systems. ``settings/demo.toml`` says what each is for."""

    name: str
    base: Path
    full: Path
    retrained: Path
    forget: Path
    retain: Path
    retain_training: Path
    forget_validation: Path
    retain_validation: Path
    retain_rows: int = 150
    completed_rows: int = 48
    validation_rows: int = 40
    validation_completed_rows: int = 12
    access_attempts: int = 5
    takedowns: int = 20
    rows_an_update: int = 8
    seed: int = 0
    dtype: str = "float32"
    learning_rates: tuple[float, ...] = (1e-4, 4e-4, 1.6e-3)
    updates: tuple[int, ...] = (6, 18)
    modules: Mapping[str, Path] = field(default_factory=dict)
    evalplus: Path | None = None

    @classmethod
    def load(cls, name: str) -> Setting:
        """A shipped setting or one that was built, by name, or one of your own by the path of its TOML file.

        Raises UnbindError naming what is wrong.
        """
        shipped = HERE / "settings" / f"{name}.toml"
        built = WORLDS / name / f"{name}.toml"
        path = next((one for one in (shipped, built) if one.is_file()), Path(name))
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in (HERE / "settings").glob("*.toml")))
            recipes = sorted(file.stem for file in (HERE / "recipes").glob("*.toml"))
            if name in recipes:
                raise UnbindError(f"setting: '{name}' is not built here; run unbind lab build {name} first")
            raise UnbindError(
                f"setting: '{name}' is neither a file nor one of {known}, nor, once built, of {', '.join(recipes)}"
            )
        home = ROOT if path == shipped else path.resolve().parent
        try:
            values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UnbindError(f"setting: {path} is not TOML ({error})") from None
        known_fields = {one.name: str(one.type) for one in fields(cls)}
        for key in values:
            if key not in known_fields:
                raise UnbindError(
                    f"setting: '{key}' in {path} is unknown; choose from {', '.join(sorted(known_fields))}"
                )
        for key, kind in known_fields.items():
            if kind == "Path" and key not in values:
                raise UnbindError(f"setting: '{key}' is missing in {path}")
            if key == "dtype" and values.get(key, "float32") not in DTYPES:
                raise UnbindError(f"setting: 'dtype' in {path} is {values[key]!r}; choose from {', '.join(DTYPES)}")
            if key in values:
                require(key, values[key], kind, f"setting: '{key}' in {path}")
            if key in values and kind in ("Path", "Path | None"):
                values[key] = home / values[key]
            elif key in values and kind.startswith("tuple"):
                values[key] = tuple(values[key])
        values["modules"] = {key: home / value for key, value in values.get("modules", {}).items()}
        return cls(**{"name": path.stem, **values})

    def described(self) -> dict[str, Any]:
        """What figures depend on: every number, and of every file its SHA-256 in place of its path."""
        found = asdict(self)
        del found["evalplus"]  # no system is made of it; the protocol that reads it has its files' digests
        for key, value in found.items():
            if isinstance(value, Path):
                found[key] = contents(value)
        for key, value in (("dtype", "float32"), ("takedowns", 20)):
            if found[key] == value:  # came later: what was made without it is still made of the same
                del found[key]
        found["modules"] = {key: contents(value) for key, value in self.modules.items()}
        return found

    @staticmethod
    def measured_on(described: Mapping[str, Any]) -> dict[str, Any]:
        """Of what ``described`` says, what figures of two systems must have in common to stand in one table."""
        return {key: value for key, value in described.items() if key not in MADE_WITH}


def require(key: str, value: Any, kind: str, which: str) -> None:
    """Raise UnbindError, which begins with ``which``, where a value is not what the field ``key`` of a setting takes."""
    if not _fits(value, key, kind):
        raise UnbindError(f"{which} is {value!r}; give {_wanted(key, kind)}")


def _fits(value: Any, key: str, kind: str) -> bool:
    """Whether a value of the file is of its field's kind, and of a size that something can be measured with."""
    if key == "name":
        return isinstance(value, str) and value not in ("", ".", "..") and Path(value).name == value
    if kind.startswith("Mapping"):
        return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())
    if kind.startswith("tuple"):
        return isinstance(value, list) and bool(value) and all(_number(one, whole="int" in kind) for one in value)
    if kind == "int":
        return type(value) is int if key == "seed" else _number(value, whole=True)
    return isinstance(value, str)


def _number(value: Any, *, whole: bool) -> bool:
    return type(value) in ((int,) if whole else (int, float)) and 0 < value < math.inf


def _wanted(key: str, kind: str) -> str:
    """What a value must be, for people."""
    if key == "name":
        return "a name of a folder, without a path"
    if key == "seed":
        return "a whole number"
    if kind.startswith("Mapping"):
        return "a table of paths"
    if kind.startswith("tuple"):
        return f"a list of {'whole ' if 'int' in kind else ''}numbers above 0"
    return "a whole number above 0" if kind == "int" else "a path"


def contents(path: Path) -> str:
    """SHA-256 of a file, or of the configurations, weights, tokenizer and rows in a folder."""
    kinds = ("*.safetensors", "*.json", "*.jsonl")
    files = [file for kind in kinds for file in sorted(path.glob(kind))] if path.is_dir() else [path]
    try:
        return hashlib.sha256(b"".join(_sha256(file) for file in files)).hexdigest()
    except OSError as error:
        raise UnbindError(f"setting: {error.strerror}: '{error.filename}'") from None


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:  # weights of many gigabytes are not wanted in memory for it
        return hashlib.file_digest(file, "sha256").digest()


class Bench:
    """A setting's models and rows, each read when it is first asked for."""

    def __init__(self, setting: Setting, device: str = "cpu") -> None:
        self.setting, self._device = setting, device

    def _model(self, adapter: Path | None, *, merge: bool = True) -> LoadedModel:
        dtype = getattr(torch, self.setting.dtype)
        return load_model(self.setting.base, adapter, dtype=dtype, device=self._device, merge=merge)

    def _rows(self, parse: Callable[[Path, str], list[T]], field: str) -> list[T]:
        path: Path = getattr(self.setting, field)
        try:
            rows = parse(path, path.name)
        except OSError as error:
            raise UnbindError(
                f"setting: '{field}' is {path}, which cannot be read ({error.strerror}); name a JSONL file of rows"
            ) from None
        if not rows:
            raise UnbindError(f"setting: '{field}' is {path}, which holds no row; name a JSONL file of rows")
        return rows

    @cached_property
    def full(self) -> LoadedModel:
        """M_full, its adapter merged. Nobody changes it."""
        return self._model(self.setting.full)

    @cached_property
    def retrained(self) -> LoadedModel:
        """M_retrain: for figures alone."""
        return self._model(self.setting.retrained)

    @cached_property
    def base(self) -> LoadedModel:
        """The model before adaptation."""
        return self._model(None)

    def adapted(self) -> nn.Module:
        """A new M_full with its adapter beside the weights, to be trained on."""
        return self._model(self.setting.full, merge=False).model

    @cached_property
    def forget(self) -> list[ForgetRow]:
        """The rows to forget that are reported."""
        return self._rows(parse_forget, "forget")

    @cached_property
    def retain(self) -> list[RetainRow]:
        """The retain rows that are reported."""
        return _some(self._rows(parse_retain, "retain"), self.setting.retain_rows)

    @cached_property
    def retain_training(self) -> list[RetainRow]:
        """The retain rows that systems are made with."""
        return self._rows(parse_retain, "retain_training")

    @cached_property
    def forget_validation(self) -> list[ForgetRow]:
        """Another forget set: what configurations are chosen by."""
        return self._rows(parse_forget, "forget_validation")

    @cached_property
    def retain_validation(self) -> list[RetainRow]:
        """The retain rows that configurations are chosen by, all of them."""
        return self._rows(parse_retain, "retain_validation")

    @cached_property
    def retain_chosen_by(self) -> list[RetainRow]:
        """So many of them as a candidate is measured on."""
        return _some(self.retain_validation, self.setting.validation_rows)


def _some(rows: list[RetainRow], most: int) -> list[RetainRow]:
    return [rows[i] for i in spread(range(len(rows)), most)]
