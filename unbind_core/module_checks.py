"""What makes a module one that can be applied: the checks that every module passes before it is a module."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unbind_core.fields import NAME, is_number, numerics_problem
from unbind_core.module_file import CORRECTIONS, DETECTORS, shown
from unbind_core.partitions import RowsByPart

if TYPE_CHECKING:
    from unbind_core.module import UnbindModule

POLICIES = ("silent", "rewrite")
MAX_GATE_WINDOW = 256  # positions
MAX_RANK = {"lowrank": 256, "network": 1024}  # of a correction: a network's hidden units
_STRONGEST = 16.0  # times a module's own strength, and more than any request may ask for
_LARGEST = torch.finfo(torch.float32).max
_LARGEST_STATE = 1e6  # of a number of a decoder layer's states: those of models are thousands at most
_UNIT = 1e-3  # how far the norm of v may be from 1: rounding to FP32, no more


def name_problem(name: str) -> str | None:
    """What is wrong with a module's name; None where nothing is. Asked before a fit, too, which would be lost to it."""
    if re.fullmatch(NAME, name):
        return None
    return "must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit"


def module_problems(module: UnbindModule) -> Iterator[tuple[str, str]]:
    """Every (field, what is wrong with it), first things first: later checks may rest on earlier ones."""
    size, count = module.model.hidden_size, module.model.num_layers
    found = module.tensors
    if problem := name_problem(str(module.name)):
        yield "name", problem
    if type(module.layer) is not int or not 0 <= module.layer < count:
        yield "layer", f"is {module.layer!r}; the model has layers 0 to {count - 1}"
    for field, kinds in (("detector", DETECTORS), ("correction", CORRECTIONS)):
        kind = getattr(module, field)
        if kind not in kinds:
            yield field, f"{kind!r} cannot be applied by this version; upgrade this software"
        here = found.keys() & set().union(*kinds.values())
        if here != kinds[kind]:
            needed, given = (", ".join(sorted(names)) or "none" for names in (kinds[kind], here))
            yield field, f"'{kind}' needs the tensors {needed}, not {given}"
    yield from _correction_problems(module, size)
    if module.policy not in POLICIES:
        yield "policy", f"is {shown(module.policy)}; it must be one of {', '.join(POLICIES)}"
    if problem := numerics_problem(module.calibrated):
        yield "calibrated", problem
    for field, low, needed in (
        ("s_ref", -math.inf, ""),
        ("tau", 0, " and not negative"),
        ("kappa", 0, " and not negative"),
    ):
        value = getattr(module, field)
        if not is_number(value) or value < low:
            yield field, f"is {shown(value)}; it must be a finite number{needed}, in single precision"
    yield from _detector_problems(module, size)
    if module.quantile is not None and not (is_number(module.quantile) and 0 <= module.quantile <= 1):
        yield "quantile", f"is {shown(module.quantile)}; it must lie between 0 and 1, or be null"
    parts = module.partitions if isinstance(module.partitions, RowsByPart) else RowsByPart(module.partitions)
    if parts.problem is not None:
        yield "partitions", parts.problem


def _correction_problems(module: UnbindModule, size: int) -> Iterator[tuple[str, str]]:
    """The correction's tensors. What is added to a state, kappa times, is finite: infinity times a closed gate's 0 is not a number,
    for every row of a batch.
    """
    times = _STRONGEST * max(1.0, module.kappa) if is_number(module.kappa) else 1.0
    if module.v is not None:
        yield from _tensor_problems("v", module.v, (size,), times=times)
        if abs(float(module.v.double().norm()) - 1) > _UNIT:
            yield (
                "v",
                f"must have unit length, not {float(module.v.double().norm()):.4f}; the strength belongs in kappa",
            )
    if module.u is None or module.a is None or module.c is None:
        return
    rank, most = module.u.shape[-1] if module.u.dim() == 2 else 0, MAX_RANK.get(module.correction, 0)
    if not 1 <= rank <= most:
        yield "u", f"must be [{size}, r] with a rank r from 1 to {most}, not {list(module.u.shape)}"
    large = torch.bfloat16 if module.correction == "network" else torch.float32
    for field, tensor, shape, dtype in (
        ("u", module.u, (size, rank), large),
        ("a", module.a, (rank, size), large),
        ("c", module.c, (size,), torch.float32),
        ("e", module.e, (rank,), torch.float32),
    ):
        if tensor is not None:
            adds = times if field in ("u", "c") else 1.0
            yield from _tensor_problems(field, tensor, shape, zero=True, dtype=dtype, times=adds)
    inner = size * _LARGEST_STATE * _reach(module.a) + (0.0 if module.e is None else _reach(module.e))
    if times * rank * _reach(module.u) * inner > _LARGEST:
        yield "a", "must leave what u makes of it finite in single precision, kappa times; fit it again"
    if not bool(module.c.any()) and not (bool(module.u.any()) and bool(module.a.any())):
        yield "c", "must not be all zero where u or a is: such a module changes nothing; fit it again"


def _reach(tensor: Tensor) -> float:
    """The largest of its numbers, whatever the sign."""
    if not tensor.numel():
        return 0.0
    least, most = tensor.aminmax()  # no copy of it, which would leave a hole in memory between one module and the next
    return max(-float(least), float(most))


def _detector_problems(module: UnbindModule, size: int) -> Iterator[tuple[str, str]]:
    """The detector's tensors, its window and its second threshold."""
    if module.detector == "fisher":
        yield from _tensor_problems("w", module.w, (size,))
        for field, needed in (
            ("window", (1,)),
            ("first", (0,)),
            ("least", (1,)),
            ("tau_close", (None, module.tau)),
            ("hold", (None,)),
        ):
            if getattr(module, field) not in needed:
                yield (
                    field,
                    f"is {getattr(module, field)!r}; the 'fisher' detector has no memory: {needed[0]!r} is needed",
                )
        return
    b, heads, heads_b = module.network
    width, count = b.numel(), heads_b.numel()
    shapes = (("w", module.w, (width, size)), ("b", b, (width,)), ("heads", heads, (count, width)))
    for field, tensor, shape in (*shapes, ("heads_b", heads_b, (count,))):
        yield from _tensor_problems(field, tensor, shape, zero=field in ("b", "heads_b"))
    if type(module.window) is not int or not 1 <= module.window <= MAX_GATE_WINDOW:
        yield "window", f"is {module.window!r}; it must be a whole number of positions from 1 to {MAX_GATE_WINDOW}"
    if type(module.first) is not int or not 0 <= module.first <= MAX_GATE_WINDOW:
        yield "first", f"is {module.first!r}; it must be a whole number of positions from 0 to {MAX_GATE_WINDOW}"
    if type(module.least) is not int or not 1 <= module.least <= module.window:
        yield "least", f"is {module.least!r}; it must be a whole number of positions from 1 to the window"
    if module.hold is not None and not (type(module.hold) is int and module.window < module.hold <= MAX_GATE_WINDOW):
        yield "hold", f"is {shown(module.hold)}; it must be longer than the window, at most {MAX_GATE_WINDOW}, or null"
    if not module.tau > 0:
        yield "tau", f"is {module.tau!r}; a network's threshold must lie above s_ref"
    close = module.tau_close
    if close is not None and not (is_number(close) and 0 <= close <= module.tau):
        yield "tau_close", f"is {shown(close)}; it must lie between 0 and tau, or be null"


def _tensor_problems(
    field: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    zero: bool = False,
    dtype: torch.dtype = torch.float32,
    times: float = 1.0,
) -> Iterator[tuple[str, str]]:
    if tensor.dtype != dtype or tensor.device.type != "cpu" or tuple(tensor.shape) != shape:
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        yield field, f"must be {str(dtype).removeprefix('torch.')} {list(shape)} on the CPU, not {found}"
    # In one pass, with nothing in between: a copy of each tensor, freed again, would leave holes between the modules that stay.
    least, most = (float(one) for one in torch.aminmax(tensor)) if tensor.numel() else (0.0, 0.0)
    if not (math.isfinite(least) and math.isfinite(most)) or not (zero or least or most):
        yield field, "must be finite and not all zero; fit it again"
    elif max(-least, most) * times > _LARGEST:
        yield field, "must stay finite in single precision, kappa times; fit it again"
