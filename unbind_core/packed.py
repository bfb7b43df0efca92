"""Checkpoints whose weights are whole numbers packed into int32, GPTQ and AWQ: read as plain weights.

The packages that compute with such weights as they are stored bring kernels of their own, and want releases of torch that others
do not. A fit needs states and gradients, whatever the kernel; plain weights give both on any device. The layouts are those of
AutoGPTQ and AutoAWQ, to which whoever writes these formats keeps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

WORD = 32  # bits of the numbers that others are packed into
WIDTHS = (2, 4, 8)  # bits that divide a word; numbers of 3 lie across two
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each of eight neighbours lies
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
# What says which layout it is, and those that are read; where nothing says so it is the first.
_LAYOUTS = {"gptq": ("checkpoint_format", ("gptq", "gptq_v2")), "awq": ("version", ("gemm",))}


def is_packed(settings: Mapping[str, Any]) -> bool:
    """Whether a checkpoint with this quantisation is one that is read here."""
    return str(settings.get("quant_method")) in _LAYOUTS


def plain_weights(folder: Path, settings: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of a packed checkpoint by name; of a packed layer ``weight`` [out,in] = scale (q - zero), computed in FP32. What
    is floating is cast to ``dtype``.

    ``settings`` are the checkpoint's ``quantization_config``. Raises ValueError for a layout that is not read, and where tensors
    are missing or do not fit each other; OSError where a file is.
    """
    method = str(settings["quant_method"])
    key, known = _LAYOUTS[method]
    layout = str(settings.get(key) or settings.get("format") or known[0]).lower()
    if layout not in known:
        raise ValueError(
            f"its weights are packed as {method} with {key} '{layout}'; {' and '.join(known)} can be read: write the checkpoint in "
            "such a layout, or take another checkpoint of the model"
        )
    plain: dict[str, Tensor] = {}
    with ExitStack() as stack:
        stored = _stored(folder, stack)
        for name, file in stored.items():
            owner, _, part = name.rpartition(".")
            if part == "qweight":
                try:
                    parts = {one: stored[f"{owner}.{one}"].get_tensor(f"{owner}.{one}") for one in _PARTS[:3]}
                    groups = f"{owner}.g_idx"
                    if method == "awq":
                        weight = _awq(**parts)
                    else:
                        group_of = stored[groups].get_tensor(groups) if groups in stored else None
                        weight = _gptq(**parts, group_of=group_of, below=int(layout == "gptq"))
                except KeyError as missing:
                    raise ValueError(f"weights are missing: {missing.args[0]}; download it again") from None
                except (RuntimeError, ValueError, IndexError) as error:
                    raise ValueError(f"the packed weights of {owner} do not fit each other: {error}") from error
                plain[f"{owner}.weight"] = weight.to(dtype)
            elif part not in _PARTS:
                value = file.get_tensor(name)
                plain[name] = value.to(dtype) if value.is_floating_point() else value
    return plain


def _stored(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The names of the checkpoint's tensors, and the open file that has each."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted({Path(name).name for name in json.loads(index.read_text())["weight_map"].values()})
    found: dict[str, Any] = {}
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{name} is missing; packed weights are read from safetensors, download it again")
        file = stack.enter_context(safe_open(folder / name, "pt"))
        found |= dict.fromkeys(file.keys(), file)
    return found


def _gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_of: Tensor | None, below: int) -> Tensor:
    """Weight FP32 [out,in] of int32 qweight [in bits / 32,out], packed along the inputs, qzeros [groups,out bits / 32], scales
    [groups,out] and the group of each input, int32 [in]; ``below``: by how much a zero point is stored lower than it is.
    """
    groups, out = scales.shape
    bits = _bits(qzeros.shape[1], out)
    numbers = _unpacked(qweight.t(), bits)  # [out,in]
    zeros = _unpacked(qzeros, bits) + below
    inputs = numbers.shape[1]
    if group_of is None:
        group_of = torch.arange(inputs) // (inputs // groups)
    if len(group_of) != inputs or numbers.shape[0] != out or len(zeros) != groups:
        raise ValueError(f"{inputs} inputs, {len(group_of)} with a group")
    return _scaled(numbers, zeros, scales, group_of.long())


def _awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """Weight FP32 [out,in] of int32 qweight [in,out / 8] and qzeros [groups,out / 8], packed along the outputs, and scales
    [groups,out].
    """
    inputs, groups = len(qweight), len(scales)
    if _bits(qweight.shape[1], scales.shape[1]) != WORD // len(AWQ_ORDER) or inputs % groups:
        raise ValueError(f"{inputs} inputs in {groups} groups; AWQ has 4 bits")
    numbers, zeros = (_unpacked(part, 4, AWQ_ORDER) for part in (qweight, qzeros))
    return _scaled(numbers.t(), zeros, scales, torch.arange(inputs) // (inputs // groups))


def _bits(words: int, numbers: int) -> int:
    bits, rest = divmod(WORD * words, numbers)
    if rest or bits not in WIDTHS:
        raise ValueError(f"{WORD * words / numbers:.3g} bits a number; {', '.join(map(str, WIDTHS))} can be read")
    return bits


def _unpacked(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """uint8 [rows,n] of int32 [rows,n bits / 32], the lowest bits first or in the order that is given."""
    places = torch.tensor(order or range(WORD // bits)) * bits
    numbers: Tensor = (words.unsqueeze(-1) >> places) & (2**bits - 1)
    return numbers.to(torch.uint8).reshape(len(words), -1)


def _scaled(numbers: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    """scale (q - zero), FP32 [out,in]: numbers [out,in], zeros and scales [groups,out], the group of each input int64 [in]."""
    scale, zero = (part.float().t().index_select(1, group_of) for part in (scales, zeros))
    weight: Tensor = numbers.float().sub_(zero).mul_(scale)
    return weight
