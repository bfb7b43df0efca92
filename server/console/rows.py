"""Rows of the demo world that the console and the command line offer to try: memorised ones and ordinary ones."""

from __future__ import annotations

import json
from pathlib import Path

from server.settings import DEMO

ROWS = DEMO / "rows"
EACH = 12


def demo_rows() -> list[dict[str, str]]:
    """``{"label", "kind", "prompt", "expected"}`` of sets A and B and of retain-test rows, where they are there."""
    found: list[dict[str, str]] = []
    for kind, label, file in (
        ("memorised", "set A", "forget_a.jsonl"),
        ("memorised", "set B", "forget_b.jsonl"),
        ("ordinary", "unrelated", "retain_test.jsonl"),
    ):
        for number, row in enumerate(_read(ROWS / file)[:EACH], start=1):
            if "text" in row:
                lines = row["text"].splitlines(keepends=True)
                prompt = "".join(lines[: max(1, len(lines) // 3)])
                row = {"prompt": prompt, "continuation": row["text"][len(prompt) :]}  # noqa: PLW2901
            title = next((line.strip() for line in row["prompt"].splitlines() if line.strip()), "")
            found.append(
                {
                    "label": f"{label} {number}: {title[:60]}",
                    "kind": kind,
                    "set": label,
                    "prompt": row["prompt"],
                    "expected": row["continuation"],
                }
            )
    return found


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
