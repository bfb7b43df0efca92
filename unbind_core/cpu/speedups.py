"""Which of this room's devices an engine uses: all of them, but where a bench measures what each gains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Speedups:
    """``threads``: the number of a pass's threads is chosen; ``lanes``: passes run side by side; ``packed``: linear layers use
    packed weights.
    """

    threads: bool = True
    lanes: bool = True
    packed: bool = True


EVERY = Speedups()
