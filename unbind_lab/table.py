"""The tables of a run in the paper's form, with Unbind's rows held against the paper's claims and the best rival."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unbind_core.errors import UnbindError
from unbind_lab import report
from unbind_lab.claims import claims
from unbind_lab.filters.filter import Filter
from unbind_lab.intervals import intervals
from unbind_lab.lab import LABELS
from unbind_lab.protocols import evalplus
from unbind_lab.protocols.known import MAIN, PROTOCOLS
from unbind_lab.protocols.main import COUNTED, Record
from unbind_lab.protocols.protocol import Column
from unbind_lab.report import Section
from unbind_lab.systems import SYSTEMS, System

Line = dict[str, Any]
Commands = Mapping[Path, str]  # what measures more of a folder's setting, as the user has named it
PUBLISHED = Path(__file__).with_name("published.toml")
RISE: Column = ("R-PPL over M_full's, %", "r_ppl_rise", "+.2f")
BOOTSTRAPPED = (*(one for one in MAIN if one[1] in ("f_bleu", "r_bleu", *COUNTED, "fu_h", "kl", "mean_recovery")), RISE)


def lines(folder: Path, commands: Commands | None = None) -> list[Line]:
    """The main protocol's, with the counts of HumanEval+ and MBPP+ where those were measured, and FR, UR and FU-H. Where they were
    measured of M_full, a system of which they were not has no such score. Raises UnbindError where M_full is missing.
    """
    found = measured(folder, "main")
    if not any(one["system"] == "m-full" for one in found):
        raise UnbindError(f"{folder}: m-full was not measured; run {_command(folder, commands)} --systems m-full")
    return found


def measured(folder: Path, protocol: str) -> list[Line]:
    """What was measured by a protocol on what M_full was, in the order of the systems, the user's own last, with what stands beside
    it where M_full was measured.
    """
    found = _comparable(folder, protocol)[0]
    if protocol == "main":
        counts = {_key(one): one for one in _comparable(folder, "evalplus")[0]}
        found = [{**one, **_counts(counts.get(_key(one), {}))} for one in found]
    full = next((one for one in found if one["system"] == "m-full"), None)
    if full is None:
        return found
    needed = {name for name in COUNTED if name in full}
    return [{**one, **(PROTOCOLS[protocol].beside(one, full) if needed <= one.keys() else {})} for one in found]


def _comparable(folder: Path, protocol: str) -> tuple[list[Line], list[Line]]:
    """What was measured by a protocol; apart what was so on other rows or by other code than M_full, as before a setting changed.
    Files of before ``measured_on`` was kept say nothing of that.
    """
    paths = [folder / protocol / f"{name}-{label}.json" for name in SYSTEMS for label in LABELS]
    others = sorted({*(folder / protocol).glob("*.json")} - {*paths})
    paths += [path for path in others if path.stem.rpartition("-")[2] in LABELS]
    found = [_summary(path) for path in paths if path.is_file()]
    full = next((one.get("measured_on") for one in found if one["system"] == "m-full"), None)
    apart = [one for one in found if None not in (full, on := one.get("measured_on")) and on != full]
    return [one for one in found if one not in apart], apart


def _counts(measured_by_evalplus: Line) -> Line:
    return {name: measured_by_evalplus[name] for name in COUNTED if name in measured_by_evalplus}


def _key(one: Line) -> tuple[str, str]:
    return one["system"], one["configuration"]


def _apart(folder: Path, protocol: str, commands: Commands | None) -> list[str]:
    """A note of what a table leaves out, where it does."""
    found = ", ".join(f"{system} ({label})" for system, label in map(_key, _comparable(folder, protocol)[1]))
    what = "" if protocol == "main" else f" --protocols {protocol}"
    told = f"Left out, as they were measured on other rows or by other code than m-full: {found}."
    return [f"{told} `{_command(folder, commands)}{what}` measures them anew."] if found else []


def _summary(path: Path) -> Line:
    """A summary as a run left it. Raises UnbindError where it is not whole."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))["value"]
        if isinstance(value, dict):
            return value
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise UnbindError(
        f"{path}: no summary that a run left; remove it and run unbind lab run again, which measures it anew"
    )


def _command(folder: Path, commands: Commands | None) -> str:
    return (commands or {}).get(folder, f"unbind lab run {folder.name}")


def sections(folder: Path, commands: Commands | None = None) -> list[Section]:
    """The main table with claims and what is missing, its intervals, every other protocol that was run, the paper's own numbers.

    Raises UnbindError where M_full is missing.
    """
    found = lines(folder, commands)
    told = [main_section(folder, found, commands), _intervals(folder, found, commands)]
    told += [
        protocol_section(name, others, _apart(folder, name, commands))
        for name in PROTOCOLS
        if name != "main" and (others := measured(folder, name))
    ]
    return [*told, *_published({one["system"] for one in found})]


def main_section(folder: Path, found: Sequence[Line], commands: Commands | None = None) -> Section:
    """The main table with claims and what is missing."""
    full = next(one for one in found if one["system"] == "m-full")
    there = {*map(_key, found)}
    missing = [name for name, system in SYSTEMS.items() if not {(name, label) for label in _labels(system)} <= there]
    notes = [*claims(found), *_apart(folder, "main", commands)]
    if missing:
        notes.append(
            f"Not measured, or not in every configuration: {', '.join(missing)}. "
            f"`{_command(folder, commands)}` completes the table."
        )
    if not full["f_bleu"]:
        notes.append("M_full gives nothing back of the rows to forget: FR and FU-H are undefined of every system.")
    for name, head in evalplus.NAMES.items():
        if without := [
            f"{one['system']} ({one['configuration']})" for one in found if name not in one and name in full
        ]:
            notes.append(f"{head} was not measured of {', '.join(without)}: they have no FR, UR and FU-H.")
        if full.get(name) == 0:
            notes.append(
                f"M_full solves no task of {head}, and as in the paper that utility is zero of every system: so are UR and FU-H."
            )
    return _section("", found, [one for one in MAIN if one[1] not in COUNTED or one[1] in full], notes)


def protocol_section(name: str, found: Sequence[Line], notes: Sequence[str] = ()) -> Section:
    """What a protocol measured: a row a system, or, where it has variants, a row each of the systems that have any."""
    protocol = PROTOCOLS[name]
    if protocol.variants:
        found = [line for one in found for line in _variants(one, protocol.variants)]
    return _section(name, found, protocol.columns, notes)


def _variants(one: Line, variants: Mapping[str, str]) -> Iterator[Line]:
    for name, head in variants.items():
        figures = {key.removeprefix(f"{name}: "): value for key, value in one.items() if key.startswith(f"{name}: ")}
        if figures:
            shown = head if one["configuration"] == "shipped" else f"{one['configuration']}, {head}"
            yield {"system": one["system"], "configuration": shown, "options": {}, **figures}


def markdown(*folders: Path, commands: Commands | None = None) -> str:
    """The sections of a run, as documents have them; several runs: side by side."""
    return report.markdown(_shown(folders, commands))


def html(*folders: Path, commands: Commands | None = None) -> str:
    """The same as a page."""
    return report.html(f"unbind lab: {', '.join(folder.name for folder in folders)}", _shown(folders, commands))


def _shown(folders: Sequence[Path], commands: Commands | None) -> list[Section]:
    return [together(folders, commands)] if len(folders) > 1 else sections(folders[0], commands)


JOINT: tuple[Column, ...] = (("FR, %", "fr", ".1f"), ("UR, %", "ur", ".1f"), ("FU-H", "fu_h", ".2f"))


def together(folders: Sequence[Path], commands: Commands | None = None) -> Section:
    """FR, UR and FU-H of several settings side by side, as the paper's multilingual table has them (Appendix F): each against the
    M_full of its own setting. Raises UnbindError where one is missing.
    """
    by_name = [{_key(one): one for one in lines(folder, commands)} for folder in folders]
    there = {key for found in by_name for key in found}
    shipped = [(name, label) for name, system in SYSTEMS.items() for label in _labels(system)]
    rows = []
    for key in [*(one for one in shipped if one in there), *sorted(there - {*shipped})]:
        cells = [
            _cell(one[figure] * (1 if figure == "fu_h" else 100), form) if figure in (one := found.get(key, {})) else ""
            for found in by_name
            for _, figure, form in JOINT
        ]
        rows.append([*key, *cells])
    heads = [f"{folder.name}: {head}" for folder in folders for head, _, _ in JOINT]
    return Section("", ["system", "configuration", *heads], rows)


def _section(title: str, found: Sequence[Line], columns: Sequence[Column], notes: Sequence[str] = ()) -> Section:
    rows = [
        [one["system"], _configuration(one), *(_cell(one[key], form) if key in one else "" for _, key, form in columns)]
        for one in found
    ]
    return Section(title, ["system", "configuration", *(head for head, _, _ in columns)], rows, notes)


def _intervals(folder: Path, found: Sequence[Line], commands: Commands | None) -> Section:
    """The main table's figures as the central 95 % of a bootstrap over rows."""
    whole = next(one for one in found if one["system"] == "m-full")
    counted = [name for name in COUNTED if name in whole]
    protocols = ("main", "evalplus") if counted else ("main",)
    measured_of = partial(records, folder, commands=commands)
    full = [record for protocol in protocols for record in measured_of(protocol, whole)]
    columns = [column for column in BOOTSTRAPPED if column[1] not in COUNTED or column[1] in counted]
    rows = []
    for one in found:
        if "fu_h" not in one:
            continue
        ranges = intervals([record for protocol in protocols for record in measured_of(protocol, one)], full)
        cells = (" to ".join(_cell(value, form) for value in ranges[key]) for _, key, form in columns)
        rows.append([one["system"], one["configuration"], *cells])
    return Section("Intervals", ["system", "configuration", *(head for head, _, _ in columns)], rows)


def _published(systems: Collection[str]) -> list[Section]:
    """What the paper has of these systems, on its own models: no figure of it is comparable with one above, but its order is."""
    published = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))
    source, columns = published.pop("source"), published.pop("columns")
    return [
        Section(
            f"The paper's: {corpus}",
            ["system", *columns],
            [[name, *map(str, figures)] for name, figures in known.items() if name in systems],
            [f"{source}, {corpus}."],
            texts=1,
        )
        for corpus, known in published.items()
    ]


def records(folder: Path, protocol: str, one: Line, commands: Commands | None = None) -> list[Record]:
    """What a line is the summary of. Raises UnbindError where it is not there or not whole."""
    path = folder / protocol / f"{one['system']}-{one['configuration']}.jsonl"
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UnbindError(f"{path}: {error}; remove its .json and run {_command(folder, commands)} again") from None


def _labels(system: System) -> tuple[str, ...]:
    """The configurations that it is measured in."""
    return ("shipped",) if isinstance(system, Filter) and system.paper is None else ("paper", "tuned")


def _cell(value: float, form: str) -> str:
    return format(value, form) if abs(value) < 1e5 else format(value, ".2e")


def _configuration(one: Mapping[str, Any]) -> str:
    options = ", ".join(f"{key} {value:g}" for key, value in one["options"].items())
    return f"{one['configuration']}: {options}" if options else str(one["configuration"])
