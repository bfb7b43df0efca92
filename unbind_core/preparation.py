"""What every fit begins with: checked rows and options, partitions, and how a module of this fit is described."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from unbind_core.architecture import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.options import Clock, FitOptions
from unbind_core.progress import ProgressCallback
from unbind_core.rows import ForgetRow, Partitions, RetainRow, forget_digest
from unbind_core.windows import Window, forget_windows, retain_windows


@dataclass(frozen=True)
class Preparation:
    """One fit's inputs. ``retain`` holds the rows set apart for calibration last; ``exactness`` is the self-check's error."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    identity: ModelIdentity
    name: str
    forget: Sequence[ForgetRow]
    retain: Sequence[RetainRow]
    parts: Partitions
    layers: list[int]
    forms: tuple[str, ...]
    pad: int
    options: FitOptions
    progress: ProgressCallback
    cache: Path | None
    clock: Clock
    exactness: float

    def forget_windows(self, indices: Sequence[int]) -> list[Window]:
        """Windows of forget rows in the fit's forms."""
        return forget_windows(self.tokenizer, self.forget, indices, self.forms, self.options.max_window)

    def retain_windows(self, indices: Sequence[int]) -> list[Window]:
        """Windows of retain rows in the fit's forms."""
        return retain_windows(
            self.tokenizer, self.retain, indices, self.forms, self.options.max_window, self.options.seed
        )

    def module(self, **of_gate: Any) -> UnbindModule:
        """A module of this fit; ``of_gate`` are its layer, tensors, scalars and what was measured."""
        return UnbindModule(
            name=self.name, model=self.identity, forms=self.forms,
            partitions={key: tuple(rows) for key, rows in self.parts.to_json().items()},
            budgets=asdict(self.options.limits), forget_digest=forget_digest(self.forget), settings=self.options.to_json(),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"), versions=_versions(), **of_gate,
        )  # fmt: skip


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
