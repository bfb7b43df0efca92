"""Images, compose file, manifests and dashboards agree with the service, as far as reading them can tell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.settings import PREFIX, Settings
from server.sources import KNOWN
from tests.support.repository import FILES, ROOT, relative

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
KUBERNETES = ROOT / "deploy/kubernetes/base"
POD: dict[str, Any] = yaml.safe_load((KUBERNETES / "deployment.yaml").read_text())["spec"]["template"]["spec"]
CONTAINER: dict[str, Any] = POD["containers"][0]
AFTER_DRAIN = 15.0  # seconds that connections and the worker get after drain_timeout, with some to spare


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix in (".yml", ".yaml")], ids=relative)
def test_yaml_parses(path: Path) -> None:
    assert [document for document in yaml.safe_load_all(path.read_text()) if document]


def test_compose_services_mount_files_and_volumes_that_exist() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        assert "image" in service
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]


def test_compose_publishes_ports_to_this_machine_alone() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_compose_bounds_what_a_service_may_take_and_do(name: str) -> None:
    service = COMPOSE["services"][name]
    assert re.fullmatch(r"[0-9]+[mg]", service["mem_limit"])
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "network_mode", "pid", "ipc", "cap_add"} & service.keys()


def test_compose_starts_only_with_secrets_that_somebody_made() -> None:
    used = {secret for service in COMPOSE["services"].values() for secret in service.get("secrets", ())}
    assert used == set(COMPOSE["secrets"]) == {"admin_key", "grafana_password"}
    for secret in COMPOSE["secrets"].values():
        assert re.fullmatch(r"\$\{[A-Z_]+:\?[^}]+\}", secret["file"]), "a variable that is required, with a message"


def test_no_deployment_holds_a_key_or_opens_the_service() -> None:
    grafana = COMPOSE["services"]["grafana"]["environment"]
    assert not [name for name in grafana if name.startswith("GF_AUTH_ANONYMOUS")]
    environments = [service.get("environment", {}) for service in COMPOSE["services"].values()]
    environments.append({entry["name"]: entry.get("value", "") for entry in CONTAINER["env"]})
    for environment in environments:
        assert "UNBIND_INSECURE" not in environment and "UNBIND_ADMIN_KEY" not in environment
        for name, value in environment.items():
            if re.search("KEY|PASSWORD|SECRET|TOKEN", name):
                assert name.endswith("_FILE") and value.startswith("/run/secrets/"), name


def test_deployments_wait_until_running_requests_have_ended() -> None:
    needed = Settings.model_fields["drain_timeout"].default + AFTER_DRAIN
    assert int(COMPOSE["services"]["unbind"]["stop_grace_period"].removesuffix("s")) > needed
    assert POD["terminationGracePeriodSeconds"] > needed


def test_deployments_set_only_settings_that_exist() -> None:
    known = {PREFIX + name.upper() for name in KNOWN} | {"UNBIND_CONFIG"}
    for path in ("Dockerfile", "docker-compose.yml", "deploy/kubernetes/base/deployment.yaml"):
        text = "\n".join(line for line in (ROOT / path).read_text().splitlines() if not line.strip().startswith("#"))
        assert set(re.findall(r"\bUNBIND_[A-Z_]+", text)) <= known, path


def test_prometheus_scrapes_the_port_that_deployments_open_for_metrics() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["unbind"]
    port = compose["environment"]["UNBIND_METRICS_PORT"]
    scrape = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == [f"unbind:{port}"]
    assert not any(published.endswith(f":{port}") for published in compose["ports"])
    template = yaml.safe_load((KUBERNETES / "deployment.yaml").read_text())["spec"]["template"]
    (container,) = template["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    annotated = template["metadata"]["annotations"]["prometheus.io/port"]
    assert annotated == environment["UNBIND_METRICS_PORT"]
    assert int(annotated) in {opened["containerPort"] for opened in container["ports"]}


def test_the_image_copies_files_that_exist_and_runs_without_privileges() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    assert re.search(r"^USER 10001", text, re.MULTILINE)
    assert "/health" in text.split("HEALTHCHECK")[1]


def test_kubernetes_manifests_are_complete_and_listed() -> None:
    folder = KUBERNETES
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(path.name for path in folder.iterdir() if path.name != "kustomization.yaml")
    for name in listed:
        for document in yaml.safe_load_all((folder / name).read_text()):
            assert document["apiVersion"]
            assert document["kind"]
            assert document["metadata"]["name"]


def test_the_namespace_demands_the_restricted_pod_security() -> None:
    labels = yaml.safe_load((KUBERNETES / "namespace.yaml").read_text())["metadata"]["labels"]
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "audit", "warn")} == {"restricted"}


def test_the_pod_meets_the_restricted_pod_security() -> None:
    assert len(POD["containers"]) == 1 and "initContainers" not in POD
    assert POD["securityContext"]["runAsNonRoot"] and POD["securityContext"]["runAsUser"] > 0
    assert POD["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert not POD["automountServiceAccountToken"] and not {"hostNetwork", "hostPID", "hostIPC"} & POD.keys()
    context = CONTAINER["securityContext"]
    assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}
    assert context["runAsNonRoot"] and context["readOnlyRootFilesystem"]
    assert all(volume.keys() & {"persistentVolumeClaim", "emptyDir", "secret"} for volume in POD["volumes"])
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}


def test_the_pod_is_bounded_and_its_probes_have_time_limits() -> None:
    assert CONTAINER["resources"]["requests"].keys() >= {"cpu", "memory"}
    assert "memory" in CONTAINER["resources"]["limits"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert 1 < CONTAINER[probe]["timeoutSeconds"] <= CONTAINER[probe]["periodSeconds"], probe


def test_the_network_is_closed_but_for_the_service_s_port() -> None:
    policies = {
        policy["metadata"]["name"]: policy["spec"]
        for policy in yaml.safe_load_all((KUBERNETES / "network.yaml").read_text())
    }
    assert policies["deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    allowed = policies["unbind"]
    assert allowed["podSelector"]["matchLabels"] == {"app": "unbind"}
    ports = {port["name"] for port in CONTAINER["ports"]}
    for rule in allowed["ingress"]:
        assert rule["from"] and rule["ports"] and {port["port"] for port in rule["ports"]} <= ports


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
