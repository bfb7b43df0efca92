"""One takedown after another: how rows are divided, what each system is after some, and which rows a figure is of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.lab.conftest import forget
from tests.lab.test_varied import with_module
from tests.support.memorising import write_rows
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.evaluation.metrics import EXTRACTED_SPAN
from unbind_core.module import UnbindModule
from unbind_core.progress import silent
from unbind_core.rows import ForgetRow, forget_digest
from unbind_lab.lab import Lab
from unbind_lab.protocols import main, successive
from unbind_lab.served import Served
from unbind_lab.setting import Bench, Setting
from unbind_lab.systems import chosen
from unbind_lab.table import markdown
from unbind_lab.trained.ga import GA
from unbind_lab.trained.training import Rows, train


@pytest.mark.parametrize(
    ("rows", "sizes"), [(3, [3]), (5, [5]), (9, [5]), (24, [5] * 4), (100, [5] * 20), (300, [5] * 20)]
)
def test_takedowns_are_of_the_rows_in_their_order(rows: int, sizes: list[int]) -> None:
    every = [ForgetRow(f"def f{i}():\n", "    pass\n") for i in range(rows)]
    sets = successive.takedowns(every, 20)
    assert list(map(len, sets)) == sizes and [row for one in sets for row in one] == every[: sum(sizes)]


def kept(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())["value"]
    return found


@pytest.fixture(scope="module")
def run(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    """Three takedowns, of the paper's module and of gradient ascent."""
    home = tmp_path_factory.mktemp("successive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(successive, "SIZE", 3)
        write_rows(home / "forget.jsonl", forget("secret", 10))
        made = with_module(replace(setting, forget=home / "forget.jsonl"), home, "fisher")
        made = replace(made, modules={"paper": made.modules["rewrite"]})
        lab = Lab(made, home)
        lab.run(chosen(["m-full", "unbind-paper", "ga"]), ["main", "successive"], ["shipped", "paper"])
        yield lab, home / setting.name


def test_takedowns_follow_each_other(run: tuple[Lab, Path]) -> None:
    lab, folder = run
    bench = Bench(lab.setting)
    material = main.Material(
        bench.forget, bench.retain, lab.setting.completed_rows, Served(bench.retrained.model, bench.retrained.tokenizer)
    )
    # Modules: one for each set, and all of them on.
    files = sorted((folder / "made" / "unbind-paper-shipped").glob("set-*.safetensors"))
    modules = [UnbindModule.load(path) for path in files]
    sets = successive.takedowns(bench.forget, lab.setting.takedowns)
    assert [len(one) for one in sets] == [3, 3, 3]
    assert [one.forget_digest for one in modules] == [forget_digest(rows) for rows in sets]
    model = bench.full.model
    under = Served(model, bench.full.tokenizer, editing=lambda: attach(model, ModuleBank.of(modules)))
    found = [
        json.loads(line) for line in (folder / "successive" / "unbind-paper-shipped.jsonl").read_text().splitlines()
    ]
    last = [one for one in found if one["variant"] == "after-3"]
    for one, wanted in zip(last, main.records(under, material, silent), strict=True):
        assert {key: one[key] for key in wanted} == pytest.approx(wanted)
    # Weights: from those that the one before left, towards the model that it left.
    weights: dict[str, torch.Tensor] = {}
    reference, configuration = bench.full.model, GA.paper
    for number, rows in enumerate(sets, start=1):
        changed = bench.adapted()
        own = dict(changed.named_parameters())
        for name, tensor in weights.items():
            own[name].data.copy_(tensor)
        arguments = {"rows_an_update": lab.setting.rows_an_update, "seed": lab.setting.seed, "progress": silent}
        material_of = Rows(rows, bench.retain_training)
        found = train(GA, configuration, changed, reference, bench.full.tokenizer, material_of, **arguments)
        weights = found[configuration.updates]
        made = load_file(folder / "made" / "ga-paper" / f"after-{number}.safetensors")
        assert all(torch.equal(made[name], tensor) for name, tensor in weights.items()) and len(made) == len(weights)


def test_figures_are_of_the_rows_that_were_asked_for(run: tuple[Lab, Path]) -> None:
    _, folder = run
    assert kept(folder, "successive/m-full-shipped").keys() == {"system", "configuration", "options", "measured_on"}
    full = kept(folder, "main/m-full-shipped")
    for name in ("unbind-paper-shipped", "ga-paper"):
        figures, itself = kept(folder, f"successive/{name}"), kept(folder, f"main/{name}")
        assert list(dict.fromkeys(key.split(":")[0] for key in figures if ":" in key)) == [
            *("none", "at-once", "after-1", "after-3")
        ]
        numbers = {key: value for key, value in itself.items() if isinstance(value, int | float)}
        assert {key: figures[f"at-once: {key}"] for key in numbers} == pytest.approx(numbers)
        assert figures["none: r_ppl"] == pytest.approx(full["r_ppl"]) and figures["none: fu_h"] == 0
        found = [json.loads(line) for line in (folder / "successive" / f"{name}.jsonl").read_text().splitlines()]
        first = [one for one in found if one["variant"] == "after-1" and one["role"] == "forget"]
        assert [one["asked"] for one in first] == [True] * 3 + [False] * 7
        assert figures["after-1: f_bleu"] == pytest.approx(sum(one["bleu"] for one in first[:3]) / 3)
        assert figures["after-1: spans_50"] == sum(one["span"] >= EXTRACTED_SPAN for one in first[:3])
        others = [one for one in found if one["variant"] == "none" and one["role"] == "forget"][3:]
        share = sum(one["bleu"] for one in first[3:]) / sum(one["bleu"] for one in others)
        assert figures["after-1: others"] == pytest.approx(100 * share) and "none: others" not in figures
    table = markdown(folder).split("### successive")[1].split("\n###")[0]
    rows = [line.split(" | ")[:2] for line in table.splitlines() if line.startswith(("| unbind", "| ga"))]
    heads = ("all in one", "after 1", "after 3")
    assert rows == [["| unbind-paper", head] for head in heads] + [["| ga", f"paper, {head}"] for head in heads]
