"""Images, compose file, manifests and dashboards agree with the service, as far as reading them can tell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import make_url
from typer.main import get_command

from server.cli import build
from server.settings import FROM_FILES, PREFIX, Settings
from server.sources import KNOWN
from tests.support.repository import FILES, ROOT, relative

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
KUBERNETES = ROOT / "deploy/kubernetes/base"
POD: dict[str, Any] = yaml.safe_load((KUBERNETES / "deployment.yaml").read_text())["spec"]["template"]["spec"]
CONTAINER: dict[str, Any] = POD["containers"][0]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSER = shutil.which("docker-compose")  # which reads the file where no engine is behind it
AFTER_DRAIN = 15.0  # seconds that connections and the worker get after drain_timeout, with some to spare


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix in (".yml", ".yaml")], ids=relative)
def test_yaml_parses(path: Path) -> None:
    assert [document for document in yaml.safe_load_all(path.read_text()) if document]


def test_compose_services_mount_files_and_volumes_that_exist() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        assert "image" in service
        assert set(service.get("depends_on", ())) <= set(services)
        assert set(service.get("networks", ())) <= set(COMPOSE["networks"])
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]


def test_grafana_keeps_its_database_and_finds_its_dashboards() -> None:
    grafana = COMPOSE["services"]["grafana"]
    mounts = {target: source for source, target, *_ in (volume.split(":") for volume in grafana["volumes"])}
    assert mounts["/var/lib/grafana"] == "grafana-data"  # the image's GF_PATHS_DATA
    (provider,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/unbind.yml").read_text())["providers"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (ROOT / mounts[str(home.parent)] / home.name).is_file()


def test_compose_publishes_ports_to_this_machine_alone_and_the_database_to_nobody() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert published and all(port.startswith("127.0.0.1:") for port in published)
    inner = {name for name, network in COMPOSE["networks"].items() if network.get("internal")}
    reached = {name: set(service["networks"]) for name, service in COMPOSE["services"].items()}
    assert reached["postgres"] == {"database"} and "database" in inner and reached["worker"] <= inner
    assert {name for name, networks in reached.items() if "database" in networks} == {
        "postgres", "migrate", "server", "worker",
    }  # fmt: skip


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_compose_bounds_what_a_service_may_take_and_do(name: str) -> None:
    service = COMPOSE["services"][name]
    assert re.fullmatch(r"[0-9]+[mg]", service["mem_limit"]) and service["pids_limit"]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "network_mode", "pid", "ipc", "cap_add"} & service.keys()
    if service["image"].startswith("unbind"):
        assert service["read_only"] and service["tmpfs"] == ["/tmp"]


def test_compose_runs_commands_and_builds_a_stage_that_exist() -> None:
    stage = COMPOSE["services"]["server"]["build"]["target"]
    assert re.search(rf"^FROM runtime AS {stage}$", DOCKERFILE, re.MULTILINE)
    for name in ("server", "worker", "migrate"):
        command: Any = get_command(build())
        for word in COMPOSE["services"][name]["command"]:
            if word.startswith("--"):
                assert {word} & {option for given in command.params for option in (*given.opts, *given.secondary_opts)}
            else:
                command = command.commands[word]


def test_compose_starts_only_with_secrets_that_the_script_makes() -> None:
    used = {secret for service in COMPOSE["services"].values() for secret in service.get("secrets", ())}
    made = set(re.findall(r"^write (\w+)", (ROOT / "deploy/secrets.sh").read_text(), re.MULTILINE))
    assert used == set(COMPOSE["secrets"]) == made
    for name, secret in COMPOSE["secrets"].items():
        assert re.fullmatch(rf"\$\{{SECRETS_FOLDER:\?run deploy/secrets\.sh[^}}]+\}}/{name}", secret["file"])
    for service in COMPOSE["services"].values():
        for value in service.get("environment", {}).values():
            if value.startswith("/run/secrets/"):
                assert value.removeprefix("/run/secrets/") in service["secrets"]


def test_the_script_makes_secrets_once_that_others_cannot_reach(tmp_path: Path) -> None:
    script = tmp_path / "deploy/secrets.sh"
    script.parent.mkdir()
    shutil.copy(ROOT / "deploy/secrets.sh", script)
    found = []
    for _ in range(2):
        subprocess.run([script], check=True, cwd="/")
        found.append({path.name: path.read_text().strip() for path in (tmp_path / "secrets").iterdir()})
    assert found[0] == found[1] and found[0].keys() == COMPOSE["secrets"].keys()
    assert (tmp_path / ".env").read_text() == "SECRETS_FOLDER=./secrets\n"
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    address = make_url(found[0]["database_url"])
    postgres = COMPOSE["services"]["postgres"]["environment"]
    assert (address.host, address.username, address.database) == (
        "postgres",
        postgres["POSTGRES_USER"],
        postgres["POSTGRES_DB"],
    )
    assert address.password == found[0]["postgres_password"] and address.drivername == "postgresql+psycopg"
    assert len(set(found[0].values())) == len(found[0]) and all(len(text) >= 32 for text in found[0].values())


def test_the_script_makes_no_secrets_of_nothing_and_leaves_the_lines_of_others_whole(tmp_path: Path) -> None:
    script = tmp_path / "deploy/secrets.sh"
    script.parent.mkdir()
    shutil.copy(ROOT / "deploy/secrets.sh", script)
    (tmp_path / ".env").write_text("OTHER=1")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("dirname", "mkdir", "chmod", "mv", "cat", "touch", "tail", "grep"):
        (programs / name).symlink_to(str(shutil.which(name)))
    failed = subprocess.run([script], env={"PATH": str(programs)}, capture_output=True, text=True)
    assert failed.returncode and "openssl" in failed.stderr and not list((tmp_path / "secrets").iterdir())
    subprocess.run([script], check=True)
    assert (tmp_path / ".env").read_text() == "OTHER=1\nSECRETS_FOLDER=./secrets\n"


def test_the_script_makes_no_second_secrets_that_compose_would_not_read(tmp_path: Path) -> None:
    script = tmp_path / "deploy/secrets.sh"
    script.parent.mkdir()
    shutil.copy(ROOT / "deploy/secrets.sh", script)
    own, other = tmp_path / "own", tmp_path / "other"
    subprocess.run([script, own], check=True)
    subprocess.run([script], check=True)  # of the folder that .env names
    assert (tmp_path / ".env").read_text() == f"SECRETS_FOLDER={own}\n" and not (tmp_path / "secrets").exists()
    refused = subprocess.run([script, other], capture_output=True, text=True)
    assert refused.returncode == 1 and f".env has SECRETS_FOLDER={own}; move that folder to {other}" in refused.stderr
    assert not other.exists()


def compose_itself_reads_the_file_and_refuses_it_without_secrets(tmp_path: Path) -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    # Compose 1 knows no name.
    (tmp_path / "docker-compose.yml").write_text(re.sub(r"^name: .*\n", "", text, flags=re.MULTILINE))
    environment = {"PATH": os.environ["PATH"]}
    refused = subprocess.run([str(COMPOSER), "config"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert refused.returncode and "run deploy/secrets.sh" in refused.stderr
    environment["SECRETS_FOLDER"] = "./secrets"
    read = subprocess.run([str(COMPOSER), "config"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert read.returncode == 0, read.stderr
    assert yaml.safe_load(read.stdout)["services"].keys() == COMPOSE["services"].keys()


if COMPOSER:  # else reading the file is what there is
    test_compose_itself_reads_the_file_and_refuses_it_without_secrets = (
        compose_itself_reads_the_file_and_refuses_it_without_secrets
    )


def test_no_deployment_holds_a_key_or_opens_the_service() -> None:
    grafana = COMPOSE["services"]["grafana"]["environment"]
    assert not [name for name in grafana if name.startswith("GF_AUTH_ANONYMOUS")]
    environments = [service.get("environment", {}) for service in COMPOSE["services"].values()]
    environments.append({entry["name"]: entry.get("value", "") for entry in CONTAINER["env"]})
    for environment in environments:
        assert not {"UNBIND_INSECURE", *(PREFIX + name.upper() for name in FROM_FILES)} & environment.keys()
        for name, value in environment.items():
            if re.search("KEY|PASSWORD|SECRET|TOKEN", name):
                assert name.endswith("_FILE") and value.startswith("/run/secrets/"), name


def test_deployments_wait_until_running_requests_have_ended() -> None:
    needed = Settings.model_fields["drain_timeout"].default + AFTER_DRAIN
    assert int(COMPOSE["services"]["server"]["stop_grace_period"].removesuffix("s")) > needed
    assert POD["terminationGracePeriodSeconds"] > needed


def test_deployments_set_only_settings_that_exist() -> None:
    known = {PREFIX + name.upper() for name in KNOWN} | {"UNBIND_CONFIG"}
    for path in ("Dockerfile", "docker-compose.yml", "deploy/kubernetes/base/deployment.yaml"):
        text = "\n".join(line for line in (ROOT / path).read_text().splitlines() if not line.strip().startswith("#"))
        assert set(re.findall(r"\bUNBIND_[A-Z_]+", text)) <= known, path


def test_prometheus_scrapes_the_ports_that_deployments_open_for_metrics() -> None:
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    targets = {target for scrape in scraped for static in scrape["static_configs"] for target in static["targets"]}
    assert all(re.fullmatch("unbind.*", scrape["job_name"]) for scrape in scraped)  # which the rules go by
    opened = set()
    for name, service in COMPOSE["services"].items():
        setting = {"server": "UNBIND_METRICS_PORT", "worker": "UNBIND_WORKER_METRICS_PORT"}.get(name)
        if port := setting and service["environment"][setting]:
            opened.add(f"{name}:{port}")
            assert not any(published.endswith(f":{port}") for published in service.get("ports", ()))
            assert set(service["networks"]) & set(COMPOSE["services"]["prometheus"]["networks"])
    assert targets == opened == {"server:9464", "worker:9464"}
    for of, file in ("", "deployment.yaml"), ("WORKER_", "../overlays/vllm/worker.yaml"):
        template = next(yaml.safe_load_all((KUBERNETES / file).read_text()))["spec"]["template"]
        (container,) = template["spec"]["containers"]
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        annotated = template["metadata"]["annotations"]["prometheus.io/port"]
        assert annotated == environment[f"UNBIND_{of}METRICS_PORT"]
        assert int(annotated) in {opened["containerPort"] for opened in container["ports"]}


def test_the_images_copy_what_exists_from_stages_that_exist() -> None:
    stages: list[str] = []
    for line in DOCKERFILE.splitlines():
        if found := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            assert found[1] in stages or not stages
            stages.append(found[2])
        elif found := re.fullmatch(r"COPY --from=(\S+) \S+ \S+", line):
            assert found[1] in stages
        elif found := re.fullmatch(r"COPY (.+) \S+", line):
            assert all((ROOT / source).exists() for source in found[1].split())
    assert stages[-2:] == ["cuda", "cpu"], "what is built where no target is given comes last"


def test_the_images_run_without_privileges_and_tell_their_health() -> None:
    runtime = DOCKERFILE.split("AS runtime")[1]
    assert re.search(r"^USER 10001", runtime, re.MULTILINE) and len(re.findall(r"^USER ", runtime, re.MULTILINE)) == 1
    assert "RUN " not in runtime.split("USER 10001")[1], "nothing changes the code as the user who runs it"
    assert "/health" in runtime.split("HEALTHCHECK")[1]


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


def test_a_pod_is_ended_for_nothing_that_a_restart_cannot_mend() -> None:
    ended_by = {CONTAINER[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")}
    assert "/ready" not in ended_by  # a missing module, a missed canary
    assert CONTAINER["startupProbe"]["httpGet"]["path"] != "/health"  # which is 200 while the model loads
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_the_network_is_closed_but_for_the_service_s_port() -> None:
    policies = {
        policy["metadata"]["name"]: policy["spec"]
        for policy in yaml.safe_load_all((KUBERNETES / "network.yaml").read_text())
    }
    assert policies["metrics"]["ingress"][0]["from"] == [
        {"namespaceSelector": {"matchLabels": {"unbind-scraper": "true"}}}
    ]
    assert policies["deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    allowed = policies["unbind"]
    assert allowed["podSelector"]["matchLabels"] == {"app": "unbind"}
    ports = {port["name"] for port in CONTAINER["ports"]}
    for rule in allowed["ingress"]:
        assert rule["from"] and rule["ports"] and {port["port"] for port in rule["ports"]} <= ports


def test_the_check_script_runs_the_tests_and_then_the_slow_ones() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    text = script.read_text()
    assert text.index("set -euo pipefail") < text.index("make test") < text.index("-m slow")
