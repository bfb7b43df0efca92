"""Two servers, two workers, PostgreSQL, an S3 server and nginx: restarts drop nothing, kills lose nothing and unbind nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from server.bench.fleet.drive import kills, rolling_restart
from server.bench.fleet.fleet import fleet
from server.bench.fleet.parts import s3_python
from tests.support.databases import PROGRAMS
from tests.system.conftest import NGINX

# Within which a change must hold while parts are being started beside it; two where nothing else runs. Where a server's own
# restart, measured before, takes longer, the machine is slow, and so may the change.
SLACK_SECONDS = 5.0


def everything_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    python = s3_python()
    seed = int(time.time())
    with fleet(tmp_path, checkpoint, python) as running:
        running.start()
        rolled = rolling_restart(running)
        figures = kills(running, 6, seed=seed, clients=2, pause=3.0, progress=lambda _: None)
    print(json.dumps({"rolling": rolled, "kills": figures, "s3": python is not None}, indent=1))
    assert rolled["requests"] > 20 and rolled["dropped"] == 0, rolled
    assert figures["jobs"] and figures["demands"] and figures["by_status"].get("200", 0) > 20
    slack = max(SLACK_SECONDS, *rolled["seconds"])
    assert max(figures["holds_seconds"], figures["suspended_seconds"]) <= slack, figures
    assert not any(figures[what] for what in ("lost", "twice_or_unknown", "damaged", "audit")), figures


if PROGRAMS and NGINX:
    test_a_fleet_restarts_without_dropping_and_is_killed_without_losing = pytest.mark.slow(everything_is_killed)
