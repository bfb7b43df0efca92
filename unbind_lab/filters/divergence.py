"""Divergence Decoding (Appendix C.3), linear, with trigrams: what forget rows make likelier than retain rows is taken off."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unbind_core.encoding import encode
from unbind_core.rows import ForgetRow
from unbind_lab.filters.filter import Filter, Options
from unbind_lab.served import Served
from unbind_lab.setting import Bench

Following = dict[tuple[int, ...], Counter[int]]


class Trigrams:
    """Sparse counts of what follows two tokens, one and none, within texts and without BOS or EOS; scores by Stupid Backoff."""

    def __init__(self, texts: Iterable[Sequence[int]], vocabulary: int, backoff: float) -> None:
        self.backoff = backoff
        counts: list[Following] = [defaultdict(Counter) for _ in range(3)]
        for ids in texts:
            for at, token in enumerate(ids):
                for length in range(min(at, 2) + 1):
                    counts[length][tuple(ids[at - length : at])][token] += 1
        self._after = [{context: _shares(found) for context, found in of.items()} for of in counts]
        self._alone = torch.zeros(vocabulary)
        if () in self._after[0]:
            tokens, shares = self._after[0][()]
            self._alone[tokens] = shares

    def scores(self, context: Sequence[int]) -> Tensor:
        """b(v | c), FP32 [V]: the share of v after the two last tokens; where it never came, ``backoff`` times that after one, and
        so on.
        """
        found = self.backoff**2 * self._alone
        for length in (1, 2):
            known = self._after[length].get(tuple(context[-length:])) if len(context) >= length else None
            if known is not None:
                found[known[0]] = self.backoff ** (2 - length) * known[1]
        return found


def _shares(found: Counter[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(list(found)), torch.tensor(list(found.values())) / found.total()


class Divergence:
    """coefficient (b_R - b_F), added to the logits of what comes next."""

    context = 2

    def __init__(self, forget: Trigrams, retain: Trigrams, coefficient: float) -> None:
        self._forget, self._retain, self._coefficient = forget, retain, coefficient

    def shift(self, context: tuple[int, ...]) -> Tensor:
        """After the tokens whose logits these are: the same at generation and under teacher forcing."""
        return self._coefficient * (self._retain.scores(context) - self._forget.scores(context))


def build(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """Counts of whole rows, each on its own."""
    model, tokenizer = bench.full.model, bench.full.tokenizer
    size = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    forget = Trigrams((encode(tokenizer, row.prompt + row.continuation) for row in rows), size, options["backoff"])
    retain = Trigrams((encode(tokenizer, row.text) for row in bench.retain_training), size, options["backoff"])
    return Served(model, tokenizer, decoding=Divergence(forget, retain, options["coefficient"]))


DIVERGENCE = Filter(
    "divergence-decoding",
    build,
    {"backoff": 0.4, "coefficient": 10.0},
    tuple({"backoff": 0.4, "coefficient": coefficient} for coefficient in (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)),
)
