"""What one large body costs everybody else."""

from __future__ import annotations

import gc
from pathlib import Path

from tests.support.live import live


def test_the_collector_of_garbage_passes_over_what_a_started_server_has(checkpoint: Path, tmp_path: Path) -> None:
    """A body of 900,000 empty lists had it go through all of it for seconds, and nothing else went on."""
    with live(checkpoint, tmp_path) as running:
        assert running.complete(zz=[[]] * 100_000, max_tokens=1).status == 200
        assert gc.get_freeze_count() > len(gc.get_objects())
    assert not gc.get_freeze_count()
