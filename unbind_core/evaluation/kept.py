"""States of batches that a fit comes back to: in memory, or, where they are many, in files from which they are mapped.

Files hold the states as the model computes them, in its own precision. Each is written once its batches are through, so that
work that is ended can be gone on with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unbind_core.files import write_whole
from unbind_core.progress import Progress, ProgressCallback
from unbind_core.windows import Batch

MOST_RESIDENT = 2 << 30  # bytes of one role's states in memory; where there are more, all stay in their files
FILE_BYTES = 1 << 28  # of states in one file, or one batch


@dataclass
class BatchStates:
    """One batch with its unedited states at every layer [B,T,d] and the NLL of its targets [N]."""

    batch: Batch
    states: Mapping[int, Tensor]
    nll: Tensor
    rows: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.batch.window_index()

    def without(self, rows: Collection[int]) -> BatchStates | None:
        """The batch without the windows of some rows; None where nothing is left of it."""
        stay = torch.tensor([window.row not in rows for window in self.batch.windows], device=self.nll.device)
        if bool(stay.all()):
            return self
        if not bool(stay.any()):
            return None
        kept = self.states
        states = kept.only(stay) if isinstance(kept, OnDisk) else {layer: part[stay] for layer, part in kept.items()}
        return BatchStates(rows_of(self.batch, stay), states, self.nll[stay[self.rows]])


def rows_of(batch: Batch, rows: Tensor) -> Batch:
    """The sub-batch of the rows that are true in ``rows`` (bool [B])."""
    chosen = tuple(window for window, wanted in zip(batch.windows, rows.tolist(), strict=True) if wanted)
    return Batch(chosen, batch.ids[rows], batch.attention_mask[rows], batch.predictors[rows])


@dataclass(frozen=True, eq=False)
class OnDisk(Mapping[int, Tensor]):
    """States of batch ``number`` of a file, by layer, mapped whenever they are asked for; ``chosen``: bool [B], or all rows."""

    file: Path
    number: int
    layers: tuple[int, ...]
    device: torch.device
    chosen: Tensor | None = None

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self.layers:
            raise KeyError(layer)
        with safe_open(self.file, framework="pt", device=str(self.device)) as content:
            states: Tensor = content.get_tensor(f"{self.number}.{layer}")
        return states if self.chosen is None else states[self.chosen]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def only(self, rows: Tensor) -> OnDisk:
        """Some rows of it, bool [B]."""
        return OnDisk(self.file, self.number, self.layers, self.device, rows)


def kept_states(
    each: Sequence[Batch],
    layers: Sequence[int],
    bytes_of: Callable[[Batch], int],
    compute: Callable[[Batch], tuple[Mapping[int, Tensor], Tensor]],
    cache: Path | None,
    stage: str,
    progress: ProgressCallback,
) -> list[BatchStates]:
    """Every batch with its states at ``layers``: from the files beside ``cache``, or by ``compute``, which gives states and NLL.

    ``cache`` is the first file's path, named for what the states depend on; the others have a number behind its name. Without it,
    or where all are at most MOST_RESIDENT bytes, the states are in memory.
    """
    resident = cache is None or sum(map(bytes_of, each)) <= MOST_RESIDENT
    groups: list[list[Batch]] = []
    room = 0
    for batch in each:
        room -= bytes_of(batch)
        if room < 0:
            groups.append([])
            room = FILE_BYTES - bytes_of(batch)
        groups[-1].append(batch)
    found: list[BatchStates] = []
    for number, group in enumerate(groups):
        file = cache and (cache.with_stem(f"{cache.stem}-{number}") if number else cache)
        known = _read(file, group, layers, resident) if file else None
        if known is None:
            known = []
            progress(Progress(stage, len(found), len(each)))
            for batch in group:
                known.append(BatchStates(batch, *compute(batch)))
                progress(Progress(stage, len(found) + len(known), len(each)))
            if file:
                _write(file, known)
                known = known if resident else _read(file, group, layers, resident) or known
        found += known
    return found


def _write(file: Path, kept: Sequence[BatchStates]) -> None:
    """Write the states of batches, whole or not at all."""
    tensors = {f"{i}.{layer}": states.cpu() for i, one in enumerate(kept) for layer, states in one.states.items()}
    tensors |= {f"{i}.nll": one.nll.cpu() for i, one in enumerate(kept)}
    write_whole(file, lambda temporary: save_file(tensors, temporary))


def _read(file: Path, each: Sequence[Batch], layers: Sequence[int], resident: bool) -> list[BatchStates] | None:
    """What :func:`_write` wrote for these batches, in memory or on disk; None where there is no such file or it is damaged."""
    device = each[0].ids.device
    try:
        with safe_open(file, framework="pt", device=str(device)) as content:
            names = {*content.keys()}
            if not names >= {f"{i}.{name}" for i in range(len(each)) for name in (*layers, "nll")}:
                return None
            found = []
            for i, batch in enumerate(each):
                states: Mapping[int, Tensor] = (
                    {n: content.get_tensor(f"{i}.{n}") for n in layers}
                    if resident
                    else OnDisk(file, i, tuple(layers), device)
                )
                found.append(BatchStates(batch, states, content.get_tensor(f"{i}.nll")))
            return found
    except (OSError, SafetensorError):
        return None
