"""The commands that a server prints at its start: the takedowns among them show both an available and an enforced module."""

from __future__ import annotations

import json
import shlex
import subprocess
from types import SimpleNamespace

from server.cli.starting.tour import tour
from server.settings import Settings


def test_the_tour_posts_one_takedown_that_is_available_and_one_that_is_enforced() -> None:
    service = SimpleNamespace(engine=SimpleNamespace(modules=SimpleNamespace(current={"demo-a": None})))
    shown = tour(Settings(), "http://127.0.0.1:1", service)  # type: ignore[arg-type]
    posts = [command for _, command in shown if "/admin/v1/takedowns" in command]
    bodies = []
    for command in posts:
        making = command[command.index("python3 -c") : command.index("|\n")]  # what is piped into curl
        bodies.append(json.loads(subprocess.run(["bash", "-c", making], check=True, capture_output=True).stdout))
    assert [body["options"] for body in bodies] == [{}, {"scope": "global", "replace": True}]
    assert [(body["name"], len(body["rows"])) for body in bodies] == [("set-b", 12)] * 2
    keys = [shlex.split(command)[-3] for command in posts]
    assert len(set(keys)) == 2  # two posts, not one repeated
    last = [command for _, command in shown][-1]
    assert "unbind" not in last  # nobody names the module, and it binds
