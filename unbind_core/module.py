"""The artifact that applies: a calibrated, frozen unlearning module, and its file.

Fitting makes it, the bank applies it. The file is safetensors with tensors ``w`` and ``v`` and one metadata key
``unbind`` that holds canonical JSON. Its identity is the SHA-256 of its bytes; it is written whole or not at all; never
pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unbind_core.errors import ModelMismatch, ModuleFileError
from unbind_core.fields import field_problems, is_number
from unbind_core.files import MAX_BYTES, read_regular, write_whole
from unbind_core.identity import ModelIdentity
from unbind_core.module_file import DETECTORS, FORMAT, TENSORS, UNREADABLE, read, shown, written

PARTITIONS = ("forget_fit", "forget_calibration", "forget_validation", "retain_fit", "retain_calibration")
MAX_GATE_WINDOW = 256  # positions
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_UNIT = 1e-3  # how far the norm of v may be from 1: rounding to FP32, no more


@dataclass(frozen=True, eq=False)
class UnbindModule:
    """One calibrated module: which states of one decoder layer to change, along which direction, how far.

    ``detector`` "fisher" (Section 4): w [d]; a = relu(w'h - s_ref); where a >= tau, h becomes h - kappa a v.
    "network": w [h,d], b [h], heads [K,h], heads_b [K]; f(h) = heads relu(w h + b) + heads_b; where the largest head's mean
    of f over the last ``window`` positions is tau above s_ref the gate opens, where it is less than tau_close above it
    closes (``tau_close`` None: tau), and while it is open h becomes h - kappa v (``unbind_core/applying/gates.py``).
    Tensors are FP32 on the CPU, ``v`` [d] of unit length. ``layer`` counts from 0 and acts on that decoder layer's output.
    ``partitions`` are row indices; the remaining mappings are JSON and say how the module came to be. Raises
    ModuleFileError, naming the field, where a value makes no sense. Modules are equal if their files are.
    """

    name: str
    layer: int
    w: Tensor
    v: Tensor
    s_ref: float
    tau: float
    kappa: float
    quantile: float | None
    model: ModelIdentity
    forms: tuple[str, ...]
    partitions: Mapping[str, tuple[int, ...]]
    budgets: Mapping[str, Any]
    measured: Mapping[str, Any]
    forget_digest: str
    created_at: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    detector: str = "fisher"
    window: int = 1
    tau_close: float | None = None
    b: Tensor | None = None
    heads: Tensor | None = None
    heads_b: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be applied, so that a module in hand is a module that works."""
        _check(self)

    def __eq__(self, other: object) -> bool:
        """Equal files, equal modules."""
        return isinstance(other, UnbindModule) and self.digest == other.digest

    def __hash__(self) -> int:
        """By the file's digest."""
        return hash(self.digest)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the file by name: w and v, and for a network b, heads and heads_b."""
        named = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor.contiguous() for name, tensor in named.items() if tensor is not None}

    @property
    def network(self) -> tuple[Tensor, Tensor, Tensor]:
        """b, heads and heads_b of a network detector. Raises ModuleFileError for another kind."""
        if self.b is None or self.heads is None or self.heads_b is None:
            raise ModuleFileError(f"module '{self.name}': detector '{self.detector}' has no network")
        return self.b, self.heads, self.heads_b

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file's bytes, in hex; the module's identity."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The module file as bytes; the same module gives the same bytes."""
        try:
            described = self.describe()
            data = written(self.tensors, described)
            read_back = json.loads(json.dumps(described))
        except (TypeError, ValueError, RecursionError) as error:
            raise ModuleFileError(
                f"module '{self.name}': its metadata is not JSON ({error}); use plain finite values"
            ) from error
        for field, problem in field_problems({key: read_back[key] for key in read_back.keys() - {"format"}}):
            raise ModuleFileError(f"module '{self.name}': {field} {problem}")
        return data

    def save(self, path: str | Path) -> str:
        """Write the file whole or not at all (temporary file, fsync, rename); returns the digest. OSError passes."""
        data = self.to_bytes()

        def write(temporary: Path) -> None:
            temporary.write_bytes(data)
            temporary.chmod(0o644)  # the service that serves the module need not be the account that fitted it

        write_whole(Path(path), write)
        return hashlib.sha256(data).hexdigest()

    @classmethod
    def load(cls, path: str | Path, model: ModelIdentity | None = None) -> UnbindModule:
        """Read and validate a module file.

        Raises ModuleFileError where the file is missing, no regular file, larger than MAX_BYTES, truncated, foreign, edited
        by hand or of another format version, and ModelMismatch where ``model`` is given and is not the model that the module
        was fitted on.
        """
        try:
            data = read_regular(Path(path), MAX_BYTES)
        except OSError as error:
            raise ModuleFileError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error
        module = cls.from_bytes(data, str(path))
        if model is not None:
            module.require(model)
        return module

    @classmethod
    def from_bytes(cls, data: bytes, origin: str = "module file") -> UnbindModule:
        """Validate the bytes of a module file; errors begin with ``origin``. Raises as :meth:`load` does."""
        tensors, described = read(data, origin)
        for field, problem in field_problems(described):
            raise ModuleFileError(f"{origin}: metadata field {field} {problem}; fit it again")
        for part in PARTITIONS:
            if part not in described["partitions"]:
                raise ModuleFileError(f"{origin}: metadata field partitions.{part} is missing; fit it again")
        made = {"model": ModelIdentity(**described["model"]), "forms": tuple(described["forms"])}
        made["partitions"] = {key: tuple(rows) for key, rows in described["partitions"].items()}
        try:
            module = cls(**(described | tensors | made))
        except ModuleFileError as error:
            raise ModuleFileError(f"{origin}: {error}") from error
        except UNREADABLE as error:
            raise ModuleFileError(f"{origin}: cannot be made a module ({error}); fit it again") from error
        module.__dict__["digest"] = hashlib.sha256(data).hexdigest()
        return module

    def require(self, model: ModelIdentity) -> None:
        """Raise ModelMismatch unless the module was fitted on exactly this model, adapter and tokenizer."""
        if self.model.fingerprint != model.fingerprint:
            raise ModelMismatch(
                f"module '{self.name}' was fitted on '{self.model.name}' ({self.model.fingerprint[:12]}), not on "
                f"'{model.name}' ({model.fingerprint[:12]}): weights, configuration, tokenizer or adapter differ; "
                "fit the forget set again on this model"
            )
        if (self.model.hidden_size, self.model.num_layers) != (model.hidden_size, model.num_layers):
            raise ModelMismatch(
                f"module '{self.name}': model is said to be {self.model.hidden_size} wide with {self.model.num_layers} layers; "
                f"it is {model.hidden_size} wide with {model.num_layers}; restore the original file"
            )

    def renamed(self, name: str) -> UnbindModule:
        """The same module under another name; its digest differs."""
        return replace(self, name=name)

    def describe(self) -> dict[str, Any]:
        """All metadata as plain JSON values, as the file holds them (less the checksum)."""
        described: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in TENSORS}
        described["model"] = asdict(self.model)
        described["partitions"] = {key: list(self.partitions.get(key, ())) for key in PARTITIONS}
        for key in ("budgets", "measured", "versions", "settings"):
            described[key] = dict(described[key])
        return described | {"format": FORMAT}


def _check(module: UnbindModule) -> None:
    """Raise ModuleFileError naming the first field that cannot be applied."""
    for field, problem in _problems(module):
        raise ModuleFileError(f"module '{module.name}': {field} {problem}")


def _problems(module: UnbindModule) -> Iterator[tuple[str, str]]:
    """Every (field, what is wrong with it), first things first: later checks may rest on earlier ones."""
    size, count = module.model.hidden_size, module.model.num_layers
    if not _NAME.fullmatch(str(module.name)):
        yield "name", "must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit"
    if type(module.layer) is not int or not 0 <= module.layer < count:
        yield "layer", f"is {module.layer!r}; the model has layers 0 to {count - 1}"
    if module.detector not in DETECTORS:
        yield "detector", f"{module.detector!r} cannot be applied by this version; upgrade this software"
    if set(module.tensors) != DETECTORS[module.detector]:
        yield "detector", f"'{module.detector}' needs the tensors {', '.join(sorted(DETECTORS[module.detector]))}"
    yield from _tensor_problems("v", module.v, (size,))
    if abs(float(module.v.double().norm()) - 1) > _UNIT:
        yield "v", f"must have unit length, not {float(module.v.double().norm()):.4f}; the strength belongs in kappa"
    for field, low, needed in (
        ("s_ref", -math.inf, ""),
        ("tau", 0, " and not negative"),
        ("kappa", 0, " and not negative"),
    ):
        value = getattr(module, field)
        if not is_number(value) or value < low:
            yield field, f"is {shown(value)}; it must be a finite number{needed}, in single precision"
    yield from _detector_problems(module, size)
    if module.quantile is not None and not (is_number(module.quantile) and 0 <= module.quantile <= 1):
        yield "quantile", f"is {shown(module.quantile)}; it must lie between 0 and 1, or be null"
    for key in module.partitions:
        if key not in PARTITIONS:
            yield "partitions", f"has an unknown part '{key}'; known are {', '.join(PARTITIONS)}"
    for kind in ("forget", "retain"):
        rows = [row for key in PARTITIONS if key.startswith(kind) for row in module.partitions.get(key, ())]
        if any(type(row) is not int or row < 0 for row in rows) or len(rows) != len(set(rows)):
            yield "partitions", f"of the {kind} rows must be distinct row indices, each in one part"


def _detector_problems(module: UnbindModule, size: int) -> Iterator[tuple[str, str]]:
    """The detector's tensors, its window and its second threshold."""
    if module.detector == "fisher":
        yield from _tensor_problems("w", module.w, (size,))
        for field, needed in (("window", (1,)), ("tau_close", (None, module.tau))):
            if getattr(module, field) not in needed:
                yield (
                    field,
                    f"is {getattr(module, field)!r}; the 'fisher' detector has no memory: {needed[0]!r} is needed",
                )
        return
    b, heads, heads_b = module.network
    width, count = b.numel(), heads_b.numel()
    shapes = (("w", module.w, (width, size)), ("b", b, (width,)), ("heads", heads, (count, width)))
    for field, tensor, shape in (*shapes, ("heads_b", heads_b, (count,))):
        yield from _tensor_problems(field, tensor, shape, zero=field in ("b", "heads_b"))
    if type(module.window) is not int or not 1 <= module.window <= MAX_GATE_WINDOW:
        yield "window", f"is {module.window!r}; it must be a whole number of positions from 1 to {MAX_GATE_WINDOW}"
    if not module.tau > 0:
        yield "tau", f"is {module.tau!r}; a network's threshold must lie above s_ref"
    close = module.tau_close
    if close is not None and not (is_number(close) and 0 <= close <= module.tau):
        yield "tau_close", f"is {shown(close)}; it must lie between 0 and tau, or be null"


def _tensor_problems(
    field: str, tensor: Tensor, shape: tuple[int, ...], zero: bool = False
) -> Iterator[tuple[str, str]]:
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or tuple(tensor.shape) != shape:
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        yield field, f"must be float32 {list(shape)} on the CPU, not {found}"
    if not bool(torch.isfinite(tensor).all()) or not (zero or float(tensor.norm()) > 0):
        yield field, "must be finite and not all zero; fit it again"
