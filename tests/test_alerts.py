"""Prometheus' own tools over the rules: each alert fires in its scenario and no other does, and in quiet ones none.

Two servers, one module, two hours in steps of a minute; a scenario changes some series of the quiet world. Where promtool is not
installed, what stands at the end of this file is not defined.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prometheus import ALERTS, FOLDER, PROMTOOL
from tests.support.repository import ROOT

MINUTES = 120
S1, S2 = 'instance="one"', 'instance="two"'
GATE = 'module="m",phase="decode"'
MISS = f'unbind_canary_runs_total{{{S1},module="m",probe="extraction",result="miss"}}'
# Whatever fires says these of itself.
INSTANCE, MODULE = {"instance": "one"}, {"module": "m"}


def constant(value: float) -> str:
    """The same value, all the time."""
    return f"{value}x{MINUTES}"


def rising(step: float) -> str:
    """A counter that rises by so much a minute."""
    return f"0+{step}x{MINUTES}"


def then(step: float, minutes: int, later: float) -> str:
    """A counter that rises by ``step``, and by ``later`` in the last ``minutes``."""
    before = MINUTES - minutes
    return f"0+{step}x{before} {step * before + later}+{later}x{minutes - 1}"


def turned(value: float, minutes: int, later: float) -> str:
    """A gauge that has another value in the last ``minutes``."""
    return f"{value}x{MINUTES - minutes} {later}x{minutes - 1}"


def quiet() -> dict[str, str]:
    """The series of two servers on which nothing is wrong: 10 positions a second each, one in 1,000 open as calibrated."""
    series: dict[str, str] = {}
    for at in (S1, S2):
        module = f'{at},module="m"'
        series |= {
            f'up{{{at},job="unbind"}}': constant(1),
            f"unbind_gate_evaluations_total{{{at},{GATE}}}": rising(600),
            f"unbind_gate_activations_total{{{at},{GATE}}}": rising(0.6),
            f"unbind_module_requests_total{{{module}}}": rising(6),
            f"unbind_module_open_requests_total{{{module}}}": rising(0.1),
            f'unbind_module_calibrated_rate{{{module},side="retain"}}': constant(0.001),
            f'unbind_module_calibrated_rate{{{module},side="forget"}}': constant(0.6),
            f"unbind_module_threshold{{{module}}}": constant(3.5),
            f'unbind_module_info{{{module},digest="d1",layer="2",policy="rewrite"}}': constant(1),
            f"unbind_module_enforced{{{module}}}": constant(1),
            f"unbind_module_enforced_loaded{{{module}}}": constant(1),
            f'unbind_requests_total{{{at},route="/v1/completions",status="200"}}': rising(60),
            f'unbind_requests_total{{{at},route="/v1/completions",status="503"}}': rising(0),
            f"unbind_generated_tokens_total{{{at}}}": rising(600),
            f'unbind_canary_runs_total{{{at},module="m",probe="extraction",result="hit"}}': rising(0.2),
            f'unbind_canary_last_hit_timestamp_seconds{{{at},module="m",probe="extraction"}}': rising(60),
            f"unbind_worker_up{{{at}}}": constant(1),
            f'unbind_jobs{{{at},state="queued"}}': constant(0),
            f'unbind_jobs{{{at},state="running"}}': constant(0),
            f"unbind_job_lease_age_seconds{{{at}}}": constant(0.5),
            f"unbind_job_queue_oldest_seconds{{{at}}}": constant(0),
            f"unbind_registry_reachable{{{at}}}": constant(1),
            f"unbind_registry_seen_seconds{{{at}}}": constant(0.8),
            f"unbind_store_reachable{{{at}}}": constant(1),
            f"unbind_store_seen_seconds{{{at}}}": constant(9),
            f"unbind_audit_problems{{{at}}}": constant(0),
        }
        for name in ("unbind_first_token_seconds", "unbind_inter_token_seconds"):
            for bound in ("0.05", "0.5", "10", "+Inf"):
                series[f'{name}_bucket{{{at},le="{bound}"}}'] = rising(60)
    return series


def late(name: str) -> dict[str, str]:
    """One in ten observations is over half a second, of late."""
    return {f'{name}_bucket{{{at},le="{bound}"}}': then(60, 30, 54) for at in (S1, S2) for bound in ("0.05", "0.5")}


def of_both(series: str, values: str) -> dict[str, str]:
    """The same at both servers."""
    return {series % at: values for at in (S1, S2)}


# What is changed of the quiet world, and the labels that the alert has then.
Scenario = tuple[dict[str, str], dict[str, str]]
SCENARIOS: dict[str, Scenario] = {
    "UnbindGateOpensTooOften": (
        of_both(f"unbind_gate_activations_total{{%s,{GATE}}}", then(0.6, 60, 30)),
        MODULE,
    ),
    "UnbindGateOpensTooRarely": (of_both(f"unbind_gate_activations_total{{%s,{GATE}}}", rising(0.06)), MODULE),
    "UnbindEnforcedNotEvaluated": (
        {f"unbind_gate_evaluations_total{{{S1},{GATE}}}": then(600, 40, 0)}
        | {f"unbind_gate_activations_total{{{S1},{GATE}}}": then(0.6, 40, 0)},
        INSTANCE | MODULE,
    ),
    "UnbindEnforcedNotLoaded": (
        {f'unbind_module_enforced_loaded{{{S1},module="m"}}': turned(1, 10, 0)},
        INSTANCE | MODULE,
    ),
    "UnbindDigestSkew": (
        {f'unbind_module_info{{{S2},module="m",digest="d1",layer="2",policy="rewrite"}}': f"1x{MINUTES - 10}"}
        | {f'unbind_module_info{{{S2},module="m",digest="d2",layer="2",policy="rewrite"}}': f"_x{MINUTES - 10} 1x9"},
        MODULE,
    ),
    "UnbindCanaryMiss": (
        {MISS: f"_x{MINUTES - 20} 1x19"},
        INSTANCE | MODULE | {"probe": "extraction"},
    ),
    "UnbindCanaryStale": (
        {f'unbind_canary_last_hit_timestamp_seconds{{{S1},module="m",probe="extraction"}}': then(60, 90, 0)},
        INSTANCE | MODULE | {"probe": "extraction"},
    ),
    "UnbindCanaryAbsent": (
        {f'unbind_module_enforced_loaded{{{S1},module="m2"}}': constant(1)},
        INSTANCE | {"module": "m2"},
    ),
    "UnbindJobStuck": (of_both("unbind_job_lease_age_seconds{%s}", f"0.5x{MINUTES - 10} 0+60x9"), {}),
    "UnbindJobsWait": (of_both("unbind_job_queue_oldest_seconds{%s}", f"0x{MINUTES - 90} 0+60x89"), {}),
    "UnbindWorkerDown": (
        of_both("unbind_worker_up{%s}", turned(1, 10, 0)) | of_both('unbind_jobs{%s,state="queued"}', constant(2)),
        {},
    ),
    "UnbindTargetDown": ({f'up{{{S1},job="unbind"}}': turned(1, 10, 0)}, INSTANCE | {"job": "unbind"}),
    "UnbindRegistryAway": ({f"unbind_registry_seen_seconds{{{S1}}}": turned(0.8, 5, 200)}, INSTANCE),
    "UnbindStoreAway": ({f"unbind_store_reachable{{{S1}}}": turned(1, 5, 0)}, INSTANCE),
    "UnbindErrors": (
        of_both('unbind_requests_total{%s,route="/v1/completions",status="503"}', then(0, 20, 6))
        | of_both('unbind_requests_total{%s,route="/health",status="200"}', rising(9000)),  # which hide no failure
        {},
    ),
    "UnbindSlowFirstToken": (late("unbind_first_token_seconds"), {}),
    "UnbindSlowTokens": (late("unbind_inter_token_seconds"), {}),
    "UnbindAuditProblems": ({f"unbind_audit_problems{{{S1}}}": turned(0, 3, 2)}, INSTANCE),
}
# Nothing is to fire in these.
QUIET: dict[str, dict[str, str]] = {
    "nothing is wrong": {},
    "a server that is not ready yet": of_both('unbind_requests_total{%s,route="/ready",status="503"}', rising(60)),
    "no canaries are run": of_both(
        'unbind_canary_runs_total{%s,module="m",probe="extraction",result="hit"}', f"_x{MINUTES}"
    )
    | of_both('unbind_canary_last_hit_timestamp_seconds{%s,module="m",probe="extraction"}', f"_x{MINUTES}"),
    "one error of a canary": {
        f'unbind_canary_runs_total{{{S1},module="m",probe="extraction",result="error"}}': "0x100 1x20"
    },
    "a server without traffic reads no gate": {
        f"unbind_gate_evaluations_total{{{S1},{GATE}}}": rising(0),
        f"unbind_gate_activations_total{{{S1},{GATE}}}": rising(0),
        f'unbind_module_requests_total{{{S1},module="m"}}': rising(0),
    },
    "few positions say little": of_both(f"unbind_gate_evaluations_total{{%s,{GATE}}}", rising(1))
    | of_both(f"unbind_gate_activations_total{{%s,{GATE}}}", rising(0.5)),
    "a module that calibration never saw open": of_both(
        'unbind_module_calibrated_rate{%s,module="m",side="retain"}', constant(0)
    )
    | of_both(f"unbind_gate_activations_total{{%s,{GATE}}}", rising(0)),
    "a module whose file tells nothing of forget rows": of_both(
        'unbind_module_calibrated_rate{%s,module="m",side="forget"}', f"_x{MINUTES}"
    ),
    "a module whose file tells no rates": of_both(
        'unbind_module_calibrated_rate{%s,module="m",side="forget"}', f"_x{MINUTES}"
    )
    | of_both('unbind_module_calibrated_rate{%s,module="m",side="retain"}', f"_x{MINUTES}"),
    "an old miss": {MISS: "0x20 1x100"},
    "a restart sets counters back": {f"unbind_gate_evaluations_total{{{S1},{GATE}}}": "0+600x90 0+600x30"},
    "no worker, and nothing to do": of_both("unbind_worker_up{%s}", constant(0)),
    "jobs that wait behind another, whose worker is not scraped": of_both("unbind_worker_up{%s}", constant(0))
    | of_both('unbind_jobs{%s,state="queued"}', constant(3))
    | of_both('unbind_jobs{%s,state="running"}', constant(1)),
    "a rollout of one minute": {
        f'unbind_module_info{{{S2},module="m",digest="d2",layer="2",policy="rewrite"}}': f"_x{MINUTES - 1} 1"
    },
}


def test_each_alert_has_a_scenario_whose_labels_its_texts_name() -> None:
    assert SCENARIOS.keys() == ALERTS.keys()
    for name, rule in ALERTS.items():
        named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert named <= SCENARIOS[name][1].keys(), name


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_it_is_and_where_to_read_on(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"].keys() == {"severity"} and rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    page, _, section = rule["annotations"]["runbook"].partition("#")
    assert page in ("docs/operations/runbook.md", "docs/operations/data.md")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert section in {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([str(PROMTOOL), *map(str, arguments)], capture_output=True, text=True, cwd=FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr


def rules_and_configuration_are_sound() -> None:
    promtool("check", "rules", "--lint-fatal", "rules.yml")
    promtool("check", "config", "prometheus.yml")


def fires(folder: Path, changed: dict[str, str], alerts: dict[str, dict[str, str]]) -> None:
    """Exactly these alerts fire, with these labels, at the end."""
    expected = [
        {
            "labels": f"ALERTS{labelled({'alertname': name, 'alertstate': 'firing', **ALERTS[name]['labels'], **labels})}",
            "value": 1,
        }
        for name, labels in alerts.items()
    ]
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in (quiet() | changed).items()],
        "promql_expr_test": [
            {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{MINUTES - 1}m", "exp_samples": expected}
        ],
    }
    path = folder / "test.yml"
    path.write_text(
        yaml.safe_dump(
            {"rule_files": [str(FOLDER / "rules.yml")], "evaluation_interval": "1m", "tests": [test]}, width=1000
        )
    )
    promtool("test", "rules", path)


def labelled(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def each_alert_fires_in_its_scenario_and_no_other_does(tmp_path: Path, name: str) -> None:
    changed, labels = SCENARIOS[name]
    fires(tmp_path, changed, {name: labels})


def no_alert_fires_where_nothing_is_wrong(tmp_path: Path, name: str) -> None:
    fires(tmp_path, QUIET[name], {})


if PROMTOOL:
    test_rules_and_configuration_are_sound = rules_and_configuration_are_sound
    test_each_alert_fires_in_its_scenario_and_no_other_does = pytest.mark.parametrize("name", SCENARIOS)(
        each_alert_fires_in_its_scenario_and_no_other_does
    )
    test_no_alert_fires_where_nothing_is_wrong = pytest.mark.parametrize("name", QUIET)(
        no_alert_fires_where_nothing_is_wrong
    )
