"""A cache that knows how much will be written to it: a new token is written, and all before it stay where they are.

The library's own is put together anew for every token: all keys and values are read and written once more than attention needs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """Keys and values [B,H,T,D] of one layer, each at the beginning of a storage [B,H,T+room,D].

    Where the room is used up, or rows were taken out, it goes on as the library's.
    """

    def __init__(self, filled: DynamicLayer, room: int) -> None:
        """Takes over what ``filled`` holds, with room for so many positions more."""
        super().__init__()  # type: ignore[no-untyped-call]
        assert filled.keys is not None and filled.values is not None
        self.dtype, self.device, self.is_initialized = filled.dtype, filled.device, True
        self._storages = _with_room(filled.keys, room), _with_room(filled.values, room)
        length = filled.keys.shape[2]
        self.keys, self.values = (storage[:, :, :length] for storage in self._storages)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B,H,T,D]; all keys and all values so far, as views."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        here = self.keys is not None and self.keys.data_ptr() == self._storages[0].data_ptr()
        if not here or end > self._storages[0].shape[2]:
            told: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return told
        for storage, new in zip(self._storages, (key_states, value_states), strict=True):
            storage[:, :, begin:end] = new
        self.keys, self.values = (storage[:, :, :end] for storage in self._storages)
        return self.keys, self.values


def make_room(cache: Any, room: int) -> None:
    """Let the layers of a transformers ``Cache`` take so many positions more where they are; those that slide stay as they are."""
    for index, layer in enumerate(cache.layers):
        if type(layer) in (DynamicLayer, RoomyLayer) and layer.is_initialized:
            cache.layers[index] = RoomyLayer(layer, room)


def _with_room(kept: Tensor, room: int) -> Tensor:
    batch, heads, length, size = kept.shape
    storage = kept.new_empty((batch, heads, length + room, size))
    storage[:, :, :length] = kept
    return storage
