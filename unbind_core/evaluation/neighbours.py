"""Which retain rows are most like rows to forget, and which of them repeat a piece of one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from unbind_core.encoding import encode
from unbind_core.evaluation.metrics import EXTRACTED_SPAN, spans
from unbind_core.rows import ForgetRow, RetainRow


def _identifiers(text: str) -> Counter[str]:
    return Counter(re.findall(r"[A-Za-z_][A-Za-z0-9_]+", text))


def nearest(rows: Sequence[ForgetRow], pool: Sequence[RetainRow]) -> list[int]:
    """Indices of ``pool``, ascending, each once: of each forget row the retain row with the greatest cosine of TF-IDF vectors over
    identifiers.
    """
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
    return sorted(set(found))


def repeating(tokenizer: PreTrainedTokenizerBase, rows: Sequence[ForgetRow], others: Sequence[RetainRow]) -> set[int]:
    """Indices of those of ``others`` that hold 50 tokens of a forget row in one piece: they cannot be kept and forgotten too."""

    def of(text: str) -> set[tuple[int, ...]]:
        return spans(encode(tokenizer, text), EXTRACTED_SPAN)

    protected = {span for row in rows for span in of(row.prompt + row.continuation)}
    return {index for index, row in enumerate(others) if protected & of(row.text)}
