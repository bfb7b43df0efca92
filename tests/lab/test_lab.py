"""The loop: training, tuning apart from the rows that are reported, resuming after a kill, and the table of it all."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from server.cli import build
from unbind_core.errors import Cancelled, UnbindError
from unbind_core.progress import Progress, silent
from unbind_lab.claims import claims
from unbind_lab.intervals import intervals
from unbind_lab.keeping import Kept
from unbind_lab.lab import Lab
from unbind_lab.protocols.main import joint_score, summary
from unbind_lab.setting import Bench, Setting
from unbind_lab.systems import BASELINES, SYSTEMS, chosen
from unbind_lab.table import markdown
from unbind_lab.trained.ga import GA
from unbind_lab.trained.rmu import RMU
from unbind_lab.trained.training import Configuration, Rows, Trained, train

NAMES = ["m-full", "ga"]


def trained(
    bench: Bench, system: Trained, configuration: Configuration, **asked: Any
) -> dict[int, dict[str, torch.Tensor]]:
    return train(
        system,
        configuration,
        bench.adapted(),
        bench.full.model,
        bench.full.tokenizer,
        Rows(bench.forget, bench.retain_training),
        rows_an_update=2,
        seed=0,
        progress=silent,
        **asked,
    )


def test_a_short_run_is_the_beginning_of_a_long_one_and_no_other_weight_changes(setting: Setting) -> None:
    bench = Bench(setting)
    before = {name: p.clone() for name, p in bench.adapted().named_parameters()}
    for system in (GA, RMU):
        long = trained(bench, system, Configuration(1e-3, 3, system.paper.options), lengths=[1])
        short = trained(bench, system, Configuration(1e-3, 1, system.paper.options))
        assert sorted(long) == [1, 3] and sorted(short) == [1]
        assert all(torch.equal(long[1][name], tensor) for name, tensor in short[1].items())
        assert any(not torch.equal(long[3][name], tensor) for name, tensor in short[1].items())
        assert any(not torch.equal(before[name], tensor) for name, tensor in short[1].items())
    assert all("lora_" in name for name in trained(bench, GA, Configuration(1e-3, 1))[1])
    assert len(short[1]) == 3 and all("down_proj" in name and "lora_" not in name for name in short[1])


@pytest.mark.parametrize("system", [s for s in BASELINES if isinstance(s, Trained)], ids=lambda s: s.name)
def test_every_trained_system_runs(setting: Setting, system: Trained) -> None:
    found = trained(Bench(setting), system, Configuration(1e-3, 1, system.paper.options))[1]
    assert found and all(bool(tensor.isfinite().all()) for tensor in found.values())


def results(folder: Path) -> dict[str, Any]:
    """Every file of a run, without the seconds it took."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            value = json.loads(path.read_text())
            found[name] = value["value"] if isinstance(value, dict) else value
        else:
            found[name] = path.read_bytes()
    return found


def test_a_run_that_was_killed_again_and_again_equals_one_that_was_not(setting: Setting, tmp_path: Path) -> None:
    systems = chosen(NAMES)
    Lab(setting, tmp_path / "whole").run(systems)
    whole = results(tmp_path / "whole")
    for most in (2, 21, 30):

        def killed(progress: Progress, left: list[int] = [most]) -> None:  # noqa: B006
            left[0] -= 1
            if left[0] < 0:
                raise Cancelled

        with pytest.raises(Cancelled):
            Lab(setting, tmp_path / "killed", progress=killed).run(systems)
    Lab(setting, tmp_path / "killed").run(systems)
    assert results(tmp_path / "killed") == whole
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "whole").rglob("main/*")}
    (tmp_path / "other").write_bytes(b"a module that neither system is")
    for same in (setting, replace(setting, modules={"rewrite": tmp_path / "other"})):
        Lab(same, tmp_path / "whole").run(systems)
        assert {path: path.stat().st_mtime_ns for path in times} == times

    text = markdown(tmp_path / "whole" / setting.name)
    main, told = text.split("### The paper's")[0].split("### Intervals")
    assert [line.split(" | ")[0] for line in told.splitlines() if line.startswith("| ")][2:] == [
        "| m-full",
        "| ga",
        "| ga",
    ]
    rows = [line.split(" | ") for line in main.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in rows[2:]] == ["m-full", "ga", "ga"]
    missing = text.split("every configuration: ")[1].split(". ")[0].split(", ")
    assert "ga" not in missing and "m-full" not in missing and "unbind-silent" in missing
    candidates = json.loads((tmp_path / "whole" / setting.name / "tuning" / "ga.json").read_text())
    assert [(c["options"]["learning_rate"], c["options"]["updates"]) for c in candidates] == [
        (1e-2, 1),
        (1e-2, 3),
    ]
    tuned = json.loads((tmp_path / "whole" / setting.name / "main" / "ga-tuned.json").read_text())["value"]
    assert tuned["options"] == max(candidates, key=lambda one: one["fu_h"])["options"]
    records = [
        json.loads(line)
        for line in (tmp_path / "whole" / setting.name / "main" / "ga-tuned.jsonl").read_text().splitlines()
    ]
    assert summary(records) == {name: tuned[name] for name in summary(records)}


def test_an_artifact_of_something_else_or_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    assert kept.value("a", "1", lambda: 1) == kept.value("a", "1", lambda: 2) == 1
    assert kept.value("a", "2", lambda: 3) == 3
    (tmp_path / "a.json").write_text("{")
    assert kept.value("a", "2", lambda: 4) == 4
    one = {"x": torch.ones(2)}
    assert kept.tensors("t", "1", lambda: one)["x"].tolist() == [1, 1]
    assert kept.tensors("t", "1", dict)["x"].tolist() == [1, 1]
    (tmp_path / "t.safetensors").write_bytes(b"torn")
    assert kept.tensors("t", "1", lambda: {"x": torch.zeros(2)})["x"].tolist() == [0, 0]


def test_scores_are_those_of_the_paper_from_records() -> None:
    found = summary(
        [
            {
                "role": "forget",
                "bleu": 0.2,
                "span": 60,
                "recovery": 0.5,
                "empty": False,
                "nll": 2.0,
                "kl": 3.0,
                "tokens": 2,
            },
            {
                "role": "forget",
                "bleu": 0.0,
                "span": 0,
                "recovery": 0.0,
                "empty": True,
                "nll": 4.0,
                "kl": 1.0,
                "tokens": 2,
            },
            {"role": "retain", "nll": 8.0, "tokens": 3, "bleu": 0.3},
            {"role": "retain", "nll": 2.0, "tokens": 2},
        ]
    )
    assert (found["f_bleu"], found["r_ppl"], found["r_bleu"], found["kl"]) == (0.1, math.exp(2), 0.3, 1.0)
    assert (found["spans_50"], found["mean_recovery"], found["empty"]) == (1, 25.0, 1)
    full = {"f_bleu": 0.4, "r_ppl": 2.0, "r_bleu": 0.5}
    score = joint_score({"f_bleu": 0.1, "r_ppl": 4.0, "r_bleu": 0.6}, full)
    assert score["fr"] == pytest.approx(0.75) and score["ur"] == pytest.approx(math.sqrt(0.5))
    assert score["fu_h"] == pytest.approx(100 * 2 * 0.75 * math.sqrt(0.5) / (0.75 + math.sqrt(0.5)))
    assert joint_score({"f_bleu": 0.5, "r_ppl": 1.0, "r_bleu": 0.0}, full)["fu_h"] == 0.0
    with pytest.raises(ValueError, match="undefined"):
        joint_score(full, {**full, "f_bleu": 0.0})


def line(system: str, configuration: str, f_bleu: float, fu_h: float, kl: float) -> dict[str, Any]:
    return {
        "system": system,
        "configuration": configuration,
        "options": {},
        "f_bleu": f_bleu,
        "fu_h": fu_h,
        "kl": kl,
    } | {
        "r_ppl": 2.0,
        "spans_50": 0,
    }


def test_only_what_is_wanted_is_measured_and_nothing_is_tuned_for_the_paper_s_own(
    setting: Setting, tmp_path: Path
) -> None:
    Lab(setting, tmp_path).run(chosen(["m-full", "gss"]), ["main"], ["paper"])
    assert sorted(path.name for path in (tmp_path / setting.name).rglob("*.json")) == ["gss-paper.json"]


def test_a_system_that_a_setting_cannot_have_keeps_no_other_from_it(setting: Setting, tmp_path: Path) -> None:
    told: list[str] = []
    lab = Lab(replace(setting, modules={}), tmp_path, report=told.append)
    with pytest.raises(UnbindError, match="measured: unbind-paper, unbind-strict, guard; why stands above, and all"):
        lab.run(chosen(["unbind-paper", "unbind-strict", "guard", "m-full"]))
    assert told[0].startswith("unbind-paper: setting: 'modules.paper' is missing")
    assert told[1].startswith("unbind-strict: the retain set has 8 rows") and "no row to forget holds 50" in told[2]
    assert (tmp_path / setting.name / "main" / "m-full-shipped.json").is_file()


def test_intervals_are_the_middle_of_what_other_draws_of_rows_give() -> None:
    draw = random.Random(0)
    full = [{"role": "forget", "row": i, "bleu": 0.5 + draw.random() / 2, "span": 60, "recovery": 1.0, "empty": False}
        | {"nll": 1.0, "kl": 2.0, "tokens": 2} for i in range(40)]  # fmt: skip
    full += [{"role": "retain", "row": i, "nll": 2 + draw.random(), "tokens": 1, "bleu": 0.1} for i in range(50)]
    half = [{**one, "bleu": one["bleu"] / 2} for one in full]
    found = intervals(half, full)
    bleu = [one["bleu"] for one in half if one["role"] == "forget"]
    error = statistics.stdev(bleu) / math.sqrt(len(bleu))
    mean = statistics.fmean(bleu)
    assert found["f_bleu"] == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=error / 4)
    nll = [one["nll"] for one in full if one["role"] == "retain"]
    error = statistics.stdev(nll) / math.sqrt(len(nll))
    assert math.log(found["r_ppl"][1]) - math.log(found["r_ppl"][0]) == pytest.approx(2 * 1.96 * error, rel=0.15)
    # The same rows were drawn of both: half of every draw is half of it.
    assert found["fr"] == pytest.approx((0.5, 0.5)) and found["kl"] == (1.0, 1.0)
    assert intervals(half, full) == found
    with pytest.raises(ValueError, match="same rows"):
        intervals(half[1:], full)


def test_intervals_hold_what_they_say() -> None:
    """Of 150 worlds, about 95 in 100 have the true mean inside; a bootstrap of 40 rows falls a little short."""
    draw, held = random.Random(1), 0
    for _ in range(150):
        rows = [
            {"role": "forget", "row": i, "bleu": draw.random(), "span": 0, "recovery": 0.0, "empty": False}
            | {"nll": 0.0, "kl": 0.0, "tokens": 1}
            for i in range(40)
        ]
        rows.append({"role": "retain", "row": 0, "nll": 1.0, "tokens": 1, "bleu": 0.1})
        low, high = intervals(rows, rows, draws=200)["f_bleu"]
        held += low <= 0.5 <= high
    assert 0.88 <= held / 150 <= 1


def test_claims_are_held_against_the_best_of_the_others() -> None:
    found = [
        line("m-full", "shipped", 0.6, 0, 2),
        line("m-retrain", "shipped", 0.07, 90, 0),
        line("unbind-rewrite", "shipped", 0.065, 95, 1.0),
        line("unbind-silent", "shipped", 0.006, 99, 9),
        line("ga", "tuned", 0.08, 99.5, 0.5),
        line("dpo", "paper", 0.5, 20, 1.5),
    ]
    told = claims(found)
    assert "97 % or more: reached, 99.0 %" in told[0]
    assert "highest FU-H: **not reached**, 99.00 against 99.50 of ga (tuned)" in told[3]
    assert "closest F-BLEU to M_retrain's: reached, 0.0650 against 0.0800 of ga" in told[4]
    assert "smallest KL from M_retrain: **not reached**, 1.000 against 0.500 of ga" in told[5]


def test_a_setting_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    with pytest.raises(UnbindError, match="neither a file nor one of demo"):
        Setting.load("demos")
    (tmp_path / "own.toml").write_text("base = 'x'\nrate = 3\n")
    with pytest.raises(UnbindError, match=r"'rate' in .* is unknown"):
        Setting.load(str(tmp_path / "own.toml"))
    (tmp_path / "own.toml").write_text("base = 'x'\n")
    with pytest.raises(UnbindError, match="'full' is missing"):
        Setting.load(str(tmp_path / "own.toml"))
    with pytest.raises(UnbindError, match="'gaa' is unknown"):
        chosen(["gaa"])


def test_the_demo_setting_reports_rows_that_nothing_was_chosen_by() -> None:
    bench = Bench(Setting.load("demo"))
    assert len(SYSTEMS) == len({*SYSTEMS}) and bench.setting.described()["base"]
    forget = {row.continuation for row in bench.forget}
    retain = {row.text for row in bench.retain}
    assert len(forget) == 24 and len(retain) == bench.setting.retain_rows
    assert not forget & {row.continuation for row in bench.forget_validation}
    assert not retain & {row.text for row in (*bench.retain_training, *bench.retain_validation)}
    assert {row.text for row in bench.retain_chosen_by} <= {row.text for row in bench.retain_validation}


def test_the_commands_say_what_they_miss(tmp_path: Path) -> None:
    for asked, told in (
        (["table", "demo", "--out", str(tmp_path)], "m-full was not measured"),
        (["run", "demo", "--systems", "gaa"], "'gaa' is unknown"),
        (["run", "demo", "--systems", ""], "'' is unknown"),
        (["run", "demo", "--systems", "ga", "--protocols", "mean", "--out", str(tmp_path)], "'mean' is unknown"),
        (["run", "demo", "--systems", "ga", "--configurations", "best", "--out", str(tmp_path)], "'best' is unknown"),
    ):
        found = CliRunner(env={"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}).invoke(build(), ["lab", *asked])
        assert found.exit_code == 1 and told in found.output
