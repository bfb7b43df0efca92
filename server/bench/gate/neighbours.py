"""What a module does to the retain rows that are most like the forget rows, and to those that repeat nothing of them."""

from __future__ import annotations

from collections.abc import Sequence

from server.bench.gate.world import Retained, World
from unbind_core.evaluation.neighbours import nearest, repeating
from unbind_core.module import UnbindModule
from unbind_core.rows import ForgetRow, RetainRow


def neighbours_rise(
    world: World, retained: Retained, rows: Sequence[ForgetRow], module: UnbindModule
) -> dict[str, float | int]:
    """Relative rise of NLL on the nearest retain rows: of all of them, of those that do not themselves hold a span of 50 tokens
    of a forget row (there a gate is right to open), and of those that no fit has seen.
    """
    everything = [*world.retain, *world.calibration, *world.test]
    near, unseen = ([pool[i] for i in nearest(rows, pool)] for pool in (everything, world.test))
    apart = _apart(world, rows, near)
    return {
        "rows": len(near),
        "nll_increase": retained.rise((module,), near),
        "repeating_rows": len(near) - len(apart),
        "apart_nll_increase": retained.rise((module,), apart),
        "unseen_rows": len(unseen),
        "unseen_nll_increase": retained.rise((module,), unseen),
    }


def apart_figures(
    world: World, retained: Retained, rows: Sequence[ForgetRow], module: UnbindModule
) -> dict[str, float | int]:
    """Rise of perplexity on the held-out rows that hold no span of 50 tokens of a forget row, and how many do hold one: what is to
    be kept there is what is to be forgotten, and a fit leaves such rows of its own out.
    """
    apart = _apart(world, rows, world.test)
    before, after = retained.perplexities((module,), apart)
    return {"repeating_rows": len(world.test) - len(apart), "ppl_increase": after / before - 1}


def _apart(world: World, rows: Sequence[ForgetRow], others: Sequence[RetainRow]) -> list[RetainRow]:
    repeated = repeating(world.loaded.tokenizer, rows, others)
    return [row for index, row in enumerate(others) if index not in repeated]
