"""The benchmark of the bank covers every combination it promises and leaves the model as it was."""

from __future__ import annotations

from pathlib import Path

from server.bench.filter import run
from server.bench.many import many
from tests.core.conftest import save_checkpoint
from unbind_core.architecture import decoder_layers, load_model


def test_every_combination_is_measured_as_a_share_of_the_plain_pass(tmp_path: Path) -> None:
    loaded = load_model(save_checkpoint("qwen2", tmp_path))
    figures = run(loaded, counts=(1, 3), repeats=1)
    measured = [(row["modules"], row["placement"], row["phase"], row["kind"]) for row in figures["cost"]]
    assert measured == [
        (count, placement, phase, kind)
        for phase in ("decode", "prefill")
        for placement in ("one layer", "spread")
        for kind in ("fisher", "network", "network network")
        for count in (1, 3)
    ]
    assert all(0.2 < row["open_rate"] <= 1 and row["share"] > 0 and row["forward_ms"] > 0 for row in figures["cost"])
    assert {row["phase"] for row in figures["cost_one_module_a_row"]} == {"decode"}
    assert figures["model"]["layers"] == 3
    assert not any(layer._forward_hooks for layer in decoder_layers(loaded.model))


def test_many_networks_are_measured_on_code_that_hardly_opens_them(tmp_path: Path) -> None:
    loaded = load_model(save_checkpoint("qwen2", tmp_path))
    (found,) = many(loaded, counts=(30,), repeats=1)
    assert found["modules"] == 30 and found["kind"] == "network 128x24 network, random"
    assert found["open_rate"] < 0.05 and found["over_none"] > 0 and 0 < found["bytes_a_token"] <= 30 * 25 * 4
    assert found["first_ms"] > 0 and found["change_ms"] > 0
    assert not any(layer._forward_hooks for layer in decoder_layers(loaded.model))
