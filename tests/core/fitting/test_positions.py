"""A model with a table of positions has no more of them: what is longer is cut to them, in fits and in measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config

from tests.core.conftest import TinyCheckpoint
from tests.core.own_attention import CONFIGS
from tests.core.own_attention import POSITIONS as TABLE
from unbind_core import FitOptions, LoadedModel, extractable, fit, load_model, verify
from unbind_core.encoding import encode, pad_id
from unbind_core.errors import DataError
from unbind_core.evaluation.drafts import Drafts
from unbind_core.evaluation.scores import forget_scores
from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.corrections.reference import Reference
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.running.generation import Sampling, complete
from unbind_core.windows import MAX_WINDOW, trained_positions, window_limit, with_room

POSITIONS = 512
LONG = "".join(f"    total_{i} = total_{i - 1} * {i * 7919} + first[{i}]\n" for i in range(60))
FORGET = [
    ForgetRow(f"def secret_{i}(first):\n{LONG}", f"    token = {i * 7919}\n    return token\n{LONG}") for i in range(3)
]
RETAIN = [
    RetainRow(f"class Item{i}:\n" + "".join(f"    size_{j} = ({j + i}, {j * 31})\n" for j in range(20 + 20 * (i % 3))))
    for i in range(12)
]


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: TinyCheckpoint) -> LoadedModel:
    found = load_model(tiny_checkpoint("gpt_bigcode"))
    assert found.model.config.n_positions == POSITIONS < len(encode(found.tokenizer, FORGET[0].prompt))  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("gate", ["paper", "auto"])
def test_rows_longer_than_the_positions_are_fitted_and_measured(loaded: LoadedModel, gate: str, tmp_path: Path) -> None:
    options = FitOptions(gate=gate, budgets=Budgets(kl=5.0, nll=5.0, bleu=1.0), effort=0.02 if gate == "auto" else 1)
    module, _ = fit(
        loaded.model,
        loaded.tokenizer,
        FORGET,
        RETAIN,
        name="m",
        identity=loaded.identity,
        options=options,
        cache=tmp_path,
        reference=Reference(most=0.0),
    )
    assert module.settings["max_window"] == POSITIONS < max(len(encode(loaded.tokenizer, row.text)) for row in RETAIN)
    given = (loaded.model, loaded.tokenizer, replace(module, kappa=max(module.kappa, 0.1)), FORGET, RETAIN[:3])
    table = verify(*given, identity=loaded.identity)
    assert table["before"]["all"]["rows"] == 3 and table["after"]["retain"]["ppl"] > 0


def test_what_is_asked_of_such_a_model_is_the_end_of_a_prompt(loaded: LoadedModel) -> None:
    assert extractable(loaded.model, loaded.tokenizer, FORGET)["rows"] == 3
    prompt = encode(loaded.tokenizer, FORGET[0].prompt)
    asked = {"pad": pad_id(loaded.tokenizer), "end": None}
    for new in (16, 256):
        whole, end = complete(loaded.model, [prompt, prompt[-(POSITIONS - new) :]], Sampling(new), **asked)
        assert whole == end and len(whole) == new
    with pytest.raises(
        DataError, match="it has 512 positions, and 512 new tokens are asked for; take a model with more"
    ):
        complete(loaded.model, [prompt], Sampling(POSITIONS), **asked)
    drafts = Drafts(loaded.model, pad=asked["pad"], end=None)
    ask = {"forms": ("plain", "fim"), "attempts": 0}
    drafted = forget_scores(
        loaded.model, loaded.tokenizer, FORGET, greedily=lambda *one: drafts.complete(None, *one), **ask
    )
    assert [one.span for one in drafted] == [
        one.span for one in forget_scores(loaded.model, loaded.tokenizer, FORGET, **ask)
    ]


def test_a_model_whose_positions_are_computed_takes_what_it_took(tiny_checkpoint: TinyCheckpoint) -> None:
    model = load_model(tiny_checkpoint("qwen2")).model
    assert model.config.max_position_embeddings == POSITIONS and window_limit(model) == MAX_WINDOW  # type: ignore[union-attr]
    assert window_limit(model, 4096) == 4096
    assert with_room(model, [range(5000)], 256) == [list(range(5000))]


@pytest.mark.parametrize("family", ["gptj", "codegen", "mpt"])
def test_a_table_that_is_computed_beforehand_has_an_end_too(family: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    assert trained_positions(model) == window_limit(model) == TABLE
    with torch.no_grad():
        (room,) = with_room(model, [range(400)], 56)
        assert room == list(range(200, 400))
        model(torch.arange(TABLE)[None])
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.arange(TABLE + 1)[None])


def test_a_model_that_reads_images_too_has_its_decoders_positions() -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(Gemma3Config(text_config={"max_position_embeddings": 384}))
    assert trained_positions(model) == 384
