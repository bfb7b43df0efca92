"""Freed memory is kept for the next pass: measured by the page faults of a process that computes what a layer does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from unbind_core.cpu.allocator import KEEPING, keep_freed_memory

PASSES = """
import resource, sys
from unbind_core.cpu.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory() and not keep_freed_memory()  # what is set already is somebody's own
import torch
torch.set_num_threads(1)
up, down = torch.ones(256, 2048), torch.ones(2048, 256)

def passes(count):
    for _ in range(4 * count):
        states = torch.ones(1024, 256)
        states = states + (torch.nn.functional.silu(states @ up) * (states @ up)) @ down
        torch.softmax(states @ states.T, -1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

print(-passes(5) + passes(10))
"""


def page_faults(how: str) -> int:
    told = subprocess.run([sys.executable, "-c", PASSES, how], capture_output=True, text=True, timeout=60, check=True)
    return int(told.stdout)


def test_blocks_that_were_freed_are_used_again_without_page_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEEPING:
        monkeypatch.delenv(name, raising=False)
    assert 5 * page_faults("kept") < page_faults("as it is")


def test_the_settings_of_whoever_starts_the_process_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    before = dict(os.environ)
    assert not keep_freed_memory() and dict(os.environ) == before
