"""Two folders of lm-evaluation-harness's samples, from the server and from transformers: how far they are apart.

Ends with 1 where a score differs by more than 1e-4, or a text at all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def answers(folder: str, task: str) -> list[Any]:
    """What the model answered to each row, in the order of the rows."""
    (file,) = Path(folder).rglob(f"samples_{task}_*.jsonl")
    rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
    return [row["resps"][0][0] for row in rows]


served, local = (answers(folder, "rows-score") for folder in sys.argv[1:])
apart = max(abs(float(one[0]) - float(other[0])) for one, other in zip(served, local, strict=True))
greedy = sum(str(one[1]) == str(other[1]) for one, other in zip(served, local, strict=True))
print(
    f"scores of {len(served)} rows: at most {apart:.1e} apart; {greedy} agree on whether the row is the likeliest text"
)
texts = [one == other for one, other in zip(*(answers(folder, "rows-text") for folder in sys.argv[1:]), strict=True)]
print(f"texts: {sum(texts)} of {len(texts)} equal")
sys.exit(not (apart < 1e-4 and greedy == len(served) and all(texts)))
