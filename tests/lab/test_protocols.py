"""Related code and MUSE's numbers: against slow readings of their definitions, and in a run's table."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from unbind_core.encoding import encode, encode_prompt
from unbind_core.progress import silent
from unbind_core.rows import RetainRow
from unbind_core.windows import perplexity_windows
from unbind_lab.lab import Lab
from unbind_lab.protocols import muse, related, weights
from unbind_lab.protocols.main import Material
from unbind_lab.served import Served
from unbind_lab.setting import Bench, Setting
from unbind_lab.systems import chosen
from unbind_lab.table import markdown, measured


@pytest.fixture
def plain(setting: Setting) -> tuple[Served, Material]:
    """M_full and what systems are measured on; M_retrain's part is the base model's."""
    bench = Bench(setting)
    system = Served(bench.full.model, bench.full.tokenizer)
    return system, Material(bench.forget, bench.retain, 2, Served(bench.base.model, bench.base.tokenizer))


def test_rouge_is_that_of_a_slow_reading_on_random_texts() -> None:
    draw = random.Random(0)

    def slow(a: list[str], b: list[str]) -> int:
        @lru_cache(None)
        def longest(i: int, j: int) -> int:
            if i == len(a) or j == len(b):
                return 0
            return max(
                longest(i + 1, j), longest(i, j + 1), (a[i] == b[j]) + longest(i + 1, j + 1) if a[i] == b[j] else 0
            )

        return longest(0, 0)

    for _ in range(1000):
        a, b = ([draw.choice("abcd") for _ in range(draw.randrange(1, 10))] for _ in range(2))
        same = slow(a, b)
        precision, recall = same / len(b), same / len(a)
        wanted = 2 * precision * recall / (precision + recall) if same else 0.0
        assert muse.rouge_l(" ".join(a), "(" + ", ".join(b).upper() + ")") == pytest.approx(wanted)
    assert muse.rouge_l("a", "") == muse.rouge_l("", "a") == 0.0


def test_what_a_model_knows_of_a_row_is_what_its_logits_say(plain: tuple[Served, Material]) -> None:
    system, material = plain
    found = [one for one in muse.records(system, material, silent) if one["role"] == "forget"]
    for one, row in zip(found, material.forget, strict=True):
        prompt, target = encode_prompt(system.tokenizer, row.prompt), encode(system.tokenizer, row.continuation)
        with torch.no_grad():
            logits = system.model(input_ids=torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1]
        table = logits.log_softmax(-1)
        nll = sorted((-table[i, token]).item() for i, token in enumerate(target))
        least = nll[-max(1, round(0.4 * len(nll))) :]
        assert one["min_k"] == pytest.approx(sum(least) / len(least), rel=1e-3)
        right = (table.argmax(-1) == torch.tensor(target)).tolist()
        assert one["exact"] == pytest.approx(sum(right) / len(right))
        last = len(right) - next((k for k in range(len(right) + 1) if all(right[k:])), len(right))
        assert one["strength"] == pytest.approx(last / len(right))


def test_who_recites_and_who_refuses_stand_at_the_ends(plain: tuple[Served, Material]) -> None:
    system, material = plain
    everything = [row.continuation for row in material.forget]

    def recite(prompt: list[int], _answer: list[int]) -> list[int]:
        text = system.tokenizer.decode(prompt)
        own = next((one for one, row in zip(everything, material.forget, strict=True) if row.prompt in text), "")
        return encode(system.tokenizer, own)[: muse.BLEU_NEW_TOKENS]

    known = muse.summary(muse.records(replace(system, cut=recite), material, silent))
    refused = muse.summary(muse.records(replace(system, refuses=lambda _: True), material, silent))
    assert known["verbatim"] == pytest.approx(100) and known["knowledge"] > 50
    assert refused["verbatim"] == refused["knowledge"] == refused["utility"] == refused["exact"] == 0


def test_a_retain_row_with_nothing_behind_its_cut_is_asked_for_nothing(plain: tuple[Served, Material]) -> None:
    system, material = plain
    more = replace(material, retain=[RetainRow("}"), *material.retain, RetainRow("}\n")])
    found = [one for one in muse.records(system, more, silent) if one["role"] == "retain"]
    assert [one["row"] for one in found] == list(range(1, len(more.retain)))
    assert all("min_k" in one for one in found) and "knowledge" not in found[-1]


def area(scores: list[float], members: list[bool]) -> float:
    """Of the ROC curve, by its definition: the share of pairs of a member and another in which the member's score is the higher."""
    inside, outside = (
        [score for score, one in zip(scores, members, strict=True) if one is kind] for kind in (True, False)
    )
    return float(np.mean([(one > other) + (one == other) / 2 for one in inside for other in outside]))


def test_privacy_leaks_as_areas_say() -> None:
    draw = np.random.default_rng(0)
    found = [
        {
            "role": role,
            "row": i,
            "min_k": draw.normal(mean),
            "retrained_min_k": draw.normal(3),
            "exact": 0.0,
            "strength": 0.0,
        }
        for role, mean in (("forget", 1.5), ("retain", 3.0))
        for i in range(40)
    ]
    members = [one["role"] == "forget" for one in found]
    own, reference = (area([one[name] for one in found], members) for name in ("min_k", "retrained_min_k"))
    assert muse.summary(found)["privleak"] == pytest.approx(100 * (own / reference - 1))
    assert muse.summary(found)["privleak"] < -50


def test_groups_are_neighbours_by_language_and_no_row_that_repeats_another(plain: tuple[Served, Material]) -> None:
    system, material = plain
    repeats = RetainRow(material.forget[0].prompt + material.forget[0].continuation * 12)
    other = [RetainRow("function secret_1(x) {\n  return secret + x\n}\n" * 2, "javascript")]
    more = replace(material, retain=[*material.retain, repeats, *other], forget=[
        replace(row, continuation=row.continuation * 12) for row in material.forget
    ])  # fmt: skip
    found = related.records(system, more, silent)
    by_row = {one["row"]: one["groups"] for one in found}
    last = len(material.retain)
    assert last not in by_row and by_row[last + 1][0] == "cross"
    told = related.summary(found)
    for name in ("same", "ordinary"):
        own = [one for one in found if name in one["groups"]]
        assert told[f"rows_{name}"] == len(own)
        total, count = 0.0, 0
        for one in own:  # the paper's R-PPL, row by row
            for window in perplexity_windows(system.tokenizer, [more.retain[one["row"]]]):
                ids, begun = torch.tensor(window.ids), window.first_target
                with torch.no_grad():
                    table = system.model(input_ids=ids[None]).logits[0].log_softmax(-1)
                total -= float(table[begun - 1 : -1].gather(1, ids[begun:, None]).sum())
                count += len(ids) - begun
        assert told[f"nll_{name}"] == pytest.approx(total / count, rel=1e-3)
    assert related.beside({"nll_same": 1.1}, {"nll_same": 1.0}) == {"rise_same": pytest.approx(10)}


def test_both_run_and_have_tables(setting: Setting, tmp_path: Path) -> None:
    Lab(setting, tmp_path).run(chosen(["m-full", "m-base"]), ["main", "related", "muse", "weights"])
    text = markdown(tmp_path / setting.name)
    assert all(f"### {name}" in text for name in ("related", "muse", "weights"))
    full, base = measured(tmp_path / setting.name, "related")
    assert full["rise_same"] == 0 and base["rise_same"] != 0
    assert json.loads((tmp_path / setting.name / "muse/m-base-shipped.json").read_text())["value"]["system"] == "m-base"


def test_weights_are_treated_where_they_are_the_system(
    plain: tuple[Served, Material], monkeypatch: pytest.MonkeyPatch
) -> None:
    system, material = plain
    before = {name: parameter.clone() for name, parameter in system.model.named_parameters()}
    eight = weights._int8(system.model)
    for (name, old), new in zip(before.items(), eight.parameters(), strict=True):
        if "proj.weight" in name:  # 255 levels for each output
            assert not torch.equal(old, new) and (old - new).abs().max() <= old.abs().amax() / 254 + 1e-7
            assert all(len(row.unique()) <= 255 for row in new)
    monkeypatch.setattr(weights, "LEARNING_RATE", 1e-2)
    found = weights.records(system, material, silent)
    told = weights.summary(found)
    assert [one["row"] for one in found if one["treatment"] == "relearned"] == [1, 3]
    assert [one["row"] for one in found if one["treatment"] == "int8"] == [0, 1, 2, 3]
    learned = weights._relearned(system, material, [1, 3], silent)
    known = weights.summary(weights._asked("relearned", learned, system, material, [1, 3], silent))
    assert known["recovery_relearned"] > max(50, told["recovery_int8"])  # of the rows that it was given
    assert all(torch.equal(before[name], parameter) for name, parameter in system.model.named_parameters())
    assert weights.records(replace(system, refuses=lambda _: False), material, silent) == []


def test_trained_systems_are_treated_as_m_full_is(setting: Setting, tmp_path: Path) -> None:
    Lab(setting, tmp_path).run(chosen(["ga", "rmu", "prompt-filter"]), ["weights"], ["shipped", "paper"])
    found = {one["system"]: one for one in measured(tmp_path / setting.name, "weights")}
    for name in ("ga", "rmu"):
        assert {
            f"{figure}_{treatment}" for figure in ("spans", "recovery", "bleu") for treatment in weights.TREATMENTS
        } <= {*found[name]}
    assert not any(key.startswith("spans_") for key in found["prompt-filter"])
