"""What ``unbind serve`` offers to try: curl commands with prompts of the demo world filled in, ready to copy."""

from __future__ import annotations

import json
import shlex
from typing import Any

from server.console.rows import ROWS, demo_rows
from server.service import Service
from server.settings import Settings

SHOW_TEXT = """python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["text"])'"""
MAKE_TAKEDOWN = (
    "import json, sys; rows = [json.loads(line) for line in sys.stdin]; "
    'print(json.dumps({"name": "set-b", "rows": rows, "options": %s}))'
)
SHOW_JOB = (
    'import json, sys; job = json.load(sys.stdin)["data"][0]; '
    'print(job["state"], job["stage"], job["progress"], (job["result"] or {}).get("in_force") or job["outcome"] or job["message"])'
)
MODULE_A, MODULE_B = "demo-a", "set-b"
# Rows that the adapted model gives back to the last character; a few others of the sets it only half remembers.
RECITED = ("set A 1:", "set B 4:")
RECITED_SETS = ("set A", "set B")
JSON = "-H 'Content-Type: application/json'"


def tour(settings: Settings, url: str, service: Service) -> list[tuple[str, str]]:
    """(title, command) pairs; for a model of one's own a single completion."""
    if not settings.is_demo:
        return [("A completion", _complete(url, "def main(", max_tokens=32))]
    prompts: dict[str, str] = {}
    for row in demo_rows():
        if row["label"].startswith(RECITED) or row["set"] not in RECITED_SETS:
            prompts.setdefault(row["set"], row["prompt"])
    shipped = MODULE_A in service.engine.modules.current
    found = []
    if "set A" in prompts:
        found.append(("The model recites protected code (set A)", _complete(url, prompts["set A"])))
    if "set A" in prompts and shipped:
        found.append((f"The same under the module {MODULE_A}", _complete(url, prompts["set A"], MODULE_A)))
    if "unrelated" in prompts and shipped:
        plain, filtered = _complete(url, prompts["unrelated"]), _complete(url, prompts["unrelated"], MODULE_A)
        found.append(
            ("An unrelated completion is the same (bash)", f"diff <({plain}) \\\n     <({filtered}) && echo same")
        )
    if "set B" in prompts:
        key = '-H "Authorization: Bearer $UNBIND_ADMIN_KEY"'
        found.append(("Ask for set B to be forgotten", f"{_read_key(settings)}\n{_takedown(url, key)}"))
        found.append(("How far is it?", f"curl -s '{url}/admin/v1/jobs?limit=1' {key} | python3 -c '{SHOW_JOB}'"))
        found.append(
            ("When it has succeeded it is available: set B without its module", _complete(url, prompts["set B"]))
        )
        found.append(("... and with it", _complete(url, prompts["set B"], MODULE_B)))
        found.append(("The next version is to be enforced: with a scope", _takedown(url, key, enforced=True)))
        found.append(("When that has succeeded it binds who names nothing too", _complete(url, prompts["set B"])))
    return found


def _complete(url: str, prompt: str, module: str | None = None, max_tokens: int = 128) -> str:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if module is not None:
        body["unbind"] = {"modules": [module]}
    return f"curl -s {url}/v1/completions {JSON} -d {shlex.quote(json.dumps(body))} | {SHOW_TEXT}"


def _read_key(settings: Settings) -> str:
    if settings.admin_key:
        return "export UNBIND_ADMIN_KEY=...  # the admin key that was set"
    return f"export UNBIND_ADMIN_KEY=$(cat {shlex.quote(str((settings.data_dir / 'admin.key').resolve()))})"


def _takedown(url: str, key: str, *, enforced: bool = False) -> str:
    rows = shlex.quote(str(ROWS / "forget_b.jsonl"))
    options, once = ('{"scope": "global", "replace": True}', f"{MODULE_B}-enforced") if enforced else ("{}", MODULE_B)
    return (
        f"python3 -c '{MAKE_TAKEDOWN % options}' < {rows} |\n"
        f"  curl -s {url}/admin/v1/takedowns {key} {JSON} -H 'Idempotency-Key: {once}' -d @-"
    )
