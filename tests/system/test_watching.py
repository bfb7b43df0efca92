"""A real Prometheus watches a real server under a scripted load: each panel shows something, and alerts fire when they should.

The rules are those of the repository but for their ``for``, which is ``FOR`` here: nobody waits ten minutes for a test. Where there
is no Prometheus, the test is not defined.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from server.bench.fleet.parts import free_port
from tests.server.conftest import build_module
from tests.support.prometheus import DASHBOARDS, PROMETHEUS, RULES
from tests.system.conftest import ServerProcess, serving
from unbind_core.architecture import load_model

pytestmark = pytest.mark.slow
FOR, INTERVAL = "2s", "500ms"
WAIT_SECONDS = 90
RUN = 8
PROMPTS = ("def keep(first):\n", "class Index:\n", "import os\n")  # after which the random model writes enough to guard
# Panels without data, and why.
EXCUSED = dict.fromkeys(("Runs", "Since the last hit", "Seconds a canary"), "no canaries are asked for here")
ENDED = ("succeeded", "failed", "cancelled")
# They say how busy the machine is that the test runs on.
BUSY = {"UnbindSlowFirstToken", "UnbindSlowTokens"}


class Watch:
    """A running Prometheus and what it says."""

    def __init__(self, url: str) -> None:
        self.url, self.began = url, time.time()

    def ask(self, path: str, **fields: Any) -> Any:
        with urlopen(f"{self.url}/api/v1/{path}?{urlencode(fields)}", timeout=20) as answer:
            return json.load(answer)["data"]

    def seen(self, target: dict[str, Any]) -> int:
        """How many numbers a panel's query has given since the beginning."""
        query = target["expr"].replace("$__rate_interval", "5s").replace("$module", ".*")
        found = self.ask("query_range", query=query, start=self.began, end=time.time(), step=1)["result"]
        return sum(not math.isnan(float(value)) for series in found for _, value in series["values"])

    def firing(self) -> dict[str, dict[str, Any]]:
        """By name."""
        alerts = [alert for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"]
        return {alert["labels"]["alertname"]: alert for alert in alerts if alert["labels"]["alertname"] not in BUSY}

    def fires(self, *names: str) -> None:
        """Wait until these alerts fire, and no other does."""
        found: dict[str, dict[str, Any]] = {}
        for _ in waiting(f"{names}"):
            found = self.firing()
            assert found.keys() <= set(names), found
            if found.keys() == set(names):
                break
        assert not [alert for alert in found.values() if "<no value>" in str(alert["annotations"])]

    def rests(self) -> None:
        """Wait until no alert fires."""
        for _ in waiting("no alert"):
            if not self.firing():
                return


def waiting(what: str) -> Iterator[None]:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        yield
        time.sleep(0.5)
    raise AssertionError(f"waited {WAIT_SECONDS} s for {what}")


@contextmanager
def watching(metrics: int, folder: Path) -> Iterator[Watch]:
    """A Prometheus that scrapes a port of this machine."""
    folder.mkdir()
    hurried = [{**group, "rules": [hurry(rule) for rule in group["rules"]]} for group in RULES["groups"]]
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": hurried}))
    scrape = {"job_name": "unbind", "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]}
    every = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
    config = {"global": every, "rule_files": ["rules.yml"], "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
    watch = Watch(f"http://127.0.0.1:{port}")
    try:
        for _ in waiting("Prometheus"):
            assert process.poll() is None, (folder / "log").read_text()
            with suppress(OSError):
                if watch.ask("query", query="up")["result"]:
                    break
        yield watch
    finally:
        process.terminate()
        process.wait(30)


def hurry(rule: dict[str, Any]) -> dict[str, Any]:
    return {**rule, "for": FOR} if "for" in rule else rule


def load(server: ServerProcess) -> None:
    """One round of what clients do."""
    for prompt in PROMPTS:
        server.call("/v1/completions", {"prompt": prompt, "max_tokens": 60, "temperature": 0})
    for modules in ([], ["two"]):
        body = {"prompt": "def f(x):\n    return", "max_tokens": 8, "unbind": {"modules": modules}}
        assert server.call("/v1/completions", body)[0] == 200
    assert server.call("/v1/completions", {"prompt": "x", "unbind": {"modules": ["nobody"]}})[0] == 400


def take_down(server: ServerProcess, name: str, row: dict[str, str], **options: Any) -> str | None:
    body = {"name": name, "rows": [row], "options": {"scope": "global", **options}}
    status, made = server.admin("/takedowns", body)
    assert status == 202, made
    return made.get("job_id")


def no_worker(server: ServerProcess, ended: threading.Event) -> None:
    """Kill every worker that the server starts: it waits longer and longer before the next."""
    while not ended.wait(0.02):
        for pid in server.worker_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def panels_show_and_alerts_fire(checkpoint: Path, retain: Path, tmp_path: Path) -> None:
    identity = load_model(checkpoint).identity
    (tmp_path / "modules").mkdir()
    kept = tmp_path / "modules/one.safetensors"
    for number, name in enumerate(("one", "two")):
        calibrated = {"forget_open_rate": 0.9, "retain_open_rate": 0.5}
        made = build_module(identity, name, layer=number, seed=number, kappa=1e-3, measured=calibrated)
        made.save(tmp_path / "modules" / f"{name}.safetensors")
    metrics = free_port()
    given = {"metrics_port": metrics, "metrics_interval": 0.5, "enforced": "one", "retain": retain, "max_slots": 2}
    with (
        serving(checkpoint, tmp_path, retain_test=retain, **given) as server,
        watching(metrics, tmp_path / "prometheus") as watch,
    ):
        for prompt, action in zip(PROMPTS, ("steer", "stop", "report"), strict=True):
            row = {"prompt": prompt, "continuation": server.complete(prompt, max_tokens=60)}
            take_down(server, action, row, protect="guard", guard={"run": RUN, "action": action})
        job = take_down(server, "fitted", {"prompt": PROMPTS[0], "continuation": "return first\n" * 20})
        blank = [(panel["title"], target) for panel in PANELS for target in panel.get("targets", ())]
        for _ in waiting("every panel"):
            load(server)
            blank = [(title, target) for title, target in blank if not watch.seen(target)]
            if {title for title, _ in blank} <= EXCUSED.keys() and server.admin(f"/jobs/{job}")[1]["state"] in ENDED:
                break
        assert {title for title, _ in blank} == EXCUSED.keys()
        watch.rests()

        kept.rename(tmp_path / "gone")
        watch.fires("UnbindEnforcedNotLoaded")
        (tmp_path / "gone").rename(kept)
        watch.rests()

        ended = threading.Event()
        killer = threading.Thread(target=no_worker, args=(server, ended))
        killer.start()
        try:
            take_down(server, "waits", {"prompt": PROMPTS[0], "continuation": "return second\n" * 20})
            watch.fires("UnbindWorkerDown")
        finally:
            ended.set()
            killer.join()


PANELS = [panel for dashboard in DASHBOARDS.values() for panel in dashboard["panels"]]

if PROMETHEUS:
    test_panels_show_and_alerts_fire = panels_show_and_alerts_fire
