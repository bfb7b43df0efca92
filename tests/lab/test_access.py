"""The access protocol: against a slow reading of its definition, on its own in a run, and in the table."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from unbind_core.evaluation.metrics import longest_span
from unbind_core.evaluation.scores import WAYS
from unbind_core.progress import silent
from unbind_core.windows import forget_prompt
from unbind_lab.lab import Lab
from unbind_lab.protocols.access import records, summary
from unbind_lab.protocols.main import Material
from unbind_lab.served import Served
from unbind_lab.setting import Bench, Setting
from unbind_lab.systems import chosen
from unbind_lab.table import markdown


def slow_span(target: list[int], output: list[int], prompt: list[int]) -> int:
    """Every run of the target, looked up in both texts."""

    def has(text: list[int], run: list[int]) -> bool:
        return any(text[i : i + len(run)] == run for i in range(len(text) - len(run) + 1))

    runs = [target[i:j] for i in range(len(target)) for j in range(i + 1, len(target) + 1)]
    return max((len(run) for run in runs if has(output, run) and not has(prompt, run)), default=0)


def test_spans_are_those_of_brute_force_on_random_texts() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        target, output, prompt = ([draw.randrange(3) for _ in range(draw.randrange(12))] for _ in range(3))
        assert longest_span(target, output, prompt) == slow_span(target, output, prompt)


def test_the_summary_takes_the_largest_of_each_row() -> None:
    found = summary(
        [
            {"row": 0, "way": "original", "span": 50, "recovery": 0.5},
            {"row": 0, "way": "fence", "span": 10, "recovery": 0.1},
            {"row": 1, "way": "original", "span": 49, "recovery": 0.25},
            {"row": 1, "way": "fence", "span": 100, "recovery": 0.75},
        ]
    )
    assert found == {
        "spans_original": 1,
        "recovery_original": 37.5,
        "spans_fence": 1,
        "recovery_fence": 42.5,
        "spans_all": 2,
        "spans_100": 1,
        "recovery_all": 62.5,
    }


def test_every_way_asks_the_system_and_not_its_model(setting: Setting) -> None:
    bench = Bench(setting)
    plain = Served(bench.full.model, bench.full.tokenizer)
    material = Material(bench.forget, bench.retain, 1, plain, attempts=2)
    refused = records(replace(plain, refuses=lambda _: True), material, silent)
    assert {one["way"] for one in refused} >= {"original", "instruction", "fence"}
    assert all(one["span"] == 0 and one["recovery"] == 0 for one in refused)
    _, target = forget_prompt(plain.tokenizer, bench.forget[0], "plain")
    recited = records(replace(plain, cut=lambda *_: list(target)), material, silent)
    own = next(one for one in recited if one["row"] == 0 and one["way"] == "original")
    assert own["span"] == len(target) and own["recovery"] == 1


def test_it_runs_by_itself_is_kept_and_has_a_table(setting: Setting, tmp_path: Path) -> None:
    few = replace(setting, access_attempts=2)
    Lab(few, tmp_path).run(chosen(["m-full"]), ["main", "access"])
    folder = tmp_path / few.name
    found = [json.loads(line) for line in (folder / "access" / "m-full-shipped.jsonl").read_text().splitlines()]
    kept = json.loads((folder / "access" / "m-full-shipped.json").read_text())["value"]
    assert {name: kept[name] for name in summary(found)} == summary(found)
    assert {one["way"] for one in found} <= {*WAYS}
    before = (folder / "access" / "m-full-shipped.jsonl").stat().st_mtime_ns
    Lab(few, tmp_path).run(chosen(["m-full"]), ["access"])
    assert (folder / "access" / "m-full-shipped.jsonl").stat().st_mtime_ns == before
    assert "### access" in markdown(folder) and "fence: recovery" in markdown(folder)
