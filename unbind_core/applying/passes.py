"""One forward pass as the edits at its layers see it: what an engine says of its batch, and ``attach`` of a model's own calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unbind_core.applying.places import Places

Record = list[tuple[tuple[str, ...], Tensor]]


@dataclass(frozen=True)
class Pass:
    """What the states of one pass are, [B,T,d] of B sequences or flat [N,d]; the same at every layer.

    ``rows``: int64 [B] or [N], the selection's row of each; None where batch row i uses row i, or where the selection has a
    single row for all. ``places``: where the rows stand in a memory of gates; None where they are whole sequences from position
    0, or where no gate has a memory. ``phase``: "prefill" or "decode", under which gates are counted; ``decoding``: bool [B,T] or
    [N], where a pass of phase "prefill" decodes, None where it does nowhere. ``real``: bool [B,T] or
    [N], false at padding; None where all positions are real. ``counts``: as ``real``, for the positions that enter the counts;
    None where all do that are real. ``record``: gets the activations behind open gates, 0 behind closed ones: (names, FP32
    [...,M]) for each stack of gates at each layer. ``opened``: gets where a gate that acts is open (one that is only measured,
    at strength 0, does not), bool [B,T] or [N], as often as ``record``; nothing waits for the device. ``requests``: int64 [B] or
    [N], of which request each state is (``ModuleBank.requests``); None where nobody asks in which of them gates open.
    ``forced``: by a module's name in the bank where its gate is open whatever its detector says, bool [B,T] or [N]; of rows that
    ask for it alone. ``eased``: likewise where it opens already at the score under which it would close.
    """

    rows: Tensor | None = None
    places: Places | None = None
    phase: str = "prefill"
    real: Tensor | None = None
    counts: Tensor | None = None
    record: Record | None = None
    opened: list[Tensor] | None = None
    decoding: Tensor | None = None
    requests: Tensor | None = None
    forced: Mapping[str, Tensor] | None = None
    eased: Mapping[str, Tensor] | None = None


WHOLE = Pass()  # whole sequences from position 0, all of them real


END = 1 << 40  # a position that no sequence comes to


class Forced(NamedTuple):
    """The gate of the module ``name`` in the bank is open at a sequence's positions from ``start`` up to ``end``; or, ``eased``, it
    opens there at the score under which it would close.
    """

    name: str
    start: int
    end: int
    eased: bool = False


def where_forced(
    sequences: Iterable[tuple[int | slice, int, int, Sequence[Forced]]], positions: Tensor
) -> tuple[Mapping[str, Tensor] | None, Mapping[str, Tensor] | None]:
    """``Pass.forced`` and ``Pass.eased`` of a pass at ``positions`` int64 [B,T] or [N]: of each sequence its part of them (which
    row, or which slice), the first of its positions, how many follow each other from there, and what is forced in it.
    """
    found: tuple[dict[str, list[tuple[int, int]]], dict[str, list[tuple[int, int]]]] = ({}, {})
    for part, first, count, spans in sequences:
        begin, last = part.start if isinstance(part, slice) else part * positions.shape[-1], first + count
        for name, start, end, eased in spans:
            if start < last and end > first:
                span = begin + max(start - first, 0), begin + min(end, last) - first
                found[eased].setdefault(name, []).append(span)
    return _within(found[False], positions), _within(found[True], positions)


def _within(found: Mapping[str, Sequence[tuple[int, int]]], positions: Tensor) -> Mapping[str, Tensor] | None:
    """By name, where in a pass its spans are; all at once, as they may be thousands, of a thousand names."""
    if not found:
        return None
    rows = np.repeat(np.arange(len(found)), [len(spans) for spans in found.values()])
    begins, ends = np.array([span for spans in found.values() for span in spans]).T
    steps = np.zeros((len(found), positions.numel() + 1), np.int16)
    np.add.at(steps, (rows, begins), 1)
    np.add.at(steps, (rows, ends), -1)
    within = torch.from_numpy(steps.cumsum(1, dtype=np.int16)[:, :-1] > 0).to(positions.device, non_blocking=True)
    return dict(zip(found, within.view(-1, *positions.shape).unbind(), strict=True))
