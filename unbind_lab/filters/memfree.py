"""MemFree decoding (Ippolito et al., 2022): no token may follow that completes a run of n tokens of a protected row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unbind_core.rows import ForgetRow
from unbind_core.windows import forget_windows
from unbind_lab.filters.filter import Filter, Options
from unbind_lab.served import Served
from unbind_lab.setting import Bench

BARRED = -1e4  # added to a logit


class MemFree:
    """An exact set of runs, where the original has a Bloom filter. The prompt's own tokens count as the beginning of a run."""

    def __init__(self, texts: Iterable[Sequence[int]], run: int, vocabulary: int) -> None:
        self.context, self._vocabulary = run - 1, vocabulary
        self._ends: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for ids in texts:
            for at in range(len(ids) - self.context):
                self._ends[tuple(ids[at : at + self.context])].add(ids[at + self.context])

    def shift(self, context: tuple[int, ...]) -> Tensor | None:
        """BARRED where a token would end such a run."""
        ends = self._ends.get(context)
        if ends is None:
            return None
        found = torch.zeros(self._vocabulary)
        found[list(ends)] = BARRED
        return found


def build(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """Of prompts and continuations."""
    model, tokenizer = bench.full.model, bench.full.tokenizer
    size = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    texts = [window.ids for window in forget_windows(tokenizer, rows, range(len(rows)))]
    return Served(model, tokenizer, decoding=MemFree(texts, int(options["run"]), size))


MEMFREE = Filter("memfree", build, {"run": 10}, tuple({"run": run} for run in (3, 4, 6, 8, 10, 14)))
