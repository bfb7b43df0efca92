"""Checkpoints with quantised weights, written by hand: the format FP8, which the library reads with nothing more installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 16  # rows and columns that share a scale
LARGEST = 448.0  # of float8 e4m3
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
FP8_TOLD = "fp8, weight_block_size 16x16, activation_scheme dynamic"


def fp8(source: Path, folder: Path) -> Path:
    """The checkpoint ``source`` with the weights of its layers in float8, blocks of which share a scale."""
    shutil.copytree(source, folder)
    stored = {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = weight
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape
            blocks = weight.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scale = blocks.abs().amax((1, 3)) / LARGEST
            numbers = (blocks / scale[:, None, :, None]).reshape(rows, columns)
            stored |= {name: numbers.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return said_to_be(folder, FP8)


def said_to_be(folder: Path, quantisation: dict[str, Any]) -> Path:
    """The same checkpoint with this quantisation in its configuration, whatever its weights are."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    return folder
