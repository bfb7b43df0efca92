"""The parts of ``unbind bench guard``, and what their figures say together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from server import demo
from server.bench.guard.rows import forget_texts
from unbind_core.architecture import load_model
from unbind_core.errors import UnbindError
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback

PARTS = ("tries", "http", "ordinary", "cost", "opening", "attacks")
QUICK = {"tries": 20_000, "http": 300, "ordinary": 5_000}


def guard_figures(
    parts: Sequence[str],
    *,
    tries: int | None = None,
    requests: int | None = None,
    completions: int | None = None,
    sizes: Sequence[int] = (1, 1_000, 100_000),
    repeats: int = 15,
    attacks: Sequence[str] | None = None,
    rows: int | None = None,
    module: Path = demo.MODULE,
    seed: int = 0,
    progress: ProgressCallback,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Each part's figures under ``parts`` and its name; above them ``violations`` and ``tries`` of all parts that try,
    ``false_bars``, ``ordinary_completions``, ``throughput_ratio`` by number of rows, ``bytes_per_lexeme`` and
    ``build_seconds_a_row``. Raises UnbindError for an unknown part.
    """
    if unknown := sorted(set(parts) - set(PARTS)):
        raise UnbindError(f"--parts: '{unknown[0]}' is unknown; choose from {', '.join(PARTS)}")
    found: dict[str, Any] = {}
    for part in (part for part in PARTS if part in parts):
        report(part)
        if part == "tries":
            found[part] = _tries(tries or QUICK[part], seed, progress)
        elif part == "http":
            from server.bench.guard.http import http_figures

            found[part] = http_figures(requests or QUICK[part], seed, progress)
        elif part == "ordinary":
            found[part] = _ordinary(completions or QUICK[part], seed, progress)
        elif part == "cost":
            found[part] = _cost(sizes, repeats, progress)
        elif part == "opening":
            found[part] = _opening(module, rows, progress)
        else:
            found[part] = _attacks(module, attacks, rows, progress, report)
    return {**_together(found), "parts": found}


def _tries(tries: int, seed: int, progress: ProgressCallback) -> dict[str, Any]:
    from server.bench.guard.tries import Tries

    return Tries(load_model(demo.BASE, None).tokenizer, forget_texts(), seed).run(tries, progress)


def _ordinary(completions: int, seed: int, progress: ProgressCallback) -> dict[str, Any]:
    from server.bench.guard.ordinary import Ordinary

    return Ordinary(load_model(demo.BASE, None).tokenizer, seed).run(completions, progress)


def _cost(sizes: Sequence[int], repeats: int, progress: ProgressCallback) -> dict[str, Any]:
    from server.bench.guard.cost import Cost

    with closing(Cost(load_model(demo.BASE, demo.ADAPTER))) as cost:
        return cost.run(sizes, repeats, progress)


def _opening(module: Path, rows: int | None, progress: ProgressCallback) -> dict[str, Any]:
    from server.bench.guard.opening import opening_figures

    loaded = load_model(demo.BASE, demo.ADAPTER)
    return opening_figures(loaded, UnbindModule.load(module, model=loaded.identity), rows=rows, progress=progress)


def _attacks(
    module: Path,
    attacks: Sequence[str] | None,
    rows: int | None,
    progress: ProgressCallback,
    report: Callable[[str], None],
) -> dict[str, Any]:
    from server.bench.guard.attacks import attack_figures

    loaded = load_model(demo.BASE, demo.ADAPTER)
    fitted = UnbindModule.load(module, model=loaded.identity)
    return attack_figures(loaded, fitted, attacks=attacks, rows=rows, progress=progress, report=report)


def _together(found: dict[str, Any]) -> dict[str, Any]:
    """What is asked first, of the parts that were run."""
    whole: dict[str, Any] = {}
    tried = [found[part] for part in ("tries", "http") if part in found]
    if tried:
        whole |= {key: sum(part[key] for part in tried) for key in ("violations", "tries")}
    for part, keys in (
        ("ordinary", ("false_bars", "ordinary_completions")),
        ("cost", ("throughput_ratio", "bytes_per_lexeme", "build_seconds_a_row")),
    ):
        whole |= {key: found[part][key] for key in keys} if part in found else {}
    return whole
