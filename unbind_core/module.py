"""The artifact that applies: a calibrated, frozen unlearning module, and its file.

Fitting makes it, the bank applies it. The file is safetensors with the tensors of its detector and its correction, and one
metadata key ``unbind`` that holds canonical JSON. Its identity is the SHA-256 of its bytes; it is written whole or not at
all; never pickle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from unbind_core.errors import ModelMismatch, ModuleFileError
from unbind_core.fields import field_problems
from unbind_core.files import MAX_BYTES, Memory, read_regular, write_whole
from unbind_core.identity import ModelIdentity
from unbind_core.module_checks import module_problems
from unbind_core.module_file import FLOAT32, TENSORS, UNREADABLE, filed, read, written
from unbind_core.partitions import FIRST_PARTITIONS, PARTITIONS, RowsByPart
from unbind_core.quantisation import computed_in


@dataclass(frozen=True, eq=False)
class UnbindModule:
    """One calibrated module: which states of one decoder layer to change, how, and how far.

    ``detector`` "fisher" (Section 4): w [d]; a = relu(w'h - s_ref); the gate is open where a >= tau, its amount is a.
    "network": w [h,d], b [h], heads [K,h], heads_b [K]; f(h) = heads relu(w h + b) + heads_b; where the largest head's mean
    of f over the last ``window`` positions is tau above s_ref the gate opens, where it is less than tau_close above it
    closes (``tau_close`` None: tau); its amount is 1 while it is open (``unbind_core/applying/gates.py``). Positions of a sequence
    before ``first`` are no part of the mean, and fewer than ``least`` count as so many. With ``hold``, a longer window, it closes
    only where the mean over that one is less than tau_close above s_ref as well.

    ``correction`` "push": v [d] of unit length; h becomes h - amount kappa v. "lowrank": u [d,r], a [r,d], c [d], with r from 1 to
    256; h becomes h + amount kappa (u (a h) + c). "network": also e [r], with r up to 1,024; h becomes h + amount kappa
    (u relu(a h + e) + c), and u and a are bfloat16 (``unbind_core/applying/corrections.py``). ``policy`` says what the module aims
    at: "silent", the answer ends, or "rewrite", it goes another way. ``calibrated``: {"dtype", "quantisation"} of the model it
    was calibrated on.

    Other tensors are FP32, all on the CPU. ``layer`` counts from 0 and acts on that decoder layer's output. ``partitions`` are row
    indices; the remaining mappings are JSON and say how the module came to be. Raises ModuleFileError, naming the field, where a
    value makes no sense. Modules are equal if their files are.
    """

    name: str
    layer: int
    w: Tensor
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
    first: int = 0
    least: int = 1
    tau_close: float | None = None
    hold: int | None = None
    b: Tensor | None = None
    heads: Tensor | None = None
    heads_b: Tensor | None = None
    correction: str = "push"
    policy: str = "silent"
    calibrated: Mapping[str, Any] = field(default_factory=lambda: dict(FLOAT32))
    v: Tensor | None = None
    u: Tensor | None = None
    a: Tensor | None = None
    c: Tensor | None = None
    e: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot be applied, so that a module in hand is a module that works."""
        for name, problem in module_problems(self):
            raise ModuleFileError(f"module '{self.name}': {name} {problem}")

    def __eq__(self, other: object) -> bool:
        """Equal files, equal modules."""
        return isinstance(other, UnbindModule) and self.digest == other.digest

    def __hash__(self) -> int:
        """By the file's digest."""
        return hash(self.digest)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the file by name: those of the detector and those of the correction."""
        named = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor.contiguous() for name, tensor in named.items() if tensor is not None}

    @property
    def network(self) -> tuple[Tensor, Tensor, Tensor]:
        """b, heads and heads_b of a network detector. Raises ModuleFileError for another kind."""
        if self.b is None or self.heads is None or self.heads_b is None:
            raise ModuleFileError(f"module '{self.name}': detector '{self.detector}' has no network")
        return self.b, self.heads, self.heads_b

    @property
    def rank(self) -> int:
        """The rank of a low-rank correction, the hidden units of a network; 0 for a push, which is the same at every state."""
        return 0 if self.u is None else self.u.shape[1]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file's bytes, in hex; the module's identity."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The module file as bytes; the same module gives the same bytes."""
        try:
            described = self.describe()
            data = written(self.tensors, filed(described))
            read_back = json.loads(json.dumps(described))
        except (TypeError, ValueError, RecursionError) as error:
            raise ModuleFileError(
                f"module '{self.name}': its metadata is not JSON ({error}); use plain finite values"
            ) from error
        for name, problem in field_problems({key: read_back[key] for key in read_back.keys() - {"format"}}):
            raise ModuleFileError(f"module '{self.name}': {name} {problem}")
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
    def from_bytes(cls, data: bytes | Memory, origin: str = "module file", digest: str | None = None) -> UnbindModule:
        """Validate the bytes of a module file; errors begin with ``origin``. Raises as :meth:`load` does.

        Memory that can be written to becomes the module's own, which nobody may change any more; of bytes it takes a copy.
        ``digest``: their SHA-256, in hex, where somebody has just held it against that of a file that was read before: then
        the file's own checksum is not asked.
        """
        memory = bytearray(data) if isinstance(data, bytes) else data
        tensors, described = read(memory, origin, known=digest is not None)
        for name, problem in field_problems(described):
            raise ModuleFileError(f"{origin}: metadata field {name} {problem}; fit it again")
        for part in FIRST_PARTITIONS:
            if part not in described["partitions"]:
                raise ModuleFileError(f"{origin}: metadata field partitions.{part} is missing; fit it again")
        if not isinstance(described["partitions"], RowsByPart):
            described["partitions"] = RowsByPart(described["partitions"])
        described |= {"model": ModelIdentity(**described["model"]), "forms": tuple(described["forms"]), **tensors}
        try:
            module = cls(**described)
        except ModuleFileError as error:
            raise ModuleFileError(f"{origin}: {error}") from error
        except UNREADABLE as error:
            raise ModuleFileError(f"{origin}: cannot be made a module ({error}); fit it again") from error
        module.__dict__["digest"] = digest or hashlib.sha256(data).hexdigest()
        return module

    def require(self, model: ModelIdentity) -> None:
        """Raise ModelMismatch unless the module was fitted on exactly this model, adapter, tokenizer and quantisation."""
        if self.model.fingerprint != model.fingerprint:
            raise ModelMismatch(
                f"module '{self.name}' was fitted on '{self.model.name}' ({self._on(self.model, self.calibrated)}), not on "
                f"'{model.name}' ({self._on(model, asdict(model))}): weights, quantisation, configuration, tokenizer or adapter "
                f"differ; {_REMEDY}"
            )
        if (self.model.hidden_size, self.model.num_layers) != (model.hidden_size, model.num_layers):
            raise ModelMismatch(
                f"module '{self.name}': model is said to be {self.model.hidden_size} wide with {self.model.num_layers} layers; "
                f"it is {model.hidden_size} wide with {model.num_layers}; restore the original file"
            )

    def require_shape(self, hidden_size: int | None, num_layers: int) -> None:
        """Raise ModelMismatch unless a model of this width (None where it is not told) and number of layers can be the module's.

        For a model that nobody has identified: it tells models of other sizes apart, and adapters or weights not at all.
        """
        if num_layers != self.model.num_layers or hidden_size not in (None, self.model.hidden_size):
            width = "" if hidden_size is None else f"{hidden_size} wide "
            raise ModelMismatch(
                f"module '{self.name}' was fitted on '{self.model.name}', {self.model.hidden_size} wide with "
                f"{self.model.num_layers} layers, for layer {self.layer}; this model is {width}with {num_layers} layers; take "
                "the model that the module was fitted on, or fit the forget set again on this one"
            )

    def require_numerics(self, running: Mapping[str, Any]) -> None:
        """Raise ModelMismatch unless the module was calibrated in the numerics that the model runs in.

        ``running`` as :func:`unbind_core.architecture.numerics` gives it. Thresholds found in one precision say little of the
        states of another.
        """
        if not self.in_numerics(running):
            own, other = (_numerics_told(one) for one in (self.calibrated, running))
            remedy = f"run the model with --dtype {self.calibrated['dtype']}"
            if self.calibrated["dtype"] == running["dtype"]:
                remedy = "take the model that it was fitted on"
            raise ModelMismatch(
                f"module '{self.name}' was calibrated in {own}, and the model runs in {other}; {remedy}, or {_REMEDY}"
            )

    def in_numerics(self, running: Mapping[str, Any]) -> bool:
        """Whether the module was calibrated in these; of quantisations the format counts, as the fingerprint holds the rest."""
        own, other = ((of["dtype"], computed_in(of["quantisation"])) for of in (self.calibrated, running))
        return own == other

    @staticmethod
    def _on(model: ModelIdentity, numerics: Mapping[str, Any]) -> str:
        return f"{model.fingerprint[:12]}, {numerics['quantisation'] or 'not quantised'}"

    def renamed(self, name: str) -> UnbindModule:
        """The same module under another name; its digest differs."""
        return replace(self, name=name)

    def known_as(self, key: str) -> UnbindModule:
        """The same module, digest and all, under a key of an engine's own: nothing is checked a second time."""
        other = copy(self)
        other.__dict__.update(name=key, digest=self.digest)
        return other

    def describe(self) -> dict[str, Any]:
        """All metadata as plain JSON values (less the checksum); a file leaves out what its format implies."""
        described: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in TENSORS}
        described["model"] = {key: value for key, value in asdict(self.model).items() if key != "quantisation"}
        parts = (key for key in PARTITIONS if key in FIRST_PARTITIONS or key in self.partitions)
        described["partitions"] = {key: list(self.partitions.get(key, ())) for key in parts}
        for key in ("budgets", "measured", "versions", "settings", "calibrated"):
            described[key] = dict(described[key])
        return described | {"format": filed(described)["format"]}


# What may be done where a module was made for another model than the one that runs.
_REMEDY = (
    "fit the forget set again on the service as it runs, or, where a takedown there made the module and its rows are kept, have it "
    "measured: unbind module verify --adopt NAME"
)


def _numerics_told(numerics: Mapping[str, Any]) -> str:
    quantisation = numerics["quantisation"]
    return str(numerics["dtype"]) + (f" with {quantisation} weights" if quantisation else "")
