"""The API's page runs as it stands, against the demo model; the editors' recipes parse and lead to routes that exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest
import yaml

from server.service import load_served
from server.settings import Settings
from tests.support.live import ADMIN_KEY, Live, serving
from tests.support.repository import ROOT

API = (ROOT / "docs/api.md").read_text(encoding="utf-8")
EDITORS = (ROOT / "docs/editors.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The demo world."""
    settings = Settings(
        data_dir=tmp_path_factory.mktemp("demo"), worker=False, admin_key=ADMIN_KEY, max_slots=4, max_model_len=512
    )
    with serving(settings, load_served(settings)) as running:
        yield running


def curl(server: Live, command: str) -> int:
    """Do what a curl command of the page says; the status."""
    filled = command.replace("$UNBIND_URL", "").replace("$UNBIND_ADMIN_KEY", ADMIN_KEY)
    words = shlex.split(filled)
    method = path = body = None
    headers: dict[str, str] = {}
    assert words.pop(0) == "curl"
    while words:
        match words.pop(0):
            case "-s" | "-sN":
                pass
            case "-X":
                method = words.pop(0)
            case "-H":
                name, _, value = words.pop(0).partition(": ")
                headers[name] = value
            case "-d":
                body = words.pop(0).encode()
            case word:
                assert path is None, f"two addresses in: {command}"
                path = word
    assert path is not None and (body is None or headers["Content-Type"] == "application/json")
    return server.call(path, body, headers=headers, method=method).status


def test_every_example_of_the_page_works_in_order(demo: Live) -> None:
    shown = set()
    environment = {**os.environ, "UNBIND_URL": demo.url, "UNBIND_ADMIN_KEY": ADMIN_KEY}
    for language, block in re.findall(r"^```(bash|python)\n(.*?)^```", API, re.DOTALL | re.MULTILINE):
        if language == "python":
            subprocess.run([sys.executable, "-c", block], env=environment, check=True, timeout=60, capture_output=True)
            continue
        for command in re.split(r"\n(?=curl)", block.replace("\\\n", " ").strip()):
            assert curl(demo, command) in (200, 201), command
            shown.add(re.search(r"\$UNBIND_URL(\S+)", command)[1])  # type: ignore[index]
    assert shown >= {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/fim/completions",
        "/infill",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/health",
        "/ready",
        "/version",
        "/metrics",
        "/admin/v1/keys",
        "/admin/v1/profiles/team",
        "/admin/v1/policies/global",
        "/p/team/v1/completions",
    }


def test_the_editors_recipes_parse() -> None:
    parsers = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
    found = re.findall(r"^```(\w+)\n(.*?)^```", EDITORS, re.DOTALL | re.MULTILINE)
    assert {language for language, _ in found} == {*parsers, "lua", "vim"}
    for language, block in found:
        if language in parsers:
            assert parsers[language](block)
        else:
            assert block.count("{") == block.count("}") and block.count("(") == block.count(")")
    editors = (
        "Continue",
        "Zed",
        "llama.vscode",
        "minuet",
        "codecompanion",
        "Tabby",
        "VS Code",
        "Kilo",
        "JetBrains AI Assistant",
        "Codex",
        "Claude Code",
        "OpenCode",
    )
    for editor in (*editors, "LiteLLM", "lm-evaluation-harness"):
        assert f"\n## {editor}\n" in EDITORS
    recipes = [parsers[language](block) for language, block in found if language in parsers]
    proxy = next(recipe for recipe in recipes if "model_list" in recipe)
    assert proxy["general_settings"]["master_key"]  # or it refuses to start


def test_the_editors_addresses_lead_to_routes(server: Live) -> None:
    routes = set(server.call("/openapi.json").body["paths"]) | {"/fim/completions"}
    named = set(re.findall(r"http://127\.0\.0\.1:8000(?:/p/team)?(/[a-z0-9/]+)", EDITORS))
    assert named >= {"/v1", "/v1/completions", "/infill", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
    for path in named:
        assert path.rstrip("/") in ("/p", "/p/team") or any(f"{route}/".startswith(f"{path}/") for route in routes), (
            path
        )
