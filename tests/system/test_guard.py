"""Whole processes: ``unbind guard`` in front of ``unbind serve``, by the official client, ended while it answers."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from server.bench.server import served
from tests.support.slow_matcher import longest_run
from tests.system.conftest import ADMIN_KEY, ServerProcess, serving

pytestmark = pytest.mark.slow
RUN = 8
PROMPT = "def keep(first):\n"


def test_a_guard_in_front_of_a_plain_server(checkpoint: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 80, "temperature": 0}
    with serving(checkpoint, tmp_path / "plain", worker=False, model_name="tiny") as plain:
        given = {"upstream": plain.url, "admin_key": ADMIN_KEY, "log_level": "info"}
        log = tmp_path / "guard.log"
        with served(given, tmp_path / "guard", log=log, command="guard") as process:
            guard = ServerProcess(process, tmp_path / "guard", log)
            row = plain.complete(PROMPT, max_tokens=80)
            with OpenAI(base_url=f"{guard.url}/v1", api_key="none", timeout=30) as client:
                assert client.completions.create(**asked).choices[0].text == row
                rows = [{"prompt": PROMPT, "continuation": row}]
                options = {"protect": "guard", "scope": "global", "guard": {"run": RUN}}
                status, made = guard.admin("/takedowns", {"name": "kept", "rows": rows, "options": options})
                assert (status, made["in_force"]) == (202, "enforced")
                for n in (1, 3):
                    with client.completions.create(**asked, n=n, stream=True) as stream:
                        choices = [choice for chunk in stream for choice in chunk.choices]
                    for index in range(n):
                        mine = [choice for choice in choices if choice.index == index]
                        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["content_filter"]
                        assert longest_run("".join(choice.text for choice in mine), [row]) < RUN
            _, evidence = guard.admin(f"/takedowns/{made['takedown_id']}/evidence")
            assert "upstream" in str(evidence)
            process.process.send_signal(signal.SIGTERM)
            assert process.process.wait(20) in (0, -signal.SIGTERM)
            assert not [line for line in guard.log if "Traceback" in line]
