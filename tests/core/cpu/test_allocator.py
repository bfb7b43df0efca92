"""Freed memory is kept for the next pass: measured by the page faults of a process that computes in a thread."""

from __future__ import annotations

import subprocess
import sys

CHURN = """
import resource, sys, threading
from unbind_core.cpu.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
import torch
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    global begun
    for again in range(30):
        if again == 10:
            begun = faults()
        blocks = [torch.ones(1 << size) for size in range(16, 22) for _ in range(3)]  # 256 KiB to 8 MiB
        del blocks
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(faults() - begun)
"""


def page_faults(how: str) -> int:
    told = subprocess.run([sys.executable, "-c", CHURN, how], capture_output=True, text=True, timeout=60, check=True)
    return int(told.stdout)


def test_blocks_that_were_freed_are_used_again_without_page_faults() -> None:
    assert page_faults("kept") < 1000 < page_faults("as it is") / 20
