"""The protocol from end to end on a tiny random model, and what it makes of UR, FU-H and the tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import build
from tests.lab.evalplus.conftest import HUMAN_EVALS, MBPPS
from unbind_core.errors import UnbindError
from unbind_lab.lab import Lab
from unbind_lab.plots import draw
from unbind_lab.protocols.evalplus import PROTOCOL, summary
from unbind_lab.protocols.main import joint_score
from unbind_lab.setting import Setting
from unbind_lab.systems import chosen
from unbind_lab.table import lines, markdown, sections, together

FULL = {"f_bleu": 0.5, "r_ppl": 2.0, "r_bleu": 0.4, "he_plus": 40, "mbpp_plus": 100}


def test_utility_has_four_ratios_where_tasks_are_counted() -> None:
    own = {"f_bleu": 0.05, "r_ppl": 2.5, "r_bleu": 0.5, "he_plus": 20, "mbpp_plus": 50}
    found = joint_score(own, FULL)
    assert found["ur"] == pytest.approx((0.8 * 1 * 0.5 * 0.5) ** 0.25) and found["fr"] == pytest.approx(0.9)
    assert found["fu_h"] == pytest.approx(100 * 2 * 0.9 * found["ur"] / (0.9 + found["ur"]))
    two = {key: value for key, value in FULL.items() if not key.endswith("plus")}
    assert joint_score(own, two)["ur"] == pytest.approx(0.8**0.5)
    assert joint_score(own, {**FULL, "he_plus": 0})["fu_h"] == 0  # a reference of zero contributes zero
    with pytest.raises(KeyError):
        joint_score(two, FULL)


def test_tasks_are_counted_where_all_their_tests_pass() -> None:
    found = [
        {"role": "he_plus", "base": True, "plus": True},
        {"role": "he_plus", "base": True, "plus": False},
        {"role": "he_plus", "base": False, "plus": True},
        {"role": "mbpp_plus", "base": False, "plus": False},
    ]
    told = summary(found)
    assert [told[f"he_plus{end}"] for end in ("_base", "", "_tasks")] == [2, 1, 3]
    assert [told[f"mbpp_plus{end}"] for end in ("_base", "", "_tasks")] == [0, 0, 1]


def test_a_setting_is_measured_and_its_tables_have_the_counts(
    setting: Setting, written: Callable[..., Path], tmp_path: Path
) -> None:
    # solved by a function without a body, so that a model that writes nothing of sense has something to keep
    nothing = {"canonical_solution": "    return None\n", "base_input": [[[]]], "plus_input": [[[1]]]}
    folder = written([*HUMAN_EVALS, {**HUMAN_EVALS[0], **nothing, "task_id": "HumanEval/902"}])
    own = replace(setting, evalplus=folder)
    Lab(own, tmp_path).run(chosen(["m-full", "m-base", "prompt-filter"]), ["main", "evalplus"])
    out = tmp_path / setting.name
    records = [json.loads(line) for line in (out / "evalplus/m-full-shipped.jsonl").read_text().splitlines()]
    assert [(one["role"], one["row"], one["task"]) for one in records] == [
        *[("he_plus", row, f"HumanEval/90{row}") for row in range(3)],
        ("mbpp_plus", 0, "Mbpp/2"),
        ("mbpp_plus", 1, "Mbpp/901"),
    ]
    kept = json.loads((out / "evalplus/m-full-shipped.json").read_text())["value"]
    assert {name: kept[name] for name in summary(records)} == summary(records)
    assert [kept[name] for name in ("he_plus_tasks", "mbpp_plus_tasks")] == [3, 2]
    text = markdown(out)
    head = text.splitlines()[0]
    assert "HE+ ↑ | MBPP+ ↑ | FR" in head and "### evalplus" in text and "M_full solves no task of MBPP+" in text
    for one in lines(out):
        assert one["mbpp_plus"] == 0 and one["ur"] == one["fu_h"] == 0
    intervals = sections(out)[1]
    assert "HE+ ↑" in intervals.heads and len(intervals.rows) == 3
    made = (out / "evalplus/m-full-shipped.json").stat().st_mtime_ns
    Lab(own, tmp_path).run(chosen(["m-full"]), ["evalplus"])
    assert (out / "evalplus/m-full-shipped.json").stat().st_mtime_ns == made
    Lab(replace(setting, evalplus=written(HUMAN_EVALS)), tmp_path).run(chosen(["m-full"]), ["evalplus"])
    assert (out / "evalplus/m-full-shipped.json").stat().st_mtime_ns != made  # other files, measured again


def test_without_the_files_nothing_changes(setting: Setting, tmp_path: Path) -> None:
    Lab(setting, tmp_path).run(chosen(["m-full"]), ["main"])
    before = (tmp_path / setting.name / "main/m-full-shipped.json").read_text()
    Lab(replace(setting, evalplus=tmp_path), tmp_path).run(chosen(["m-full"]), ["main"])
    assert (tmp_path / setting.name / "main/m-full-shipped.json").read_text() == before
    assert "HE+ ↑" not in markdown(tmp_path / setting.name).split("###")[0]
    with pytest.raises(UnbindError, match="the protocol evalplus needs --evalplus FOLDER"):
        Lab(setting, tmp_path / "x").run(chosen(["m-full"]), ["main", "evalplus"])
    assert not (tmp_path / "x").exists()


def test_a_system_without_counts_has_no_score_beside_those_with_them(tmp_path: Path) -> None:
    def write(protocol: str, system: str, **figures: float) -> None:
        path = tmp_path / protocol / f"{system}-shipped"
        path.parent.mkdir(exist_ok=True)
        value = {"system": system, "configuration": "shipped", "options": {}, **figures}
        path.with_suffix(".json").write_text(json.dumps({"made_of": "", "value": value}))
        rows = [
            {
                "role": "forget",
                "row": 0,
                "bleu": 0.5,
                "kl": 0,
                "tokens": 1,
                "nll": 1,
                "span": 0,
                "recovery": 0,
                "empty": False,
            },
            {"role": "retain", "row": 0, "bleu": 0.5, "tokens": 1, "nll": 1},
        ]
        if protocol == "evalplus":
            rows = [{"role": kind, "row": 0, "base": True, "plus": True} for kind in ("he_plus", "mbpp_plus")]
        path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    figures = {
        "kl": 0.0,
        "spans_50": 0,
        "mean_recovery": 0.0,
        "empty": 0,
        "forget_nll": 1.0,
        "f_bleu": 0.5,
        "r_ppl": 2.0,
    }
    for system in ("m-full", "unbind-silent", "guard", "prompt-filter"):
        write("main", system, **figures, r_bleu=0.5)
    for system, he_plus in (("m-full", 40), ("prompt-filter", 10)):
        write("evalplus", system, he_plus=he_plus, mbpp_plus=100, he_plus_base=41, mbpp_plus_base=120)
    found = {one["system"]: one for one in lines(tmp_path)}
    assert found["prompt-filter"]["ur"] == pytest.approx(0.25**0.25) and found["m-full"]["ur"] == 1
    assert "fu_h" not in found["guard"] and "ur" not in found["unbind-silent"]
    text = markdown(tmp_path)
    assert "HE+ was not measured of unbind-silent (shipped), guard (shipped): they have no FR, UR and FU-H." in text
    assert "highest FU-H" not in text and len(sections(tmp_path)[1].rows) == 2
    assert [row[2:] for row in together([tmp_path, tmp_path]).rows if row[0] == "guard"] == [[""] * 6]
    assert draw(tmp_path, tmp_path / "figures")


def test_the_command_takes_the_folder(setting: Setting, written: Callable[..., Path], tmp_path: Path) -> None:
    path = next(setting.base.parent.glob("*.toml"))
    runner = CliRunner(env={"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"})
    command = [
        "lab",
        "run",
        str(path),
        "--systems",
        "m-base",
        "--protocols",
        "evalplus",
        "--out",
        str(tmp_path / "out"),
    ]
    absent = runner.invoke(build(), [*command, "--evalplus", str(tmp_path)])
    assert absent.exit_code == 1 and "holds no HumanEvalPlus-v0.1.10.jsonl.gz; fetch it from" in absent.output
    found = runner.invoke(build(), [*command, "--evalplus", str(written(HUMAN_EVALS[:1], MBPPS[:1]))])
    assert found.exit_code == 0, found.output
    assert (tmp_path / "out" / path.stem / "evalplus/m-base-shipped.json").is_file() and PROTOCOL.name == "evalplus"


def test_a_setting_of_ones_own_names_the_folder(setting: Setting, tmp_path: Path) -> None:
    path = next(setting.base.parent.glob("*.toml"))
    own = path.with_name("own.toml")
    own.write_text('evalplus = "files"\n' + path.read_text())
    try:
        found = Setting.load(str(own))
    finally:
        own.unlink()
    assert found.evalplus == path.parent / "files"
    assert {**found.described(), "name": ""} == {**setting.described(), "name": ""}
