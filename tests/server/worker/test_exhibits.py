"""What evidence shows of a gate is what the gate goes by in service."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from server.worker.exhibits import BINS, exhibits
from tests.server.conftest import MakeModule
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import pad_id
from unbind_core.module import UnbindModule
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.windows import batches, forget_windows, retain_windows

FORGET = [ForgetRow(f"def f{i}():\n", f"    return {i} + secret_{i}\n" * 4) for i in range(4)]
RETAIN = [RetainRow(f"class A{i}:\n    x = {i}\n" * 4) for i in range(4)]


def network(module: UnbindModule) -> UnbindModule:
    """The module with a small random network for a detector."""
    generator, width = torch.Generator().manual_seed(1), module.w.shape[0]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    return replace(
        module,
        detector="network",
        w=drawn(8, width),
        b=drawn(8),
        heads=drawn(3, 8),
        heads_b=drawn(3),
        window=4,
        s_ref=0.0,
        tau=0.3,
        quantile=None,
        kappa=0.0,
    )


@pytest.mark.parametrize("kind", ["fisher", "network"])
def test_positions_over_the_threshold_are_those_at_which_the_bank_opens_the_gate(
    loaded: LoadedModel, make_module: MakeModule, kind: str
) -> None:
    module = replace(make_module("one"), kappa=0.0)
    module = network(module) if kind == "network" else module
    shown = exhibits(loaded, module, FORGET, RETAIN)
    histogram = shown["histograms"]
    assert histogram["threshold"] == (1.0 if kind == "network" else module.tau) and len(shown["samples"]) == 3
    windows = {
        "forget": forget_windows(loaded.tokenizer, FORGET, range(4), module.forms),
        "retain": retain_windows(loaded.tokenizer, RETAIN, range(4), module.forms),
    }
    step = (histogram["high"] - histogram["low"]) / BINS
    for name, of in windows.items():
        counts = histogram["counts"][name]
        assert sum(counts) == sum(window.target_count for window in of)
        bank = ModuleBank()
        bank.add(module)
        with torch.no_grad(), attach(loaded.model, bank):
            for batch in batches(of, pad_id(loaded.tokenizer)):
                loaded.model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False)
        opened = bank.counts()["one"]["prefill"][1]
        surely = sum(n for i, n in enumerate(counts) if histogram["low"] + i * step >= histogram["threshold"])
        perhaps = sum(n for i, n in enumerate(counts) if histogram["low"] + (i + 1) * step >= histogram["threshold"])
        beyond = sum(len(window.ids) - window.target_count for window in of)  # the bank counts prompts as well
        assert surely <= opened <= perhaps + beyond
