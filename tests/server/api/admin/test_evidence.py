"""The evidence over HTTP, where a takedown's private files do not open."""

from __future__ import annotations

from pathlib import Path

from server.registry.private.store import PrivateStore
from server.registry.tables import JobState
from tests.server.registry.test_registry import claim, made_by, submit
from tests.support.live import live


def test_evidence_under_a_lost_key_says_that_purging_gives_it_without_samples(checkpoint: Path, tmp_path: Path) -> None:
    where, lost, new = str(tmp_path / "private"), bytes(32), bytes(range(32))
    with live(checkpoint, tmp_path, (), private_store=where, private_key=new.hex()) as running:
        registry = running.service.registry
        job_id = submit(registry)
        held = claim(registry)
        PrivateStore(where, [lost]).put(f"jobs/{job_id}/attempt-1/exhibits.json", b'{"samples": []}')
        registry.jobs.stage_done(held, "verify", {"seconds": 1.0, "folder": "attempt-1", "result": {}})
        registry.jobs.finish(held, JobState.SUCCEEDED, 1.0, result={}, module=made_by(held))
        takedown = f"/takedowns/{held.takedown_id}"
        refused = running.admin(f"{takedown}/evidence")
        assert (refused.status, refused.error["code"]) == (409, "private_file_unreadable")
        told = refused.error["message"]
        assert "add that key behind" in told and "purge the takedown" in told and lost.hex() not in told
        assert running.admin(f"{takedown}/purge", method="POST").status == 200
        document = running.admin(f"{takedown}/evidence")
        assert document.status == 200 and document.body["payload"]["exhibits"] is None
