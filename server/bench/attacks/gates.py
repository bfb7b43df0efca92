"""Where a module's gate opens on rows: how soon from their beginning, and whether at all on pieces and other writings of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from server.bench.attacks.attacked import Material, System
from server.bench.attacks.prompts import STARTS, Asking, middle, rewritten, row_ids
from server.bench.attacks.rewriting import REWRITINGS
from unbind_core.encoding import beginning, encode_prompt


def opens_within(system: System, material: Material) -> dict[str, Any]:
    """How many tokens of a row, given from its beginning, its gate needs to open: ``median`` and ``p95`` (the nearest rank; None
    where it falls on a row that never opens), and on how many rows it ``never`` does.
    """
    bos = beginning(material.tokenizer)
    gates = system.gates([bos + row_ids(material, row) for row in material.rows])
    found = sorted(int(g.nonzero()[0]) + 1 - len(bos) if bool(g.any()) else math.inf for g in gates)

    def rank(share: float) -> int | None:
        value = found[max(0, math.ceil(share * len(found)) - 1)]
        return None if math.isinf(value) else int(value)

    return {"median": rank(0.5), "p95": rank(0.95), "never": sum(map(math.isinf, found)), "rows": len(found)}


def opens_mid_row(system: System, material: Material) -> dict[str, float]:
    """Share of rows on which the gate is open somewhere in what is sent: pieces from within the row, prompts written otherwise."""
    ways: dict[str, Asking] = {f"{start}_{n}": middle(start, n) for start in STARTS for n in (16, 32)}
    ways |= {kind: rewritten(kind) for kind in REWRITINGS}
    found = {}
    for name, asking in ways.items():
        sent = list(dict.fromkeys(ask.prompt for ask in asking(material)))
        found[name] = _share(system, sent)
    return found


def opens_in_text(system: System, material: Material) -> dict[str, float]:
    """The same share where all that follows is sent too: from a place within the row, and of the row written otherwise."""
    bos = beginning(material.tokenizer)
    whole = [row_ids(material, row) for row in material.rows]
    found = {
        start: _share(system, [bos + ids[round(share * len(ids)) :] for ids in whole])
        for start, share in STARTS.items()
    }
    for kind, rewrite in REWRITINGS.items():
        texts = [other.prompt + other.continuation for row in material.rows for other in rewrite(row)]
        found[kind] = _share(system, [encode_prompt(material.tokenizer, text) for text in texts])
    return found


def _share(system: System, texts: Sequence[Sequence[int]]) -> float:
    return statistics.fmean(bool(g.any()) for g in system.gates(texts)) if texts else 0.0
