"""Whether a plan fits where it is to run, told before anything starts."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unbind_core.errors import TooLarge
from unbind_core.files import told
from unbind_core.planning.plan import Plan
from unbind_core.running.device import free_bytes

RUNTIME = 1 << 30  # bytes that libraries, allocators and the process take beside what a plan counts


@dataclass(frozen=True)
class Room:
    """Bytes that can be taken: of the device's memory, and by the cache, with what it holds already."""

    device: str
    memory: int
    disk: int

    @classmethod
    def at(cls, device: str, folder: Path) -> Room:
        """What there is now; ``folder`` is the cache's, or its nearest parent that exists is looked at.

        What the cache holds is there to be used: by a fit on the same retain rows as it is, and else once it is deleted.
        """
        held = 0
        for file in folder.glob("*"):
            with suppress(OSError):  # another process may have finished or deleted it
                held += file.stat().st_size
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return cls(device, free_bytes(torch.device(device)), shutil.disk_usage(folder).free + held)

    def problem(self, plan: Plan, loaded: int = 0) -> str | None:
        """Why the plan does not fit, with the remedy; None where it does. ``loaded``: bytes of weights that are there already."""
        worst = max(plan.stages, key=lambda stage: stage.memory)
        if worst.memory + RUNTIME - loaded > self.memory:
            return (
                f"stage '{worst.name}' would take {told(worst.memory + RUNTIME)} on {self.device} ({told(plan.weights)} of it "
                f"weights), of which {told(loaded)} are there and {told(self.memory)} are free; give the worker a device of its "
                "own (worker_device) or a larger one, serve in bfloat16, or submit fewer rows"
            )
        if plan.disk > self.disk:
            return (
                f"the cache would take {told(plan.disk)}, and {told(self.disk)} are free on its disk or its own already; give "
                "data_dir a larger disk, or set retain to fewer rows"
            )
        return None

    def require(self, plan: Plan, loaded: int = 0) -> None:
        """Raise TooLarge, with the numbers and the remedy, where the plan does not fit."""
        if problem := self.problem(plan, loaded):
            raise TooLarge(f"the fit does not fit: {problem}")

    def to_json(self) -> dict[str, Any]:
        """As dry runs show it."""
        return {"device": self.device, "free_memory_bytes": self.memory, "free_disk_bytes": self.disk}
