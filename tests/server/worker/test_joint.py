"""What active modules cost together is measured on rows that none of them is there to change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from server.worker.joint import measure_together
from server.worker.plan import withheld
from server.worker.stages import finite
from tests.core.conftest import LAYER, ROWS, make_module, opening_on_some, save_checkpoint
from unbind_core.applying.bank import edit_of
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.encoding import pad_id
from unbind_core.evaluation.replay import Replay
from unbind_core.module import UnbindModule
from unbind_core.progress import silent
from unbind_core.rows import retain_digest
from unbind_core.windows import retain_windows


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_checkpoint("qwen2", tmp_path_factory.mktemp("joint") / "tiny", 0))


def test_modules_whose_corrections_overflow_together_are_over_budget_and_told_of(tmp_path: Path) -> None:
    half = load_model(save_checkpoint("qwen2", tmp_path / "half", 0), dtype=torch.float16)
    along = torch.eye(half.identity.hidden_size)[0]

    def module(name: str, kappa: float) -> UnbindModule:
        return make_module(half.identity, name=name, layer=LAYER, v=along, tau=1e-4, kappa=kappa)

    found = measure_together(half, [module("new", 2e4), module("small", 1.0), module("large", 3e4)], ROWS, silent)
    assert not found["within"] and found["pairs"][0]["modules"] == ["new", "large"]
    said = withheld({"joint": finite(found)}, {})
    assert said.startswith("modules new and large together: retain KL no number (budget 0.01), NLL no number")


def test_rows_that_repeat_forget_rows_do_not_count_against_a_module(loaded: LoadedModel, tmp_path: Path) -> None:
    strong = replace(opening_on_some(loaded, "network"), budgets={"kl": 0.001, "nll": 0.01})
    other = make_module(loaded.identity, name="other", layer=LAYER, kappa=0.0)
    windows = retain_windows(loaded.tokenizer, ROWS, range(len(ROWS)), strong.forms)
    replay = Replay(loaded.model, windows, [LAYER], pad=pad_id(loaded.tokenizer))
    outcome = replay.run(edit_of(strong, torch.device("cpu"))[1], LAYER)
    touched = {row for row, found in outcome.rows.items() if found.changed}
    assert touched and touched != set(range(len(ROWS)))

    counted = measure_together(loaded, [strong, other], ROWS, silent)
    assert not counted["within"] and counted["pairs"][0]["modules"] == [strong.name, "other"]
    left_out = [retain_digest(ROWS[row]) for row in touched]
    told = replace(strong, measured={**strong.measured, "retain_left_out": left_out})
    assert measure_together(loaded, [other, told], ROWS, silent)["kl"] == 0.0
    alone = measure_together(loaded, [told, other], ROWS, silent)
    assert (alone["within"], alone["kl"], alone["nll_increase"], alone["pairs"]) == (True, 0.0, 0.0, [])
