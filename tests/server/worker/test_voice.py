"""What a job's child says of its progress: never less than before, and something is always left."""

from __future__ import annotations

import io
import json

from server.worker.child import Voice
from unbind_core.progress import Progress


def test_progress_never_goes_back_and_a_search_does_not_use_it_up() -> None:
    out = io.StringIO()
    voice = Voice(out, pause=0)
    voice.begin("fit")
    for stage in ("states", "detector", *("greedy", "sampled", "greedy", "gates", "gates") * 20):
        for done in range(4):
            voice.progress(Progress(stage, done, 3))
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    shares = [line["progress"] for line in told[1:]]
    assert told[0] == {"stage": "fit"} and told[1]["message"] == "states 0/3"
    assert shares == sorted(shares) and shares[0] == 0.0
    assert all(before < after for before, after in zip(shares[3::4], shares[7::4], strict=False))  # each step counts
    assert 0.9 < shares[-1] < 0.99
    voice.begin("verify")
    voice.progress(Progress("states", 0, 3))
    assert json.loads(out.getvalue().splitlines()[-1])["progress"] == 0.0
