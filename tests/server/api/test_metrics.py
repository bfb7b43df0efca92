"""What a scrape shows: true figures, under the names that the page of monitoring lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.registry.audit import Actor
from server.registry.estimate import standing
from server.registry.tables import JobState
from server.telemetry.figures import calibrated_rates
from tests.server.api.admin.test_modules import act, adopt
from tests.support.live import ADMIN_KEY, Live, live
from tests.support.repository import ROOT
from unbind_core.module import UnbindModule

ROWS = {"name": "t", "rows": [{"text": "def add(a, b):\n    return a + b\n" * 8}]}


OF_WORKERS = {"unbind_job_stage_seconds", *(f"unbind_worker_{name}" for name in ("up", "restarts_total", "jobs_total"))}


def samples(text: str) -> dict[str, float]:
    """Every sample of an exposition, by name and labels as they are written."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def scraped(server: Live) -> dict[str, float]:
    return samples(server.call("/metrics", key=ADMIN_KEY).raw.decode())


@pytest.fixture(scope="module")
def watched(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(checkpoint, tmp_path_factory.mktemp("metrics"), enforced={"two": 1.0}, worker=False) as running:
        yield running


def documented() -> set[str]:
    """The names in the table of the page."""
    section = (ROOT / "docs/operations/monitoring.md").read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([a-z_:*]+)`", row)}


def families(server: Live) -> set[str]:
    """The names of all metrics, those that have no sample yet among them."""
    found = text_string_to_metric_families(server.call("/metrics", key=ADMIN_KEY).raw.decode())
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in found}


def test_the_table_of_metrics_and_the_exposition_agree(watched: Live) -> None:
    watched.complete(unbind={"modules": ["one"]})
    shown = families(watched)
    own = {name for name in shown if not name.startswith(("process_", "python_"))}
    assert own == documented() - OF_WORKERS - {"process_*", "unbind_engine_preemptions_total"}  # vLLM's
    assert any(name.startswith("process_") for name in shown)


def test_times_and_lengths_of_answers_are_counted_once_each(watched: Live) -> None:
    before = scraped(watched)
    watched.complete(prompt="def add(first, second):\n    return", max_tokens=6, ignore_eos=True)
    watched.complete(max_tokens=1, ignore_eos=True)
    after = scraped(watched)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    for name in ("queue_seconds", "prefill_seconds", "prompt_length_tokens", "answer_length_tokens"):
        assert grown(f"unbind_{name}_count") == 2, name
    assert grown("unbind_answer_length_tokens_sum") == 7 == grown("unbind_generated_tokens_total")
    assert grown("unbind_decode_seconds_count") == 1 == grown('unbind_decode_token_seconds_count{modules="1"}')
    assert grown("unbind_inter_token_seconds_count") == 5
    assert grown("unbind_inter_token_seconds_sum") == pytest.approx(grown("unbind_decode_seconds_sum"))
    whole = sum(grown(f"unbind_{part}_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert 0 < whole < grown('unbind_request_seconds_sum{route="/v1/completions"}')


def test_a_reused_prefix_is_counted(watched: Live) -> None:
    before = scraped(watched)
    for _ in range(2):
        told = watched.complete(prompt="class Shelf:\n    def put(self, book):\n        self.books", max_tokens=2)
    usage, after = told.body["usage"], scraped(watched)
    queried, reused = (f"unbind_prefix_{what}_tokens_total" for what in ("queried", "reused"))
    assert after[queried] - before[queried] == 2 * usage["prompt_tokens"]
    assert after[reused] - before[reused] == usage["prompt_tokens_details"]["cached_tokens"] > 8


def test_refusals_are_counted_by_reason(watched: Live) -> None:
    before = scraped(watched)
    watched.complete(unbind={"modules": ["-two"]})
    watched.complete(unbind={"modules": ["nobody"]})
    watched.call("/v1/completions", {"prompt": 1.5})
    watched.call("/admin/v1/keys", key="ubk_wrong")
    after = scraped(watched)
    reasons = {name: after[name] - before[name] for name in after if name.startswith("unbind_policy_denials_total")}
    counted = {re.sub(r'.*"(.*)".*', r"\1", name): grown for name, grown in reasons.items() if grown}
    assert counted == {"module_enforced": 1, "unknown_module": 1, "invalid_api_key": 1}


def test_vllm_s_names_show_the_same_figures_where_they_are_wanted(
    watched: Live, checkpoint: Path, tmp_path: Path
) -> None:
    assert not [name for name in scraped(watched) if name.startswith("vllm:")]
    with live(checkpoint, tmp_path, metrics_vllm_names=True) as server:
        server.complete(max_tokens=6, ignore_eos=True)
        server.complete(max_tokens=1, ignore_eos=True)
        found = scraped(server)
        section = (
            (ROOT / "docs/operations/monitoring.md").read_text().split("`metrics_vllm_names` shows")[1].split("\n\n")[0]
        )
        listed = set(re.findall(r"`(vllm:[a-z0-9_]+)`", section)) - {"vllm:num_preemptions_total"}
        shown = {re.sub(r"_(bucket|count|sum)$", "", name.split("{")[0]) for name in found if name.startswith("vllm:")}
        assert shown == listed
        labels = 'engine="0",model_name="tiny"'
        assert found[f"vllm:generation_tokens_total{{{labels}}}"] == 7
        assert found[f"vllm:inter_token_latency_seconds_count{{{labels}}}"] == 5
        assert found['vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'] == 2
        for name, own in (
            ("prompt_tokens_total", "prompt_tokens_total"),
            ("prefix_cache_hits_total", "prefix_reused_tokens_total"),
            ("request_queue_time_seconds_sum", "queue_seconds_sum"),
            ("request_decode_time_seconds_sum", "decode_seconds_sum"),
        ):
            assert found[f"vllm:{name}{{{labels}}}"] == pytest.approx(found[f"unbind_{own}"]), name
        whole = found[f"vllm:e2e_request_latency_seconds_sum{{{labels}}}"]
        parts = ("queue", "prefill", "decode")
        assert whole == pytest.approx(sum(found[f"unbind_{part}_seconds_sum"] for part in parts), rel=1e-3)


def test_what_is_enforced_is_told_with_whether_it_applies(checkpoint: Path, tmp_path: Path) -> None:
    profiles = {"safe": {"enforced": ["one", "absent"]}}
    with live(checkpoint, tmp_path, profiles=profiles) as server:
        adopt(server, "three", "profile:safe")
        found = scraped(server)
        asked = {
            name: found.get(f'unbind_module_enforced_loaded{{module="{name}"}}') for name in ("one", "two", "three")
        }
        assert asked == {"one": 1, "two": None, "three": 1}
        assert found['unbind_module_enforced_loaded{module="absent"}'] == 0
        info = [name for name in found if name.startswith("unbind_module_info{")]
        assert len(info) == 3 and all('policy="silent"' in name for name in info)
        assert found['unbind_module_threshold{module="one"}'] == pytest.approx(0.1)


def test_a_module_in_shadow_is_not_told_of_as_enforced_although_its_guard_is(checkpoint: Path, tmp_path: Path) -> None:
    def told(server: Live) -> list[float | None]:
        found = scraped(server)
        return [found.get(f'unbind_module_enforced{name}{{module="held"}}') for name in ("", "_loaded")]

    with live(checkpoint, tmp_path) as server:
        adopt(server, "held", "global")
        options = {"protect": "guard", "guard": {"run": 8}, "scope": "global", "replace": True}
        assert server.admin("/takedowns", {**ROWS, "name": "held", "options": options}).status == 202
        assert told(server) == [1, 1]
        for action in ("suspend", "shadow"):
            act(server, "held", action)
            assert told(server) == [None, None], action
        act(server, "held", "activate")
        assert told(server) == [1, 1]


def test_where_a_guard_held_its_modules_gate_open_is_counted_and_reported(checkpoint: Path, tmp_path: Path) -> None:
    row = "def kept(first, second):\n    return [first + at for at in range(second) if at % 7]\n"
    with live(checkpoint, tmp_path) as server:
        adopt(server, "held", "global")
        options = {"protect": "guard", "guard": {"run": 16}, "scope": "global", "replace": True}
        posted = {"name": "held", "rows": [{"text": row}], "options": options}
        assert server.admin("/takedowns", posted).status == 202
        for prompt, opened in ((row, ["held"]), ("x = 1\n", [])):
            answer = server.complete(prompt=prompt, max_tokens=2, unbind={"report": True}, key=ADMIN_KEY)
            report = answer.body["choices"][0]["unbind"]
            assert report["guards"]["opened"] == opened and [one["name"] for one in report["modules"]] == ["held"]
        assert scraped(server)['unbind_guard_opened_total{module="held",route="/v1/completions"}'] == 1


def test_rates_of_calibration_are_told_where_a_modules_file_has_them() -> None:
    measured = dict(UnbindModule.load(ROOT / "modules/demo-a.safetensors").measured)
    retain = measured["certificate"]["open_rate"]["observed"]
    assert calibrated_rates(measured) == {"retain": retain, "forget": measured.pop("forget_open_rate")}
    assert calibrated_rates(measured) == {"retain": retain}  # as in files that were made before
    assert calibrated_rates({}) == {}


def test_jobs_are_told_by_state_and_age(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as server:
        registry = server.service.registry
        made = server.admin("/takedowns", ROWS).body["job_id"]
        created = registry.jobs.get(made, 0.0)["created_at"]
        queued = standing(registry.transactions, created + 30, 15.0)
        assert (queued.states["queued"], queued.states["running"], queued.silent) == (1, 0, 0.0)
        assert queued.waited == pytest.approx(30)
        claim = registry.jobs.claim("worker", created + 40, 15.0, 3)
        assert claim is not None
        registry.jobs.report(claim, created + 50, 15.0)
        running = standing(registry.transactions, created + 60, 15.0)
        assert (running.states["running"], running.waited) == (1, 0.0) and running.silent == pytest.approx(10)
        registry.jobs.finish(claim, JobState.FAILED, created + 61, error="no")
        registry.jobs.retry(made, Actor("test"), created + 100)
        again = standing(registry.transactions, created + 103, 15.0)
        assert again.waited == pytest.approx(3), "the age of a job that is tried again begins again"
