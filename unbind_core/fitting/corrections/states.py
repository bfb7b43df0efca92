"""States of the last decoder layer, from which alone a model says what comes next, by all of a text or by its last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unbind_core.applying.corrections import corrected
from unbind_core.architecture import decoder_layers
from unbind_core.fitting.corrections.beginning import Parts
from unbind_core.progress import ProgressCallback, counted
from unbind_core.running.capture import capture_states
from unbind_core.windows import Window, batches

TOGETHER = (
    4  # positions in a piece of the text at most: the last of them sees so many tokens more, less one, than the first
)

AT_ONCE = 256  # windows, of which more than one state a position is held


def last_states(
    model: nn.Module,
    windows: Sequence[Window],
    at: Sequence[Tensor],
    pad: int,
    progress: ProgressCallback,
    layer: int | None = None,
) -> list[Tensor]:
    """bfloat16 states [n,d] at some positions of each window at the last decoder layer, or another, in the order of ``windows``."""
    layer = len(decoder_layers(model)) - 1 if layer is None else layer
    device = next(model.parameters()).device
    order = iter(sorted(range(len(windows)), key=lambda i: -len(windows[i].ids)))  # as batches come
    every, found = list(batches(windows, pad, device=device)), dict[int, Tensor]()
    for batch in counted(every, len(every), "reference", progress):
        for one, number in zip(capture_states(model, batch, [layer], roughly=True)[layer], order, strict=False):
            found[number] = one[at[number].to(device)].to(torch.bfloat16)
    return [found[i] for i in range(len(windows))]


@dataclass(frozen=True)
class Near:
    """A model that sees, of a text, the last ``tokens`` behind what is in ``front`` of every text, and, of all of it, what an
    ``early`` layer makes of it, where ``parts`` say what the last layer has of both: learned on retained code (``leading.py``).
    """

    tokens: int
    front: tuple[int, ...] = ()
    early: int | None = None
    parts: Parts | None = None

    def states(
        self, model: nn.Module, windows: Sequence[Window], at: Sequence[Tensor], pad: int, progress: ProgressCallback
    ) -> list[Tensor]:
        """As :func:`last_states`. A few positions that share a pass see up to TOGETHER - 1 more of the last tokens."""
        if self.parts is None:
            return self._short(model, windows, at, pad, progress)
        found = list[Tensor]()
        for begin in range(0, len(windows), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            with torch.no_grad():
                each = self.wide(model, windows[some], at[some], pad, progress)
                found += [self.of(wide, self.parts).to(torch.bfloat16) for wide in each]
        return found

    def wide(
        self, model: nn.Module, windows: Sequence[Window], at: Sequence[Tensor], pad: int, progress: ProgressCallback
    ) -> list[Tensor]:
        """What ``parts`` are applied to: bfloat16 [n,2d], states by the last tokens, and those of the early layer, brought to their
        size.
        """
        short = self._short(model, windows, at, pad, progress)
        return beside(short, last_states(model, windows, at, pad, progress, self.early))

    def of(self, wide: Tensor, parts: Parts) -> Tensor:
        """FP32 last states [n,d] of such [n,2d]; can be differentiated in ``parts``."""
        one = torch.ones(len(wide), device=wide.device)
        return corrected(wide.float(), one, *parts)[:, : wide.shape[1] // 2]

    def _short(
        self, model: nn.Module, windows: Sequence[Window], at: Sequence[Tensor], pad: int, progress: ProgressCallback
    ) -> list[Tensor]:
        pieces, places, owner = list[Window](), list[Tensor](), list[int]()
        for number, (window, positions) in enumerate(zip(windows, at, strict=True)):
            for group in _neighbours(positions.tolist()):
                begin = max(0, group[0] - self.tokens + 1)
                before = self.front if begin > 0 else ()  # the window's own beginning has it
                pieces.append(Window((*before, *window.ids[begin : group[-1] + 1]), 1, window.row))
                places.append(torch.tensor(group) - begin + len(before))
                owner.append(number)
        found: list[list[Tensor]] = [[] for _ in windows]
        for number, states in zip(owner, last_states(model, pieces, places, pad, progress), strict=True):
            found[number].append(states)
        width = next((states.shape[1] for own in found for states in own), 0)
        return [torch.cat(own) if own else torch.zeros(0, width, dtype=torch.bfloat16) for own in found]


def beside(states: Sequence[Tensor], early: Sequence[Tensor]) -> list[Tensor]:
    """[n,2d] of two lists of [n,d], the second ones brought to the size of the first."""
    found = []
    for one, other in zip(states, early, strict=True):
        size = one.float().norm(dim=1, keepdim=True) / other.float().norm(dim=1, keepdim=True).clamp(min=1e-6)
        found.append(torch.cat((one, (other * size).to(one.dtype)), 1))
    return found


def _neighbours(positions: Sequence[int]) -> list[list[int]]:
    """Positions, which rise, in groups of which none spans more than TOGETHER."""
    groups = list[list[int]]()
    for position in positions:
        if groups and position - groups[-1][0] < TOGETHER:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups
