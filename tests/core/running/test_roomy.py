"""A cache with room: what the library's own holds, and nothing moves while a token is appended."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from tests.core.conftest import TinyCheckpoint
from unbind_core.architecture import load_model
from unbind_core.running.roomy import RoomyLayer, make_room

ROOM = 3


def filled() -> tuple[DynamicCache, DynamicCache]:
    torch.manual_seed(0)
    caches = DynamicCache(), DynamicCache()
    append(*caches, 5)
    make_room(caches[0], ROOM)
    return caches


def append(one: DynamicCache, other: DynamicCache, count: int, rows: int = 4) -> None:
    new = torch.randn(2, rows, 2, count, 8)
    for found, wanted in zip(one.update(*new, 0), other.update(*new, 0), strict=True):
        assert torch.equal(found, wanted)


def test_tokens_are_written_behind_those_that_stay_until_the_room_is_used_up() -> None:
    cache, library = filled()
    begins = [cache.layers[0].keys.data_ptr(), cache.layers[0].values.data_ptr()]
    for _ in range(ROOM):
        append(cache, library, 1)
        assert [cache.layers[0].keys.data_ptr(), cache.layers[0].values.data_ptr()] == begins
    for _ in range(2):
        append(cache, library, 1)
        assert cache.get_seq_length() == library.get_seq_length()


def test_it_is_as_the_library_s_after_rows_left_or_were_taken_back() -> None:
    cache, library = filled()
    for each in (cache, library):
        each.batch_select_indices(torch.tensor([0, 2]))
    append(cache, library, 1, rows=2)
    cache, library = filled()
    append(cache, library, 1)
    for each in (cache, library):
        each.crop(-2)
    append(cache, library, 2)
    for each in (cache, library):
        each.reset()
    append(cache, library, 2)
    make_room(cache, ROOM)
    make_room(cache, ROOM)  # room is made anew for each stretch
    append(cache, library, ROOM)


def test_layers_that_slide_are_left_as_they_are(tiny_checkpoint: TinyCheckpoint) -> None:
    cache = DynamicCache(config=load_model(tiny_checkpoint("gemma2")).model.config.get_text_config())
    make_room(cache, ROOM)  # of nothing
    for index in range(len(cache.layers)):
        cache.update(*torch.randn(2, 1, 2, 20, 8), index)
    before = list(cache.layers)
    make_room(cache, ROOM)
    for layer, was in zip(cache.layers, before, strict=True):
        assert layer is was if was.is_sliding else type(layer) is RoomyLayer
    assert {layer.is_sliding for layer in cache.layers} == {True, False}
