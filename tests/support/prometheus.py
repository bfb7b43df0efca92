"""Prometheus' programs, where they are installed, its rules as the repository has them, and the alerts by name."""

from __future__ import annotations

import json
import shutil
from typing import Any

import yaml

from tests.support.repository import ROOT

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
NOTE = f"alert tests: {PROMTOOL or 'rules are read alone, there is no promtool (Debian: apt-get install prometheus)'}"

FOLDER = ROOT / "deploy/prometheus"
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "rules.yml").read_text())
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule
}
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.name: json.loads(path.read_text()) for path in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
}
