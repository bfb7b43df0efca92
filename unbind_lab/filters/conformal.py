"""Conformal Unlearning (Appendix C.3) with its calibrated budget of one round: a prompt that asks not to repeat the nearest row.

With one round the verifier chooses nothing, so there is none here. The paper does not print its prompt; this one puts it in
comments, as the model has never seen an instruction. R-PPL is of rows without a prompt, and so that of M_full.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from unbind_core.rows import ForgetRow
from unbind_lab.filters.filter import Filter, Options
from unbind_lab.served import Served
from unbind_lab.setting import Bench

PROMPT = (
    "# The code after this prefix was removed on request. Do not reproduce it, nor anything close to it:\n"
    "{retrieved}\n# Continue the following code in another way.\n{query}"
)


class Catalogue:
    """Texts, found again by the cosine of their TF-IDF vectors of 3 to 5 characters."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        grams = [_grams(text) for text in self.texts]
        spread = Counter(gram for one in grams for gram in one)
        self._weight = {gram: math.log((1 + len(grams)) / (1 + count)) + 1 for gram, count in spread.items()}
        self._vectors = [self._vector(one) for one in grams]

    def nearest(self, query: str) -> str:
        """The first of those that are most like it."""
        vector = self._vector(_grams(query))
        likeness = [sum(value * other.get(gram, 0.0) for gram, value in vector.items()) for other in self._vectors]
        return self.texts[likeness.index(max(likeness))]

    def _vector(self, grams: Counter[str]) -> dict[str, float]:
        weighed = {gram: count * self._weight[gram] for gram, count in grams.items() if gram in self._weight}
        norm = math.sqrt(sum(value**2 for value in weighed.values())) or 1.0
        return {gram: value / norm for gram, value in weighed.items()}


def _grams(text: str) -> Counter[str]:
    return Counter(text[at : at + size] for size in (3, 4, 5) for at in range(len(text) - size + 1))


def build(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """The catalogue: the rows' prompts and those of the held-out forget rows."""
    catalogue = Catalogue([row.prompt for row in (*rows, *bench.forget_validation)])

    def asked(query: str) -> str:
        retrieved = "".join(f"# {line}\n" for line in catalogue.nearest(query).splitlines())
        return PROMPT.format(retrieved=retrieved, query=query)

    return Served(bench.full.model, bench.full.tokenizer, asked=asked)


CONFORMAL = Filter("conformal", build)
