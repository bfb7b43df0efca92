"""The reference models, as rows of the table: what was learned, and what would be without the rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unbind_core.rows import ForgetRow
from unbind_lab.filters.filter import Filter, Options
from unbind_lab.served import Served
from unbind_lab.setting import Bench


def full(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """M_full: nothing is forgotten."""
    return Served(bench.full.model, bench.full.tokenizer)


def retrained(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """M_retrain: never saw the rows."""
    return Served(bench.retrained.model, bench.retrained.tokenizer)


def base(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """M_base: before adaptation."""
    return Served(bench.base.model, bench.base.tokenizer)


FULL, RETRAINED, BASE = Filter("m-full", full), Filter("m-retrain", retrained), Filter("m-base", base)
