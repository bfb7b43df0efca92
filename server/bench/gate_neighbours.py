"""What a module does to the retain rows that are most like the forget rows, and to those that repeat nothing of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from server.bench.gate_world import Retained, World
from unbind_core.encoding import encode
from unbind_core.evaluation.metrics import EXTRACTED_SPAN, spans
from unbind_core.module import UnbindModule
from unbind_core.rows import ForgetRow, RetainRow


def _identifiers(text: str) -> Counter[str]:
    return Counter(re.findall(r"[A-Za-z_][A-Za-z0-9_]+", text))


def nearest(rows: Sequence[ForgetRow], pool: Sequence[RetainRow]) -> list[RetainRow]:
    """For each forget row the retain row with the greatest cosine of TF-IDF vectors over identifiers; each once."""
    documents = [_identifiers(row.text) for row in pool]
    spread = Counter(word for document in documents for word in document)

    def vector(counts: Counter[str]) -> dict[str, float]:
        raw = {word: n * math.log((1 + len(pool)) / (1 + spread[word])) for word, n in counts.items()}
        norm = math.sqrt(sum(value * value for value in raw.values())) or 1.0
        return {word: value / norm for word, value in raw.items()}

    vectors = [vector(document) for document in documents]
    found = []
    for row in rows:
        own = vector(_identifiers(row.prompt + row.continuation))
        found.append(max(range(len(pool)), key=lambda i: sum(v * vectors[i].get(word, 0.0) for word, v in own.items())))
    return [pool[i] for i in sorted(set(found))]


def neighbours_rise(
    world: World, retained: Retained, rows: Sequence[ForgetRow], module: UnbindModule
) -> dict[str, float | int]:
    """Relative rise of NLL on the nearest retain rows: of all of them, of those that do not themselves hold a span of 50 tokens
    of a forget row (there a gate is right to open), and of those that no fit has seen.
    """
    everything = [*world.retain, *world.calibration, *world.test]
    near, unseen = nearest(rows, everything), nearest(rows, world.test)
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
    protected = {span for row in rows for span in _spans(world, row.prompt + row.continuation)}
    return [row for row in others if not protected & _spans(world, row.text)]


def _spans(world: World, text: str) -> set[tuple[int, ...]]:
    return spans(encode(world.loaded.tokenizer, text), EXTRACTED_SPAN)
