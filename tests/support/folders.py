"""What lies in a folder that other processes write to and delete from meanwhile: Path.rglob raises there, os.walk does not."""

from __future__ import annotations

import os
from pathlib import Path


def files_in(folder: Path) -> list[Path]:
    """Every file below a folder."""
    return [Path(where) / name for where, _, names in os.walk(folder) for name in names]
