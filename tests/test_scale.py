"""The overlay for several servers on GPUs, built as Kubernetes would get it; and the proxy's configuration beside the settings."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.settings import FROM_FILES, PREFIX, Settings
from tests.support.repository import ROOT

OVERLAY = ROOT / "deploy/kubernetes/overlays/vllm"
TOOL = (
    ["kubectl", "kustomize"] if shutil.which("kubectl") else ["kustomize", "build"] if shutil.which("kustomize") else []
)
NGINX = (ROOT / "deploy/nginx/unbind.conf").read_text()
DEFAULTS = {name: field.default for name, field in Settings.model_fields.items()}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def test_the_overlay_lists_every_file_and_each_is_a_manifest() -> None:
    listed = yaml.safe_load((OVERLAY / "kustomization.yaml").read_text())
    own = [name for name in listed["resources"] if not name.startswith("..")]
    patches = [patch["path"] for patch in listed["patches"] if "path" in patch]
    assert sorted([*own, *patches]) == sorted(p.name for p in OVERLAY.iterdir() if p.name != "kustomization.yaml")
    assert all((OVERLAY / name).exists() for name in listed["resources"])
    for name in (*own, *patches):
        for document in documents(OVERLAY / name):
            assert document["apiVersion"] and document["kind"] and document["metadata"]["name"]


def test_the_overlay_sets_only_settings_that_exist_and_holds_no_secret() -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    for path in OVERLAY.iterdir():
        text = "\n".join(line for line in path.read_text().splitlines() if not line.strip().startswith("#"))
        assert set(re.findall(r"\bUNBIND_[A-Z_]+", text)) <= known, path
    for name in ("server.yaml", "worker.yaml"):
        for container in documents(OVERLAY / name)[0]["spec"]["template"]["spec"]["containers"]:
            given = {entry["name"]: entry for entry in container["env"]}
            secret = {PREFIX + setting.upper() for setting in FROM_FILES} & given.keys()
            assert secret and all("secretKeyRef" in given[entry]["valueFrom"] for entry in secret)
            flags = [part.removeprefix("--") for part in container["args"] if part.startswith("--")]
            options = {flag.removeprefix("no-").replace("-", "_") for flag in flags}
            assert options <= Settings.model_fields.keys()


def test_server_and_worker_of_the_overlay_compute_with_the_same_model_in_the_same_precision() -> None:
    """Else the service would wait for ever for an enforced module that none of its servers can load; and by the same retain rows,
    else a plan that a server tells would count others than are fitted on.
    """

    def given(name: str) -> tuple[object, ...]:
        (container,) = documents(OVERLAY / name)[0]["spec"]["template"]["spec"]["containers"]
        flags, own = container["args"], {entry["name"]: entry.get("value") for entry in container["env"]}
        dtype = flags[flags.index("--dtype") + 1] if "--dtype" in flags else DEFAULTS["dtype"]
        return dtype, container["image"], own["UNBIND_MODEL"], own.get("UNBIND_ADAPTER"), own["UNBIND_RETAIN"]

    assert given("server.yaml") == given("worker.yaml")


def test_keda_is_told_to_scale_as_the_autoscaler_does() -> None:
    """Kubernetes divides what KEDA's trigger says by the servers there, as its metric type is AverageValue by default."""
    text = re.sub(r"\n# ", " ", (OVERLAY / "scaling.yaml").read_text())
    (pods,) = (metric["pods"] for metric in documents(OVERLAY / "scaling.yaml")[0]["spec"]["metrics"])
    (told,) = re.findall(r"the query (\S+), threshold (\d+)", text)
    assert told == (f"sum({pods['metric']['name']})", pods["target"]["averageValue"])


@pytest.mark.parametrize("name", ["server.yaml", "worker.yaml"])
def test_a_rollout_asks_for_no_gpu_beside_those_that_are_held(name: str) -> None:
    """Unless told so, Kubernetes starts the new pod beside the old one, which it ends once that is there."""
    strategy = documents(OVERLAY / name)[0]["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}


def test_no_pod_may_fill_less_than_its_folders_hold() -> None:
    """Kubernetes ends a pod whose folders on the node's disk hold more than its containers may, however large each may be."""
    base = documents(ROOT / "deploy/kubernetes/base/deployment.yaml")
    for layers in (base, base + documents(OVERLAY / "server.yaml"), documents(OVERLAY / "worker.yaml")):
        volumes, limits = dict[str, Any](), dict[str, str]()
        for layer in layers:
            found = layer["spec"]["template"]["spec"]
            volumes |= {volume["name"]: volume.get("emptyDir", {}) for volume in found["volumes"]}
            limits |= found["containers"][0]["resources"]["limits"]
        sizes = [quantity(one["sizeLimit"]) for one in volumes.values() if one and one.get("medium") != "Memory"]
        assert sizes and sum(sizes) < quantity(limits.get("ephemeral-storage", "1000Gi"))


def quantity(text: str) -> int:
    units = {"Mi": 2**20, "Gi": 2**30}
    return int(text[:-2]) * units[text[-2:]]


@cache
def built() -> dict[tuple[str, str], dict[str, Any]]:
    """What Kubernetes gets, by kind and name."""
    made = subprocess.run([*TOOL, str(OVERLAY)], check=True, capture_output=True, text=True).stdout
    return {(document["kind"], document["metadata"]["name"]): document for document in yaml.safe_load_all(made)}


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = built()["Deployment", name]["spec"]["template"]["spec"]
    return found


def restricted(name: str) -> None:
    found = pod(name)
    (container,) = found["containers"]
    assert found["securityContext"]["runAsNonRoot"] and not found["automountServiceAccountToken"]
    assert found["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}
    assert context["readOnlyRootFilesystem"] and "memory" in container["resources"]["limits"]
    kinds = [volume.keys() - {"name"} for volume in found["volumes"]]
    assert all(len(kind) == 1 and kind <= {"persistentVolumeClaim", "emptyDir", "secret"} for kind in kinds)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in found["volumes"]}


def one_parameter_sizes_a_server() -> None:
    size = int(built()["ConfigMap", "unbind-size"]["data"]["tensor-parallel"])
    (container,) = pod("unbind")["containers"]
    assert {str(container["resources"][kind]["nvidia.com/gpu"]) for kind in ("limits", "requests")} == {str(size)}
    assert "tensor-parallel-size=$(TENSOR_PARALLEL)" in container["args"]
    assert "replicas" not in built()["Deployment", "unbind"]["spec"]  # the autoscaler's
    assert ("PersistentVolumeClaim", "unbind-data") not in built()  # no server keeps what another needs


def what_is_scaled_kept_and_reached_is_there() -> None:
    scaler, budget = built()["HorizontalPodAutoscaler", "unbind"], built()["PodDisruptionBudget", "unbind"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == "unbind" and scaler["spec"]["minReplicas"] >= 2
    metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert f'"{metric}"' in "".join(path.read_text() for path in (ROOT / "server/telemetry").glob("*.py"))
    labels = built()["Deployment", "unbind"]["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    reaching = built()["NetworkPolicy", "unbind-reaches"]["spec"]
    assert set(reaching["podSelector"]["matchExpressions"][0]["values"]) == {"unbind", "unbind-worker"}
    assert {port["port"] for rule in reaching["egress"] for port in rule["ports"]} == {53, 5432, 443}
    claims = {name for kind, name in built() if kind == "PersistentVolumeClaim"}
    for name in ("unbind", "unbind-worker"):
        used = {v["persistentVolumeClaim"]["claimName"] for v in pod(name)["volumes"] if "persistentVolumeClaim" in v}
        assert used <= claims


def a_server_drains_within_its_grace() -> None:
    pause = float(pod("unbind")["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod("unbind")["terminationGracePeriodSeconds"] >= pause + DEFAULTS["drain_timeout"] + 15


if TOOL:  # else the file tests above are what there is: no tool here builds overlays
    test_the_pods_meet_the_restricted_pod_security = pytest.mark.parametrize("name", ["unbind", "unbind-worker"])(
        restricted
    )
    test_one_parameter_sizes_a_server = one_parameter_sizes_a_server
    test_what_is_scaled_kept_and_reached_is_there = what_is_scaled_kept_and_reached_is_there
    test_a_server_drains_within_its_grace = a_server_drains_within_its_grace


def seconds(directive: str) -> float:
    return float(re.findall(rf"{directive} ([0-9.]+)s;", NGINX)[0])


def test_the_proxy_s_limits_agree_with_the_settings() -> None:
    assert seconds("keepalive_timeout") < DEFAULTS["keep_alive_timeout"]
    assert seconds("proxy_read_timeout") > DEFAULTS["request_timeout"]
    size = int(re.findall(r"client_max_body_size ([0-9]+)m;", NGINX)[0]) * 1024 * 1024
    assert size == DEFAULTS["max_body_bytes"] and "proxy_buffering off;" in NGINX
    inference, admin = re.findall(r"proxy_next_upstream (.*);", NGINX)
    assert "http_503" in inference and "non_idempotent" in inference and "non_idempotent" not in admin
