"""The demo world: a small base model, an adapter that has memorised protected code, and the rows to try it with."""

from __future__ import annotations

from pathlib import Path

HOME = Path(__file__).parent
BASE = HOME / "base"
ADAPTER = HOME / "adapter"
RETRAINED = HOME / "retrained"
REFERENCE = HOME / "reference"
ROWS = HOME / "rows"
RETAIN_TRAIN, RETAIN_CALIBRATION, RETAIN_TEST = (
    ROWS / f"retain_{part}.jsonl" for part in ("train", "calibration", "test")
)
MODULES = HOME.parent.parent / "modules"
MODULE = MODULES / "demo-a.safetensors"
