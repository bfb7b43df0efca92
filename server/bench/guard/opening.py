"""Where a module's gate opens beside a guard: on rows from their middle or written otherwise, and on ordinary code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from server.bench.attacks.attacked import Material, System
from server.bench.attacks.figures import fitted_on
from server.bench.attacks.gates import opens_in_text, opens_mid_row, opens_within
from server.bench.gate.world import World
from server.bench.guard.rows import SECRET
from server.engine.forcing import Forcing
from server.engine.pinned import LoadedModule, PinnedSet
from server.engine.request import GenerationRequest
from unbind_core.applying.passes import Forced, Pass, where_forced
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import encode_prompt
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.index import build_index
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress, ProgressCallback
from unbind_core.rows import spread
from unbind_core.windows import Batch

COLUMNS = ("module", "guard", "folding")
FIRST = 48  # tokens


@dataclass(frozen=True)
class Beside(System):
    """As ``System``, its gates moved as the engine has a guard move them; with ``ends`` at each of the first positions as where a
    prompt ends there, which the engine reads to its end.
    """

    guards: GuardSet | None = None
    ends: bool = False

    def looked_at(self, batch: Batch, positions: Tensor) -> Pass:
        """With what the guard says of each text as a prompt."""
        pinned = PinnedSet(tuple(LoadedModule(one.name, one, one.digest) for one in self.modules))
        plain, sequences = super().looked_at(batch, positions), []
        for row, window in enumerate(batch.windows):
            spans = [*self._moved(window.ids, pinned)]
            for last in range(min(FIRST, len(window.ids)) if self.ends else 0):
                ended = self._moved(window.ids[: last + 1], pinned)
                spans += (span._replace(start=last, end=last + 1) for span in ended if span.start <= last < span.end)
            sequences.append((row, 0, len(window.ids), tuple(spans)))
        forced, eased = where_forced(sequences, positions)
        return Pass(real=plain.real, forced=forced, eased=eased)

    def _moved(self, prompt: Sequence[int], pinned: PinnedSet) -> tuple[Forced, ...]:
        request = GenerationRequest(tuple(prompt), modules=pinned, guards=self.guards)
        forcing = Forcing.of(request, self.loaded.tokenizer)
        return forcing.spans if forcing is not None else ()


def opening_figures(
    loaded: LoadedModel, module: UnbindModule, *, rows: int | None, progress: ProgressCallback
) -> dict[str, Any]:
    """By column (the module alone, beside a guard, and beside one that folds names) ``opens_within``, ``opens_mid_row`` and
    ``opens_in_text`` of ``rows`` rows, spread over the module's own; of the held-out rows as prompts the shares ``ordinary_rows``
    and ``ordinary_positions`` at which its gate is open.
    """
    world = World.load(loaded)
    whole = fitted_on(world, module)
    material = Material(
        loaded.tokenizer, [whole[at] for at in spread(range(len(whole)), rows or len(whole))], world.test
    )
    texts = [row.prompt + row.continuation for row in whole]
    ordinary = [encode_prompt(loaded.tokenizer, row.text) for row in world.test]
    found: dict[str, Any] = {}
    for done, column in enumerate(COLUMNS, start=1):
        guards = None
        if column != "module":
            index = build_index(texts, name=module.name, secret=SECRET, fold=column == "folding")
            guards = GuardBook.of(SECRET, [index]).select([module.name])
        system = Beside(column, loaded, (module,), guards=guards)
        gates = system.gates(ordinary)
        found[column] = {
            "opens_within": opens_within(replace(system, ends=True), material),
            "opens_mid_row": opens_mid_row(system, material),
            "opens_in_text": opens_in_text(system, material),
            "ordinary_rows": torch.stack([gate.any() for gate in gates]).float().mean().item(),
            "ordinary_positions": torch.cat(gates).float().mean().item(),
        }
        progress(Progress("opening", done, len(COLUMNS)))
    return {"rows": len(material.rows), "module": module.name, "by_column": found}
