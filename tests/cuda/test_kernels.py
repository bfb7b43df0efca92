"""Decode steps through the kernels decide, remember and count as those through torch, on the device they are made for."""

from __future__ import annotations

import pytest
import torch

from tests.support.decoding import compared

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_do_what_torch_does(dtype: torch.dtype, paged: bool) -> None:
    opened = [compared(DEVICE, dtype, paged, seed, d) for d in (24, 1040) for seed in range(20)]
    assert sum(map(bool, opened)) > len(opened) // 2  # and gates do open


def test_kernels_are_what_decode_steps_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    from unbind_core.cuda import decoding

    launched = []
    correct = decoding.correct
    monkeypatch.setattr(decoding, "correct", lambda *given: launched.append(correct(*given)))
    compared(DEVICE, torch.bfloat16, True, 0, kernels=None)
    assert launched
