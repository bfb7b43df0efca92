"""Decode steps through the kernels decide, remember and count as those through torch: interpreted, where Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import torch

from tests.support.repository import ROOT
from unbind_core.applying.fused import kernels_of

COMPARED = """
import torch
from tests.support.decoding import compared
opened = [
    compared(torch.device("cpu"), dtype, paged, seed)
    for seed in range(4) for dtype in (torch.float32, torch.bfloat16) for paged in (False, True)
]
assert sum(map(bool, opened)) > len(opened) // 2, opened
"""

if find_spec("triton"):

    def test_kernels_do_what_torch_does() -> None:
        """In a process of its own: whether kernels are interpreted is settled when Triton is first imported."""
        environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(
            [sys.executable, "-c", COMPARED], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr[-4000:]


def test_no_kernels_are_asked_of_a_cpu() -> None:
    assert kernels_of(torch.device("cpu")) is None
