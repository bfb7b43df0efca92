"""What vLLM does not compute is refused before any of its processes starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server import demo
from server.engine.choice import plan_engine
from tests.engines.both import options
from unbind_core.architecture import load_model
from unbind_core.errors import UnbindError


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
