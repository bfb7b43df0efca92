"""How many slots of which length fit: decided once, before anything is allocated.

Keys and values are allocated whole at start, so what the engine holds does not grow with traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from server.engine.embedded.sight import attention_kinds
from unbind_core.architecture import decoder_layers, unwrap
from unbind_core.errors import UnbindError
from unbind_core.running.device import free_bytes
from unbind_core.running.recording import kept_tensors, recording
from unbind_core.windows import trained_positions

SHARE = {"cpu": 0.5, "cuda": 0.8}  # of the free memory; the rest is for activations and for whoever else runs there
MOST_SLOTS = {"cpu": 16, "cuda": 128}  # on a CPU more rows a step make each wait longer and the sum hardly faster
LONGEST = 8192
GIB = 1024**3


class DoesNotFit(UnbindError):
    """Keys and values of the slots asked for exceed the free memory; the message says by how much and what to do."""


@dataclass(frozen=True)
class MemoryPlan:
    """The slots, and the memory that their keys and values take."""

    slots: int
    length: int
    position_bytes: int
    free_bytes: int

    @property
    def bytes(self) -> int:
        """All keys and values."""
        return self.slots * self.length * self.position_bytes

    def __str__(self) -> str:
        """One line for a person."""
        return (
            f"{self.slots} slots x {self.length} positions x {self.position_bytes / 1024:.1f} KiB = "
            f"{self.bytes / GIB:.2f} GiB of keys and values, of {self.free_bytes / GIB:.1f} GiB free"
        )


def plan_memory(model: Any, slots: int = 0, length: int = 0, free: int | None = None) -> MemoryPlan:
    """The slots to allocate; 0 leaves a number to what the model can use and the device has free.

    Raises DoesNotFit where the numbers given, or a single slot, need more than there is, or the model has fewer positions, and
    UnsupportedArchitecture where it keeps more than keys and values.
    """
    config = model.config.get_text_config()
    attention_kinds(config, type(unwrap(model)).__name__)
    device = next(model.parameters()).device
    free = free_bytes(device) if free is None else free
    budget = int(free * SHARE.get(device.type, 0.5))
    position = position_bytes(model)
    trained = trained_positions(model) or LONGEST
    if (short := _short_positions(config)) and length > short:
        raise DoesNotFit(
            f"max_model_len {length}: the model's rope (longrope) computes every row of a pass otherwise as soon as one is longer "
            f"than {short} positions; lower --max-model-len to that"
        )
    trained = min(trained, short or trained)
    if length > trained:
        raise DoesNotFit(f"max_model_len {length}: the model has {trained} positions; lower --max-model-len to that")
    fits = budget // (position * max(slots, 1))  # positions of each slot
    chosen = length or min(trained, LONGEST, max(fits, 16))
    plan = MemoryPlan(
        slots or max(1, min(MOST_SLOTS.get(device.type, 16), budget // (position * chosen))),
        chosen,
        position,
        free,
    )
    if plan.bytes > (free if slots and length else budget):
        raise DoesNotFit(
            f"{plan} on {device}; lower --max-slots or --max-model-len: {max(budget // position, 0)} positions fit in all"
        )
    return plan


def _short_positions(config: Any) -> int | None:
    """Positions up to which a ``longrope`` model has one set of frequencies, None for other models. The library takes the other
    set for a whole pass by its furthest position: keys that were kept, and the rows beside a long one, would be of another model.
    ``dynamic`` begins to change at ``max_position_embeddings``, which no slot exceeds.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    # some models have one for each kind of layer
    each = [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]
    own = getattr(config, "original_max_position_embeddings", None)
    found = [
        rope.get("original_max_position_embeddings") or own for rope in each if rope.get("rope_type") == "longrope"
    ]
    return min((positions for positions in found if positions), default=None)


@torch.inference_mode()
def position_bytes(model: Any) -> int:
    """Bytes of keys and values of one position, all layers: measured on one token, as families differ in what they keep.

    Raises UnsupportedArchitecture where that is anything else, and where a layer's states are nothing that a module could edit.
    """
    with recording(model, range(len(decoder_layers(model)))):
        return sum(part.numel() * part.element_size() for part in kept_tensors(model))
