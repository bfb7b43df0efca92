"""What every fit begins with: checked rows and options, partitions, and how a module of this fit is described."""

from __future__ import annotations

import platform
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from unbind_core.architecture import numerics
from unbind_core.encoding import encode
from unbind_core.errors import InsufficientRows
from unbind_core.evaluation.metrics import EXTRACTED_SPAN, spans
from unbind_core.evaluation.scores import RowScore
from unbind_core.fitting.options import Clock, FitOptions
from unbind_core.fitting.variations import LONGEST, Elsewhere
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback
from unbind_core.rows import ForgetRow, Partitions, RetainRow, forget_digest
from unbind_core.windows import Window, forget_windows, retain_windows, window_limit

_ROLES = {"retain_fit": "to fit on", "retain_calibration": "to choose by"}
LEAD = (50, 600)  # characters of other code in front of a row


@dataclass(frozen=True)
class Context:
    """One fit's inputs. ``retain`` holds the rows set apart for calibration last; ``exactness`` is the self-check's error,
    ``before`` what is known of the unedited model's greedy completions of the forget rows.
    """

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
    before: Sequence[RowScore] | None = None

    def forget_windows(self, indices: Sequence[int]) -> list[Window]:
        """Windows of forget rows in the fit's forms."""
        return forget_windows(self.tokenizer, self.forget, indices, self.forms, self.options.max_window)

    def varied_windows(self) -> list[Window]:
        """Windows of all forget rows as they are met elsewhere (``variations.py``), drawn by the seed."""
        rng, found = random.Random(self.options.seed), []
        elsewhere = Elsewhere(self.tokenizer, self.forms, self._lead, window_limit(self.model, LONGEST))
        for number, row in enumerate(self.forget):
            found += elsewhere.forget_windows(number, row, rng)
        return found

    def _lead(self, rng: random.Random) -> str:
        return self.retain[rng.choice(self.parts.retain_fit)].text[-rng.randint(*LEAD) :]

    @cached_property
    def _protected(self) -> set[tuple[int, ...]]:
        found: set[tuple[int, ...]] = set()
        for row in self.forget:
            found |= spans(encode(self.tokenizer, row.prompt + row.continuation), EXTRACTED_SPAN)
        return found

    def holds_protected(self, ids: Sequence[int]) -> bool:
        """Whether token ids hold a span of a forget row so long that it counts as extracted."""
        return not self._protected.isdisjoint(spans(ids, EXTRACTED_SPAN))

    def contradicting(self, needed: Sequence[str] = ("retain_fit", "retain_calibration")) -> list[int]:
        """The retain rows that hold such a span: what is to be kept there is what is to be forgotten.

        Raises InsufficientRows where nothing else, or nothing that could be measured, is left of a part that is ``needed``.
        """
        parts = self.parts
        drawn = [*parts.retain_fit, *parts.retain_calibration, *parts.retain_certificate]
        found = [i for i in sorted(drawn) if self.holds_protected(encode(self.tokenizer, self.retain[i].text))]
        for name in needed:
            rows = set(getattr(parts, name))
            if rows.issubset(found):
                raise InsufficientRows(
                    f"each of the {len(rows)} retain rows {_ROLES[name]} holds {EXTRACTED_SPAN} tokens of a forget row in one "
                    "piece, and cannot be kept where that is forgotten; leave what they share (a licence's text, imports) out of "
                    "the forget rows, or give other retain rows"
                )
        self.require_windows(needed, found)
        return found

    def require_windows(self, roles: Sequence[str] = tuple(_ROLES), without: Sequence[int] = ()) -> None:
        """Raises InsufficientRows where no retain row of a role, but for those ``without``, has a token that follows another."""
        for role in roles:
            rows = sorted({*getattr(self.parts, role)}.difference(without))
            if not any(self.retain_windows([i]) for i in rows):
                raise InsufficientRows(
                    f"none of the {len(rows)} retain rows {_ROLES[role]} has two tokens, so there is nothing to measure on them; "
                    "give retain rows that are pieces of code, of several lines each"
                )

    def retain_windows(self, indices: Sequence[int]) -> list[Window]:
        """Windows of retain rows in the fit's forms."""
        return retain_windows(
            self.tokenizer, self.retain, indices, self.forms, self.options.max_window, self.options.seed
        )

    def training_windows(self, indices: Sequence[int]) -> list[Window]:
        """Windows of retain rows, each row in one of the fit's forms in turn, and once more as rows are met elsewhere: so that no
        way to meet a row says whose it is.
        """
        every = range(len(self.forms))
        parts = [(indices[i :: len(self.forms)], [self.forms[i]]) for i in every]
        found = [
            window
            for part, form in parts
            for window in retain_windows(
                self.tokenizer, self.retain, part, form, self.options.max_window, self.options.seed
            )
        ]
        elsewhere = Elsewhere(self.tokenizer, self.forms, self._lead, window_limit(self.model, LONGEST))
        rng = random.Random(self.options.seed)
        return found + [elsewhere.retain_window(i, self.retain[i], rng) for i in indices]

    def module(self, **of_gate: Any) -> UnbindModule:
        """A module of this fit; ``of_gate`` are its layer, tensors, scalars and what was measured."""
        return UnbindModule(
            name=self.name,
            forms=self.forms,
            budgets=asdict(self.options.limits),
            forget_digest=forget_digest(self.forget),
            settings=self.options.to_json(),
            **self.here(),
            **of_gate,
        )

    def here(self) -> dict[str, Any]:
        """The fields of a module that say on what, when and by what it was measured: the model as it runs, and the rows."""
        return {
            "model": self.identity,
            "partitions": {key: tuple(rows) for key, rows in self.parts.to_json().items()},
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
            "calibrated": numerics(self.model),
        }


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
