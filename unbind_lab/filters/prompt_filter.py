"""A prompt filter alone ("Guardrail baselines", arXiv 2403.03329): what looks like a protected row gets no answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from server.bench.guard import prompt_filter
from server.bench.guard.prompt_filter import PromptFilter
from unbind_core.rows import ForgetRow
from unbind_lab.filters.filter import Filter, Options
from unbind_lab.served import Served
from unbind_lab.setting import Bench


def build(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """The one that the guard is measured against. Where a text has no prompt (R-PPL) there is nothing to refuse."""
    filtered = PromptFilter(row.prompt + row.continuation for row in rows)
    return Served(bench.full.model, bench.full.tokenizer, refuses=filtered.refuses)


PROMPT_FILTER = Filter("prompt-filter", build, further=(prompt_filter,))
