"""How many tokens a fit works on, by role: drawn as the fit will draw them, and counted on a sample of the rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from unbind_core.encoding import available_forms, encode
from unbind_core.fitting.fit import RETAIN_LIMIT, drawn
from unbind_core.fitting.options import FitOptions
from unbind_core.rows import ForgetRow, RetainRow, spread

SAMPLED = 48  # rows that say how many tokens a character makes
ABOVE = 1.1  # what the count of a sample is raised by


@dataclass(frozen=True)
class Amounts:
    """Rows, and tokens of all rows of a role together, in one form each; ``longest``: tokens of the longest forget row."""

    forms: int
    forget_rows: int
    forget: int
    longest: int
    retain_fit: int
    calibration_rows: int
    calibration: int
    certificate_rows: int
    certificate: int
    held_rows: int
    held: int

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        forget: Sequence[ForgetRow],
        retain: Sequence[RetainRow],
        retain_calibration: Sequence[RetainRow] = (),
        held_out: Sequence[RetainRow] = (),
        options: FitOptions | None = None,
    ) -> Amounts:
        """Of a fit with these rows. Raises DataError and InsufficientRows as the fit would."""
        options = options or FitOptions()
        rows, parts = drawn(forget, retain, retain_calibration, options)
        dense = max(_density(tokenizer, [row.text for row in rows]), 1e-9)
        ours = _density(tokenizer, [row.prompt + row.continuation for row in forget])

        def tokens(indices: Sequence[int]) -> int:
            return sum(math.ceil(len(rows[i].text) * dense) + 1 for i in indices)

        lengths = [math.ceil(len(row.prompt + row.continuation) * ours) + 4 for row in forget]
        return cls(
            forms=len(available_forms(tokenizer, options.forms)),
            forget_rows=len(forget),
            forget=sum(lengths),
            longest=max(lengths),
            retain_fit=tokens(parts.retain_fit),
            calibration_rows=len(parts.retain_calibration),
            calibration=tokens(parts.retain_calibration),
            certificate_rows=len(parts.retain_certificate),
            certificate=tokens(parts.retain_certificate),
            held_rows=len(held_out),
            held=sum(math.ceil(len(row.text) * dense) + 1 for row in held_out),
        )

    @classmethod
    def even(cls, forget_rows: int, retain_rows: int, length: int, forms: int = 2, held_rows: int = 60) -> Amounts:
        """Of so many rows of ``length`` tokens each, a fifth of the retain rows set apart, as a fit draws them."""
        drawn = min(retain_rows, RETAIN_LIMIT)
        apart = round(drawn * 0.2)
        chosen, certain = apart - apart // 2, apart // 2
        held_rows = min(held_rows, retain_rows)
        return cls(
            forms,
            forget_rows,
            forget_rows * length,
            length,
            (drawn - apart) * length,
            chosen,
            chosen * length,
            certain,
            certain * length,
            held_rows,
            held_rows * length,
        )


def _density(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> float:
    """Tokens a character, on the high side where not all texts are counted."""
    some = [texts[i] for i in spread(range(len(texts)), SAMPLED)]
    counted = sum(len(encode(tokenizer, text)) for text in some) / max(1, sum(map(len, some)))
    return counted * (1 if len(some) == len(texts) else ABOVE)
