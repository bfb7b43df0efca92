"""What a device has: free memory, and arithmetic with instructions of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from unbind_core.running.allowed import allowed_bytes

UNKNOWN_FREE = 4 * 1024**3  # bytes
SHARED = 1 << 25  # multiplications of one product that are worth a second thread, about a millisecond of one thread's
SHARED_PASS = 1 << 27  # and of a whole pass through a model, which is dozens of small operations beside its products


def problem_of(name: str) -> str | None:
    """Why nothing can be computed on a torch device of this name here, with the remedy; None where it can."""
    try:
        device = torch.device(name)
    except RuntimeError:
        return f"'{name}' is no torch device; give cpu, cuda or cuda:N"
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        return f"'{name}' is not there: this process sees {count} CUDA devices; give one of them, or cpu"
    return None


def free_bytes(device: torch.device) -> int:
    """What can still be allocated: on the device, or of this machine and what this process may have of it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = _read("/proc/meminfo").splitlines()
    found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *allowed_bytes()], default=UNKNOWN_FREE)


def forget_peak(device: torch.device) -> None:
    """Let :func:`peak_bytes` begin anew: for what follows. Where the kernel does not let a process do so, it goes on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(device: torch.device) -> int:
    """The most memory that there was at a time: of tensors on the device, or of this process; 0 where nothing tells."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    lines = _read("/proc/self/status").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def bfloat16_is_fast(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 have instructions of their own there, and so cost about half."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    found = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


@contextmanager
def threads_for(device: torch.device, multiplications: int, shared: int | None = None) -> Iterator[None]:
    """Inside, as many threads as serve so much work: one where it is no more than ``shared`` (default SHARED) on a CPU, as waking
    the others can cost ten times the work.
    """
    if device.type != "cpu":
        yield
        return
    every = torch.get_num_threads()
    little = multiplications <= (SHARED if shared is None else shared)
    torch.set_num_threads(1 if little else every)
    try:
        yield
    finally:
        torch.set_num_threads(every)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
