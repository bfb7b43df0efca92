"""Decode steps through the kernels decide, remember and count as those through torch, on the device they are made for."""

from __future__ import annotations

import pytest
import torch

from tests.support.decoding import compared
from unbind_core.applying.fused import Kernels, kernels_of

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_do_what_torch_does(dtype: torch.dtype, paged: bool) -> None:
    opened = [compared(DEVICE, dtype, paged, seed, d) for d in (24, 1040) for seed in range(20)]
    assert sum(map(bool, opened)) > len(opened) // 2  # and gates do open


def test_kernels_are_what_decode_steps_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    from unbind_core.cuda.decoding import DecodeKernels

    launched = []
    correct = DecodeKernels.correct
    monkeypatch.setattr(DecodeKernels, "correct", lambda *given, **named: launched.append(correct(*given, **named)))
    compared(DEVICE, torch.bfloat16, True, 0, kernels=None)
    assert launched


@pytest.mark.parametrize("d", [24, 30])  # whose rows are aligned to 16 bytes, and not
def test_they_are_compiled_for_the_kinds_of_memory_and_launched_as_they_are_compiled(d: int) -> None:
    from unbind_core.applying.fused import PAGED, SLOTS
    from unbind_core.cuda import kernels

    for kind in (PAGED, SLOTS):
        made = Kernels(DEVICE).made(d, torch.bfloat16, *kind)
        assert made is not None
        assert made._decide is not kernels.decide and made._correct is not kernels.correct


def test_a_step_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_of.cache_clear()
    asked = []
    compiled = Kernels._compiled
    monkeypatch.setattr(Kernels, "_compiled", lambda own, *key: asked.append(key) or compiled(own, *key))
    kernels = kernels_of(DEVICE, True)
    assert kernels is not None
    for paged in (True, False):
        kernels.prepare(24, torch.bfloat16, paged=paged)
    before = list(asked)
    for paged in (True, False):
        compared(DEVICE, torch.bfloat16, paged, 0)
    assert asked == before and len(before) == 2
