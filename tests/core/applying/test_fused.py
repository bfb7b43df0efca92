"""Decode steps through the kernels decide, remember and count as those through torch: interpreted, where Triton is installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.core.conftest import make_network_module
from tests.support.decoding import compared
from tests.support.repository import ROOT
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.fused import Kernels, kernels_of
from unbind_core.identity import ModelIdentity

CPU = torch.device("cpu")
COMPARED = """
import torch
from tests.support.decoding import compared
from unbind_core.applying.fused import PAGED, kernels_of
cpu = torch.device("cpu")
assert kernels_of(cpu, True).made(24, torch.float32, *PAGED) is not None
opened = [
    compared(cpu, dtype, paged, seed)
    for seed in range(4) for dtype in (torch.float32, torch.bfloat16) for paged in (False, True)
]
assert sum(map(bool, opened)) > len(opened) // 2, opened
"""

POINTERS = {
    **dict.fromkeys(("products", "offsets", "closes", "weights", "bounds", "states"), "*fp32"),
    **dict.fromkeys(("factors", "constants", "edge", "work"), "*fp32"),
    **dict.fromkeys(("modules", "memory", "positions", "pages", "opened"), "*i32"),
    **dict.fromkeys(("rows", "tally", "requests", "hits", "matrices"), "*i64"),
    "counted": "*i1",
    "to": "*bf16",
    "out": "*bf16",
}

if find_spec("triton"):

    def test_kernels_do_what_torch_does() -> None:
        """In a process of its own: whether kernels are interpreted is settled when Triton is first imported."""
        environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(
            [sys.executable, "-c", COMPARED], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr[-4000:]

    @pytest.mark.parametrize("capability", [80, 90])
    @pytest.mark.parametrize("name", ["decide", "correct"])
    def test_kernels_compile_for_gpus_that_are_not_here(name: str, capability: int) -> None:
        """What an interpreter takes may be none of Triton's language; that they compute the same there only a GPU can show."""
        triton, target = importlib.import_module("triton"), importlib.import_module("triton.backends.compiler")
        kernel = getattr(importlib.import_module("unbind_core.cuda.kernels"), name)
        told = {one: POINTERS.get(one, "i32") for one in kernel.arg_names}
        aligned = {(kernel.arg_names.index("d"),): [["tt.divisibility", 16]]}  # as those of real models are
        source = triton.compiler.ASTSource(fn=kernel, signature=told, constexprs={}, attrs=aligned)
        built = triton.compile(source, target=target.GPUTarget("cuda", capability, 32)).asm
        assert built["cubin"] and "ld.global.v4" in built["ptx"]  # matrices are read 16 bytes at a time


def test_no_kernels_are_asked_of_a_cpu() -> None:
    assert kernels_of(CPU) is None


def test_where_kernels_cannot_be_compiled_torch_does_their_work_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernels_of.cache_clear()  # on a processor that is not told to interpret them they cannot, with Triton or without
    opened = sum(compared(CPU, dtype, paged, 1) for dtype in (torch.float32, torch.bfloat16) for paged in (False, True))
    assert opened
    (said,) = (one.getMessage() for one in caplog.records if "kernels" in one.getMessage())
    assert "cannot be compiled" in said and "C compiler" in said


def test_kernels_are_compiled_when_the_first_module_comes_not_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    compiled = Kernels._compiled
    monkeypatch.setattr(Kernels, "_compiled", lambda own, *key: asked.append(key) or compiled(own, *key))
    kernels_of.cache_clear()
    model = ModelIdentity("f" * 64, "tiny", 24, 4)
    for one_table, kept in ((True, torch.int32), (False, torch.int64)):
        bank = ModuleBank(CPU, one_table=one_table, kernels=True, dtype=torch.bfloat16)
        assert (24, torch.bfloat16, kept, kept) not in asked
        for i in range(2):
            bank.add(make_network_module(model, f"m{i}", 1, seed=i))
        assert asked.count((24, torch.bfloat16, kept, kept)) == 1
    before = list(asked)
    compared(CPU, torch.bfloat16, True, 1)
    compared(CPU, torch.bfloat16, False, 1)
    assert asked == before
