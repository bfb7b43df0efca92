"""The checkpoint that vLLM reads of a model with an adapter: in the precision that is asked for, and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from server import demo
from server.engine.vllm.build import merged
from unbind_core.architecture import load_model


def test_weights_that_were_merged_in_another_precision_are_not_taken(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float32):  # the one that rounds first
        loaded = load_model(demo.BASE, demo.ADAPTER, dtype=dtype)
        model: Any = loaded.model
        written = AutoModelForCausalLM.from_pretrained(
            merged(loaded, tmp_path, str(dtype).removeprefix("torch.")), dtype=dtype
        )
        own = dict(model.named_parameters())
        assert all(torch.equal(weight, own[name]) for name, weight in written.named_parameters())
    assert len(list(tmp_path.iterdir())) == 2


def test_two_servers_that_merge_into_one_folder_at_once_both_find_it_whole(tmp_path: Path) -> None:
    loaded = load_model(demo.BASE, demo.ADAPTER)
    model: Any = loaded.model
    write, found = model.save_pretrained, []

    def beside(folder: Path) -> None:
        write(folder)
        model.save_pretrained = write
        found.append(merged(loaded, tmp_path, "float32"))  # another server, from its start to its end

    model.save_pretrained = beside
    found.append(merged(loaded, tmp_path, "float32"))
    assert found[0] == found[1] and list(tmp_path.iterdir()) == [found[0]]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in found[0].iterdir()}
