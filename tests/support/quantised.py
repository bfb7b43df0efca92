"""Checkpoints with quantised weights, written by hand: FP8, GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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


AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours lies at each place of a word


def packed(
    source: Path,
    folder: Path,
    method: str,
    *,
    bits: int = 4,
    group: int = 16,
    sym: bool = False,
    shuffled: bool = False,
) -> Path:
    """The checkpoint ``source`` with the weights of its layers as whole numbers packed into int32, in groups of ``group`` inputs
    that share scale and zero point, and beside it, in ``folder``-plain, the one with the weights that these stand for.

    ``shuffled``: each input is of any group (GPTQ's act order). ``sym``: every zero point is the middle, as vLLM wants it of GPTQ.
    """
    plain = Path(f"{folder}-plain")
    for path in (folder, plain):
        shutil.copytree(source, path)
    stored, meant = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if not name.endswith("_proj.weight"):
            continue
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(stored)))
        of = torch.arange(weight.shape[1]) // group
        of = of[order] if shuffled else of
        numbers, zeros, scales = _rounded(weight, of, bits, sym)
        del stored[name]
        owner = name.removesuffix(".weight")
        meant[name] = (numbers - zeros.t()[:, of]) * scales.float().t()[:, of]
        if method == "awq":
            parts = {"qweight": _words(numbers.t(), 4, AWQ_PLACES), "qzeros": _words(zeros, 4, AWQ_PLACES)}
        else:
            parts = {"qweight": _words(numbers, bits).t(), "qzeros": _words(zeros - 1, bits), "g_idx": of.int()}
        stored |= {f"{owner}.{part}": tensor.contiguous() for part, tensor in {**parts, "scales": scales}.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    told = {"quant_method": method, "bits": bits, "group_size": group}
    gptq, awq = {"sym": sym, "desc_act": shuffled}, {"zero_point": True, "version": "gemm"}
    return said_to_be(folder, told | (awq if method == "awq" else gptq))


def compressed(source: Path, folder: Path, group: int = 32) -> Path:
    """The checkpoint ``source`` with the weights of its layers as compressed-tensors packs numbers of 4 bits around zero."""
    shutil.copytree(source, folder)
    stored = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        numbers, _, scales = _rounded(weight, torch.arange(weight.shape[1]) // group, 4, True)
        owner = name.removesuffix("weight")
        stored[f"{owner}weight_packed"] = _words(numbers, 4)
        stored[f"{owner}weight_scale"] = scales.t().contiguous().bfloat16()
        stored[f"{owner}weight_shape"] = torch.tensor(weight.shape)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return said_to_be(folder, settings | {"config_groups": groups, "quantization_status": "compressed"})


def _rounded(weight: Tensor, of: Tensor, bits: int, sym: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers int64 [out,in] from 0, zero points int64 from 1 and scales float16 [groups,out]; input i has row of[i] of them."""
    most = 2**bits - 1
    zeros, scales = [], []
    for group in range(int(of.max()) + 1):
        own = weight[:, of == group]
        low, high = own.amin(1), own.amax(1)
        low = -torch.maximum(-low, high) if sym else low
        scale = ((-2 * low if sym else high - low) / (most - 1)).half()
        scales.append(scale)
        middle = torch.full_like(scale, 2 ** (bits - 1)).long()
        zeros.append(middle if sym else (-low / scale.float()).round().long().clamp(1, most))
    zero, scale = torch.stack(zeros), torch.stack(scales)
    numbers = (weight / scale.float().t()[:, of] + zero.t()[:, of]).round().long().clamp(0, most)
    return numbers, zero, scale


def _words(numbers: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 [rows,n bits / 32] of whole numbers [rows,n], the first at the lowest bits or at the ``places`` that are given."""
    parts = numbers.reshape(len(numbers), -1, 32 // bits)
    if places is not None:
        parts = parts[:, :, list(places)]
    words = (parts << (torch.arange(32 // bits) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()
