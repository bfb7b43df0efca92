"""States of the last decoder layer, from which alone a model says what comes next, by all of a text or by its last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unbind_core.applying.corrections import corrected
from unbind_core.architecture import decoder_layers
from unbind_core.fitting.corrections.beginning import Parts
from unbind_core.fitting.separation import FIRST
from unbind_core.progress import ProgressCallback, counted
from unbind_core.running.capture import capture_states
from unbind_core.windows import Window, batches

# Positions in a piece of the text at most: the last of them sees so many tokens more, less one, than the first.
TOGETHER = 4


@dataclass(frozen=True)
class Met:
    """A window in which a row is met: positions ``at``, int64 [n], of the row's part, the edited layer's ``states`` [n,d], and
    those of an ``early`` layer, where they are wanted.
    """

    window: Window
    at: Tensor
    states: Tensor
    early: Tensor | None = None


def met_part(window: Window, states: Tensor, step: int = 1, first: int = 0, early: Tensor | None = None) -> Met:
    """Of a window's states [T,d] those that say whose they are and precede a token; each ``step``-th of them from ``first`` on."""
    begin, end = window.start + FIRST + first, len(window.ids) - 1

    def part(of: Tensor) -> Tensor:
        return of[begin:-1:step] if step == 1 else of[begin:-1:step].clone()

    at = torch.arange(min(begin, end), end, step)
    return Met(window, at, part(states), None if early is None else part(early))


def last_states(
    model: nn.Module,
    windows: Sequence[Window],
    at: Sequence[Tensor],
    pad: int,
    progress: ProgressCallback,
) -> list[Tensor]:
    """bfloat16 states [n,d] at some positions of each window at the last decoder layer, in the order of ``windows``."""
    last = len(decoder_layers(model)) - 1
    return [found[last] for found in states_at(model, windows, at, [last], pad, progress)]


def states_at(
    model: nn.Module,
    windows: Sequence[Window],
    at: Sequence[Tensor],
    layers: Sequence[int],
    pad: int,
    progress: ProgressCallback,
) -> list[dict[int, Tensor]]:
    """As :func:`last_states`, at several layers."""
    device = next(model.parameters()).device
    order = iter(sorted(range(len(windows)), key=lambda i: -len(windows[i].ids)))  # as batches come
    every, found = list(batches(windows, pad, device=device)), dict[int, dict[int, Tensor]]()
    for batch in counted(every, len(every), "reference", progress):
        states = capture_states(model, batch, layers, roughly=True)
        for place, number in zip(range(len(batch.windows)), order, strict=False):
            where = at[number].to(device)
            found[number] = {layer: states[layer][place][where].to(torch.bfloat16) for layer in layers}
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

    def states(self, model: nn.Module, met: Sequence[Met], pad: int, progress: ProgressCallback) -> list[Tensor]:
        """bfloat16 [n,d] of each window, in place of those of :func:`last_states`. Where there are ``parts``, the windows need
        an early layer's states.
        """
        found = self.short(model, [one.window for one in met], [one.at for one in met], pad, progress)
        if self.parts is not None:
            with torch.no_grad():
                for number, one in enumerate(met):
                    assert one.early is not None
                    wide, d = beside(found[number], one.early).float(), found[number].shape[1]
                    changed = corrected(wide, torch.ones(len(wide), device=wide.device), *self.parts)
                    found[number] = changed[:, :d].to(torch.bfloat16)
        return found

    def short(
        self, model: nn.Module, windows: Sequence[Window], at: Sequence[Tensor], pad: int, progress: ProgressCallback
    ) -> list[Tensor]:
        """As :func:`last_states`, by the last tokens alone. Positions that share a pass see up to TOGETHER - 1 more of them."""
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


def beside(states: Tensor, early: Tensor) -> Tensor:
    """[n,2d] of two [n,d], the second one brought to the size of the first."""
    size = states.float().norm(dim=1, keepdim=True) / early.float().norm(dim=1, keepdim=True).clamp(min=1e-6)
    return torch.cat((states, (early * size).to(states.dtype)), 1)


def _neighbours(positions: Sequence[int]) -> list[list[int]]:
    """Positions, which rise, in groups of which none spans more than TOGETHER."""
    groups = list[list[int]]()
    for position in positions:
        if groups and position - groups[-1][0] < TOGETHER:
            groups[-1].append(position)
        else:
            groups.append([position])
    return groups
