"""Images, compose file, manifests and dashboards agree with the service, as far as reading them can tell."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from server.settings import PREFIX, Settings
from tests.repository import FILES, ROOT, relative


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix in (".yml", ".yaml")], ids=relative)
def test_yaml_parses(path: Path) -> None:
    assert [document for document in yaml.safe_load_all(path.read_text()) if document]


def test_compose_services_mount_files_and_volumes_that_exist() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = compose["services"]
    for service in services.values():
        assert "image" in service
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"]


def test_deployments_set_only_settings_that_exist() -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {"UNBIND_CONFIG"}
    for path in ("Dockerfile", "docker-compose.yml", "deploy/kubernetes/deployment.yaml"):
        text = "\n".join(line for line in (ROOT / path).read_text().splitlines() if not line.strip().startswith("#"))
        assert set(re.findall(r"\bUNBIND_[A-Z_]+", text)) <= known, path


def test_the_image_copies_files_that_exist_and_runs_without_privileges() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    assert re.search(r"^USER 10001", text, re.MULTILINE)
    assert "/health" in text.split("HEALTHCHECK")[1]


def test_kubernetes_manifests_are_complete_and_listed() -> None:
    folder = ROOT / "deploy/kubernetes"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(path.name for path in folder.iterdir() if path.name != "kustomization.yaml")
    for name in listed:
        for document in yaml.safe_load_all((folder / name).read_text()):
            assert document["apiVersion"]
            assert document["kind"]
            assert document["metadata"]["name"]


def test_dashboards_query_metrics_that_the_service_exports() -> None:
    exported = set(re.findall(r'"(unbind_[a-z_]+)"', (ROOT / "server/telemetry.py").read_text()))
    dashboards = list((ROOT / "deploy/grafana/dashboards").glob("*.json"))
    assert dashboards
    for path in dashboards:
        dashboard = json.loads(path.read_text())
        expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
        assert expressions
        for name in re.findall(r"unbind_[a-z_]+", " ".join(expressions)):
            base = re.sub(r"_(?:total|bucket|sum|count)$", "", name)
            assert {name, base, base + "_total"} & exported, name


def test_the_check_script_runs_the_tests_and_then_the_slow_ones() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    text = script.read_text()
    assert text.index("set -euo pipefail") < text.index("make test") < text.index("-m slow")
