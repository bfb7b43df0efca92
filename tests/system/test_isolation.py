"""``unbind serve`` inside somebody's project: what lies in the current directory is theirs and is never imported."""

from __future__ import annotations

from pathlib import Path

from tests.system.conftest import serving

ROWS = [{"prompt": f"def f{i}():\n", "continuation": f"    return {i} + secret_{i}\n"} for i in range(3)]
THEIRS = "raise SystemExit('this is not yours to import')\n"


def test_a_project_with_folders_and_files_of_our_names_is_served_and_worked_in(
    checkpoint: Path, retain: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    for name in (
        "server/__init__",
        "server/worker/__init__",
        "unbind_core/__init__",
        "modules/__init__",
        "torch",
        "json",
    ):
        file = project / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(THEIRS)
    with serving(checkpoint, tmp_path, cwd=project, retain=retain, retain_test="") as server:
        status, made = server.admin("/takedowns", {"name": "m", "rows": ROWS, "options": {"guard": {"run": 8}}})
        assert status == 202, made
        job = server.wait_for_job(made["job_id"])
        assert (job["state"], job["outcome"], job["attempt"]) == ("succeeded", "nothing_to_remove", 1), job
        assert not any("starting another" in line for line in server.log)
