"""Reports say the same as Markdown and as a page; figures are drawn of records; the paper's numbers are the paper's."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import build
from tests.support.repository import ROOT
from unbind_lab.lab import Lab
from unbind_lab.plots import draw
from unbind_lab.protocols.known import PROTOCOLS
from unbind_lab.protocols.main import joint_score, summary
from unbind_lab.report import Section, html, markdown
from unbind_lab.setting import Setting
from unbind_lab.systems import SYSTEMS, chosen
from unbind_lab.table import PUBLISHED, lines, main_section, measured, protocol_section, sections, together


class Cells(HTMLParser):
    """The texts of a page's cells and list items."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("td", "th", "li"):
            self.inside = True
            self.found.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th", "li")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found[-1] += data


def test_markdown_and_page_have_the_same_cells() -> None:
    section = Section(
        "One <b>", ["name", "what", "x"], [["a & b", "<i>", "1.5"], ["c", "", "-2"]], ["`x` is **not** < 2"]
    )
    lines = markdown([section]).splitlines()
    assert lines[0] == "### One <b>" and lines[3] == "| --- | --- | ---: |" and lines[-1] == "- `x` is **not** < 2"
    page = html("A < B", [section])
    cells = Cells()
    cells.feed(page)
    assert cells.found == ["name", "what", "x", "a & b", "<i>", "1.5", "c", "", "-2", "x is not < 2"]
    assert "<h2>One &lt;b&gt;</h2>" in page and "<code>x</code> is <strong>not</strong> &lt; 2" in page
    assert not re.search(r"(src|href)=", page)  # it needs nothing else


def test_the_paper_s_numbers_agree_with_each_other() -> None:
    published = tomllib.loads(PUBLISHED.read_text())
    for corpus in ("CodeSearchNet", "The Stack"):
        known = published[corpus]
        assert len(known) == 18 and set(known) <= set(SYSTEMS)
        full = known["m-full"]
        for name, (f_bleu, r_ppl, r_bleu, human, mbpp, fu_h) in known.items():
            forgetting = max(0.0, 1 - f_bleu / full[0])
            ratios = [full[1] / r_ppl, r_bleu / full[2], human / full[3], mbpp / full[4]]
            utility = 1.0
            for ratio in ratios:
                utility *= min(1.0, ratio) ** 0.25
            score = 100 * 2 * forgetting * utility / (forgetting + utility) if forgetting + utility else 0.0
            assert score == pytest.approx(fu_h, abs=0.1), (corpus, name)


def test_a_run_has_a_page_and_figures(setting: Setting, tmp_path: Path) -> None:
    Lab(setting, tmp_path).run(chosen(["m-full", "m-base", "gss"]), ["main"], ["shipped", "paper"])
    folder = tmp_path / setting.name
    found = sections(folder)
    assert [one.title for one in found][:2] == ["", "Intervals"] and found[-1].title == "The paper's: The Stack"
    assert [row[0] for row in found[-1].rows] == ["m-full", "m-base", "gss"]
    assert joint_score(*2 * [json.loads((folder / "main/m-full-shipped.json").read_text())["value"]])["fr"] == 0
    paths = draw(folder, tmp_path / "figures")
    drawn = ET.parse(paths[0]).getroot()
    assert [path.name for path in paths] == ["trade-off.svg"] and drawn.tag.endswith("svg")
    first = paths[0].read_bytes()
    assert draw(folder, tmp_path / "figures")[0].read_bytes() == first
    record = {"attack": "stored", "row": 0, "span": 3, "recovery": 0.25, "bleu": 0.1}
    (folder / "attacks").mkdir()
    (folder / "attacks/m-base-shipped.jsonl").write_text(json.dumps(record) + "\n")
    value = {"system": "m-base", "configuration": "shipped", "options": {}, "spans_50": 0}
    (folder / "attacks/m-base-shipped.json").write_text(json.dumps({"made_of": "", "value": value}))
    assert [path.name for path in draw(folder, tmp_path / "figures")] == ["trade-off.svg", "attacks.svg"]
    for protocol, names in (("strengths", ("0.5", "2")), ("layers", ("layer-0", "layer-10", "layer-2"))):
        figures = {f"{name}: {key}": 0.5 for name in ("none", *names) for key in ("fr", "ur", "cosine")}
        (folder / protocol).mkdir()
        told = {**value, **figures, "spans_50": 0}
        (folder / protocol / "m-base-shipped.json").write_text(json.dumps({"made_of": "", "value": told}))
    assert [path.name for path in draw(folder, tmp_path / "figures")][2:] == ["strengths.svg", "layers.svg"]


def test_a_model_that_gives_nothing_back_has_a_table_and_figures_without_the_joint_score(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    (folder / "main").mkdir(parents=True)
    rows = [
        {
            "role": "forget",
            "row": 0,
            "bleu": 0.0,
            "span": 0,
            "recovery": 0.0,
            "empty": True,
            "nll": 4.0,
            "kl": 1.0,
            "tokens": 2,
        },
        {"role": "retain", "row": 0, "nll": 8.0, "tokens": 3, "bleu": 0.3},
    ]
    for system in ("m-full", "m-retrain", "unbind-silent", "unbind-rewrite"):
        value = {"system": system, "configuration": "shipped", "options": {}, **summary(rows)}
        (folder / f"main/{system}-shipped.json").write_text(json.dumps({"made_of": "", "value": value}))
        (folder / f"main/{system}-shipped.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main = sections(folder)[0]
    assert main.rows[0][:3] == ["m-full", "shipped", "0.0000"] and main.rows[0][[*main.heads].index("FU-H ↑")] == ""
    assert "M_full gives nothing back of the rows to forget: FR and FU-H are undefined of every system." in main.notes
    assert draw(folder, tmp_path / "figures")[0].is_file()
    assert together([folder]).rows[0] == ["m-full", "shipped", "", "", ""]


def test_the_commands_write_where_they_are_told(setting: Setting, tmp_path: Path) -> None:
    text = "".join(
        f"{key} = {json.dumps(str(value) if isinstance(value, Path) else value)}\n"
        for key, value in asdict(setting).items()
        if key not in ("name", "modules") and value is not None
    )
    (tmp_path / "own.toml").write_text(text)
    run = lambda *asked: CliRunner(env={"NO_COLOR": "1"}).invoke(build(), ["lab", *asked, "--out", str(tmp_path)])  # noqa: E731
    own = str(tmp_path / "own.toml")
    assert run("run", own, "--systems", "m-full").exit_code == 0
    # A setting in a file of its own has no name that the command would know, nor has a run its folder by itself.
    told = run("table", own).stdout
    again = re.search(r"`unbind (lab run .*)` completes the table", told)
    assert again and again[1] == shlex.join(["lab", "run", own, "--out", str(tmp_path)])
    asked = [*shlex.split(again[1]), "--systems", "m-full"]
    assert CliRunner(env={"NO_COLOR": "1"}).invoke(build(), asked).exit_code == 0
    assert run("table", own, "--html", str(tmp_path / "page.html")).exit_code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o644  # a page is to be shown
    assert run("plot", own).exit_code == 0
    assert (tmp_path / "own/figures/trade-off.svg").is_file()
    records = tmp_path / "own/main/m-full-shipped.jsonl"
    kept = records.read_text()
    records.write_text(kept[:-9])
    damaged = run("table", own)
    assert damaged.exit_code == 1 and again[1] in " ".join(damaged.stderr.split())
    records.write_text(kept)
    summary = records.with_suffix(".json")
    whole = summary.read_text()
    for broken in (whole[:-9], "[]", '{"value": 3}'):
        summary.write_text(broken)
        damaged = run("table", own)
        assert damaged.exit_code == 1 and "no summary that a run left; remove it" in " ".join(damaged.stderr.split())
    summary.write_text(whole)
    (tmp_path / "own.toml").unlink()  # records are read without the models and rows that they are of
    assert "| m-full | shipped |" in run("table", "own").stdout


def test_the_tables_of_the_documentation_are_those_of_the_records() -> None:
    text = (ROOT / "docs/lab.md").read_text(encoding="utf-8")
    folder = ROOT / "docs/lab/demo"
    found = lines(folder)
    others = [
        protocol_section(name, measured(folder, name))
        for name in PROTOCOLS
        if name != "main" and (folder / name).is_dir()
    ]
    told = markdown([main_section(folder, found), *(replace(one, title="") for one in others)])
    assert len(found) > 30 and len(others) >= 3
    assert [line for line in told.splitlines() if line and line not in text] == []
    seed = ROOT / "docs/lab/demo-seed-1"
    other = [line for line in markdown([main_section(seed, lines(seed))]).splitlines() if line.startswith("|")]
    assert len(other) > 5 and [line for line in other if line not in text] == []
    for name in ("micro-python", "micro-javascript"):
        world = ROOT / "docs/lab" / name
        told = markdown([main_section(world, lines(world))])
        assert len(lines(world)) > 30 and [line for line in told.splitlines() if line and line not in text] == []


def test_several_settings_stand_side_by_side() -> None:
    runner = CliRunner(env={"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"})
    found = runner.invoke(
        build(), ["lab", "table", "micro-python", "micro-javascript", "--out", str(ROOT / "docs/lab")]
    )
    assert found.exit_code == 0
    rows = {
        tuple(cells[:2]): cells[2:] for line in found.output.splitlines() if (cells := line.strip("| ").split(" | "))
    }
    heads = rows["system", "configuration"]
    assert heads[0] == "micro-python: FR, %" and heads[3] == "micro-javascript: FR, %" and len(heads) == 6
    for at, name in enumerate(("micro-python", "micro-javascript")):
        for one in lines(ROOT / "docs/lab" / name):
            own = rows[one["system"], one["configuration"]][3 * at : 3 * at + 3]
            assert own == [f"{100 * one['fr']:.1f}", f"{100 * one['ur']:.1f}", f"{one['fu_h']:.2f}"]
    absent = runner.invoke(build(), ["lab", "table", "micro-python", "nothing", "--out", str(ROOT / "docs/lab")])
    assert absent.exit_code == 1 and "setting: 'nothing'" in absent.output
