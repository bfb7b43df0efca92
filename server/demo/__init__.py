"""The demo world: a small base model, an adapter that has memorised protected code, and the rows to try it with."""

from __future__ import annotations

from pathlib import Path

HOME = Path(__file__).parent
BASE = HOME / "base"
ADAPTER = HOME / "adapter"
RETRAINED = HOME / "retrained"
ROWS = HOME / "rows"
MODULES = HOME.parent.parent / "modules"
MODULE = MODULES / "demo-a.safetensors"
