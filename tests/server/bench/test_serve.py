"""The benchmark of the engine runs every system on the same requests, and says what it could not run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from server.bench.serve import LOAD, PARTS, TELEMETRY, run
from server.bench.systems import vllm_system
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.errors import UnbindError
from unbind_core.progress import silent


@pytest.mark.slow
def test_every_figure_comes_from_one_run(checkpoint: Path) -> None:
    figures = run(
        load_model(checkpoint),
        workloads=("3x6->4",),
        repeats=1,
        module_counts=(1, 3),
        keystrokes=4,
        keystroke_tokens=40,
        settings={"model": checkpoint},
        progress=silent,
        parts=(*PARTS, LOAD, TELEMETRY),
    )
    assert set(figures["workloads"]["3x6->4"]["tokens_per_second"]) == {"engine", "static", "library"}
    assert figures["vs_static_generate"].keys() == figures["vs_library_batching"].keys() == {"3x6->4"}
    for key in ("module_slowdown", "module_slowdown_networks", "module_slowdown_corrections"):
        assert figures[key].keys() == {"1", "3"}
    assert all(value > 0 for value in (figures["keystroke_warm_over_cold"], figures["http_over_engine"]))
    assert "vs_vllm" not in figures
    cost = figures["telemetry"]["3x6->4"]
    assert cost["ratio"] > 0 and cost["processor_ratio"] > 0 and set(cost["tokens_per_second"]) == {"on", "off"}
    assert 0 < cost["scrape_seconds"]["median"] <= cost["scrape_seconds"]["worst"]
    waited = figures["load"]["3x6->4"]["worst_seconds"]
    assert set(waited) == {"/health", "/ready", "/metrics"} and min(waited.values()) > 0


@pytest.mark.parametrize("workloads", ["3x6", "0x6->4", "3x6->4->5"])
def test_a_workload_that_is_none_is_refused(loaded: LoadedModel, workloads: str) -> None:
    with pytest.raises(UnbindError, match="REQUESTSxPROMPT->NEW"):
        run(loaded, workloads=(workloads,), settings={}, progress=silent)


def test_networks_of_the_demo_model_are_refused_with_another(loaded: LoadedModel) -> None:
    with pytest.raises(UnbindError, match="--networks: they are made of a module of the demo model"):
        run(loaded, workloads=("1x4->2",), parts=(TELEMETRY,), networks=2, settings={}, progress=silent)


def test_a_python_that_has_no_vllm_is_named(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UnbindError, match="could not run vLLM"), vllm_system(Path(sys.executable), loaded, 2, 16):
        pass
    with pytest.raises(UnbindError, match="is not a Python that runs"), vllm_system(tmp_path / "none", loaded, 2, 16):
        pass
