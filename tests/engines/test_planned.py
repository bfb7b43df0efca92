"""What vLLM does not compute is refused before any of its processes starts, and a start that fails says why."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server import demo
from server.engine.choice import plan_engine
from server.engine.vllm import model
from server.engine.vllm.arguments import Arguments
from server.engine.vllm.model import Model
from server.engine.vllm.worker import GatedWorker
from tests.engines.both import options
from unbind_core.architecture import load_model
from unbind_core.errors import UnbindError
from unbind_core.identity import ModelIdentity


@pytest.mark.parametrize(
    ("built_for", "told", "says"),
    [
        (
            "cpu",
            {"device": "cuda"},
            "^device cuda: the vLLM that is installed computes on cpu; start with --device cpu,",
        ),
        (
            "cuda",
            {"device": "cpu"},
            "^device cpu: the vLLM that is installed computes on cuda; start with --device cuda,",
        ),
        ("", {"device": "cuda"}, "computes on nothing that this machine has; install vLLM's build for cuda"),
        ("cuda", {"device": "cuda:1"}, "^device cuda:1: .*; start with --device cuda and CUDA_VISIBLE_DEVICES=1$"),
        ("cpu", {"dtype": "float64"}, "^dtype float64: vLLM computes in float32 or bfloat16; start with one of them"),
    ],
)
def test_a_device_or_dtype_that_vllm_does_not_compute_with_is_refused(
    built_for: str, told: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(device_type=built_for))
    with pytest.raises(UnbindError, match=says):
        plan_engine("vllm", load_model(demo.BASE), replace(options(tmp_path), **told))


def test_why_a_process_does_not_start_is_told_in_the_line_that_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = object.__new__(GatedWorker)

    def fails(_: Any) -> int:
        raise UnbindError("no layer of this model\nkeeps keys and values; use the embedded engine")

    def starting(*_: Any, **__: Any) -> None:
        with pytest.raises(UnbindError):
            worker.determine_available_memory()  # in a process of its own, of which vLLM tells:
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setattr(GatedWorker.__base__, "determine_available_memory", fails)
    monkeypatch.setattr(model, "AsyncLLM", starting)
    arguments = Arguments(str(demo.BASE), "float32", 512, 4, 64, "cpu")
    identity = ModelIdentity("f" * 64, "", 6, 8, 8192)
    with pytest.raises(
        UnbindError, match=r"^vLLM does not start: no layer of this model keeps .* engine; its own message"
    ):
        asyncio.run(Model.started(arguments, identity))
