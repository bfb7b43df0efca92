"""How much of a text came back nearly word for word, over token ids: what counts where an attack asks on many times."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

SHORTEST = 20  # tokens of a block that counts
GAP = 2  # tokens that may differ between two blocks that are one


def near_verbatim(target: Sequence[int], output: Sequence[int], *, shortest: int = SHORTEST, gap: int = GAP) -> float:
    """Share of ``target`` on [0,1] that stands in ``output``, in order, in long stretches with small slips
    (near-verbatim recall, after arXiv 2601.02671, over tokens).

    Blocks that match in order are one stretch where at most ``gap`` tokens lie between them on either side; stretches with fewer
    than ``shortest`` matching tokens, or than the whole of a shorter target, do not count. An empty target gives 0.
    """
    if not target:
        return 0.0
    blocks = SequenceMatcher(None, list(target), list(output), autojunk=False).get_matching_blocks()
    stretches: list[int] = []  # matching tokens of each
    end_target, end_output = -gap - 1, -gap - 1
    for block in blocks:
        if not block.size:
            continue
        if block.a - end_target <= gap and block.b - end_output <= gap:
            stretches[-1] += block.size
        else:
            stretches.append(block.size)
        end_target, end_output = block.a + block.size, block.b + block.size
    least = min(shortest, len(target))
    return sum(size for size in stretches if size >= least) / len(target)
