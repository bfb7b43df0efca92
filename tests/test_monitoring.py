"""What watches the service: scrape targets, rules and dashboards agree with what it exports and with each other."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.support.prometheus import DASHBOARDS, RULES
from tests.support.repository import ROOT

OVERLAY = ROOT / "deploy/kubernetes/overlays/monitoring"
BASE = ROOT / "deploy/kubernetes/base"


def only(path: Any) -> dict[str, Any]:
    (document,) = yaml.safe_load_all(path.read_text())
    return dict(document)


def test_the_operator_gets_the_rules_that_prometheus_gets() -> None:
    assert only(OVERLAY / "rules.yaml")["spec"] == RULES
    made = subprocess.run([sys.executable, ROOT / ".ci/prometheus_rule.py"], capture_output=True, text=True, check=True)
    assert made.stdout == (OVERLAY / "rules.yaml").read_text(), "run `make docs`"


def test_the_operator_scrapes_the_metrics_port_of_servers_and_workers() -> None:
    assert sorted(only(OVERLAY / "kustomization.yaml")["resources"]) == sorted(
        path.name for path in OVERLAY.iterdir() if path.name != "kustomization.yaml"
    )
    service, monitor = only(OVERLAY / "service.yaml"), only(OVERLAY / "servicemonitor.yaml")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,), (endpoint,) = service["spec"]["ports"], monitor["spec"]["endpoints"]
    assert endpoint["port"] == port["name"]
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]].startswith("unbind")  # which the rules go by
    for path in (BASE / "deployment.yaml", ROOT / "deploy/kubernetes/overlays/vllm/worker.yaml"):
        template = only(path)["spec"]["template"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        assert port["targetPort"] in {opened["name"] for opened in template["spec"]["containers"][0]["ports"]}


@pytest.mark.parametrize("page", DASHBOARDS)
def test_panels_stand_apart_and_have_names_of_their_own(page: str) -> None:
    panels = DASHBOARDS[page]["panels"]
    places = [panel["gridPos"] for panel in panels]
    taken = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(set(taken)) == len(taken) and all(x < 24 for x, _ in taken)
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)


def test_dashboards_and_rules_query_metrics_that_the_service_exports() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "server").rglob("*.py"))
    exported = set(re.findall(r'"(unbind_[a-z_]+)"', sources)) | {
        f"{name}_{what}" for name in ("unbind_registry", "unbind_store") for what in ("reachable", "seen_seconds")
    }
    panels = [panel for dashboard in DASHBOARDS.values() for panel in dashboard["panels"]]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    expressions += [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    for name in re.findall(r"(?:\w+:)?unbind_[a-z_]+(?::\w+)?", " ".join(expressions)):
        base = re.sub(r"_(?:total|bucket|sum|count)$", "", name)
        assert name in recorded or {name, base, base + "_total"} & exported, name
