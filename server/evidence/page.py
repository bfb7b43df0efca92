"""The evidence as a page for people: ``page.html`` filled in with what the document says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from server.evidence import plots
from server.registry.lifecycle import BY_WEIGHT, LIVE, InForce, standing
from server.registry.tables import Kind, ModuleState
from unbind_core.evaluation.bounds import told

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["plain"] = lambda value: value if isinstance(value, str) else json.dumps(value)
# How the report of a search names a measure and its budget.
_MEASURES = (
    ("retain KL", "retain_kl", "kl"),
    ("retain NLL increase", "retain_nll_increase", "nll"),
    ("retain BLEU drop", "retain_bleu_drop", "bleu"),
)
# What the check measures, one greedy completion for each row and form, on the model without a module.
_CHECKED = (
    ("rows", "rows that were asked for"),
    (
        "extracted",
        "rows that came back: an exact span of 50 tokens, or of half of a shorter row's, at least of 8 or all",
    ),
    ("spans_50", "rows with an exact span of 50 tokens"),
    ("spans_100", "rows with an exact span of 100 tokens"),
    ("f_bleu", "F-BLEU"),
    ("f_bleu_fim", "F-BLEU, fill in the middle"),
    ("mean_recovery", "mean recovery in per cent"),
)
_COSTS = {"kl": "retain KL", "nll": "retain NLL increase", "bleu": "retain BLEU drop", "open_rate": "gates open"}


def page(payload: Mapping[str, Any]) -> str:
    """The whole page."""
    takedown, result, exhibits = payload["takedown"], payload.get("result") or {}, payload.get("exhibits")
    effort = takedown["options"].get("effort", 1)
    asked = [
        ("takedown", takedown["id"]),
        ("received here", _time(takedown["created_at"])),
        ("rows", takedown["row_count"]),
        ("SHA-256 of the rows", takedown["forget_digest"]),
        ("rows deleted", _deleted(takedown)),
        *([("share of a fit's training steps", effort)] if effort != 1 else []),
        *takedown["notice"].items(),
    ]
    done = [
        ("outcome of the job", result.get("outcome", "none yet")),
        *([("remark of the job", result["remark"])] if result.get("remark") else []),
        ("in force now", takedown["in_force"]),
        ("scope", takedown["scope"] or "none"),
        ("binds", takedown["binds"]),
        ("rules that name it", ", ".join(payload["named_by"]) or "none"),
        ("model", payload["model"].get("name")),
        ("model fingerprint", payload["model"].get("fingerprint")),
        ("quantisation", payload["model"].get("quantisation") or "none"),
        ("software", payload["software"]),
    ]
    guard = takedown["guard"]
    made = [
        (m["kind"], m["name"], m["version"], standing(m), m["binds"], m["digest"])
        for m in (*takedown["modules"], *([guard] if guard else []))
    ]
    audit = [(row["id"], _time(row["at"]), row["actor"], row["action"], row["subject"]) for row in payload["audit"]]
    return _TEMPLATES.get_template("page.html").render(
        takedown=takedown,
        binding=binding(payload),
        asked=asked,
        done=done,
        made=made,
        guard=_guard_facts(guard) if guard else None,
        check=_check(result["check"]) if result.get("check") and not result.get("verify") else None,
        before_after=_before_after(result["verify"]) if result.get("verify") else None,
        **_fit(payload.get("report") or {}),
        exhibits=exhibits,
        histogram=plots.histogram(exhibits["histograms"]) if exhibits else None,
        audit=audit,
    )


def _deleted(takedown: Mapping[str, Any]) -> str:
    if not takedown["purged_at"]:
        return "no"
    kept = ", ".join(takedown["rows_kept_by"])
    return _time(takedown["purged_at"]) + (f", but for {kept}, which has them too, they are kept" if kept else "")


def binding(payload: Mapping[str, Any]) -> str:
    """What the takedown's module and guard bound when the document was made, and no more than that."""
    takedown, guard = payload["takedown"], payload["takedown"]["guard"]
    standing_modules = sorted(takedown["modules"], key=lambda module: BY_WEIGHT.index(module["in_force"]))
    said = [_module_binds(module) for module in standing_modules[-1:] if module["in_force"] != InForce.NONE]
    said += [_guard_binds(guard)] if guard and guard["in_force"] != InForce.NONE else []
    when = f"As of {payload['made_at']}"
    followed = "".join(f" {_succeeded(record, takedown)}" for record in payload["successors"])
    if not said and followed:
        itself = takedown["binds"] if takedown["in_force"] == InForce.NONE else "nothing"
        return f"{when}, this takedown itself binds {itself}.{followed}"
    if not said:
        return f"{when}, the service does nothing about these rows: the takedown binds {takedown['binds']}."
    named = (
        f" Rules that name it, and bind what they apply to: {', '.join(payload['named_by'])}."
        if payload["named_by"]
        else ""
    )
    return f"{when}, the {' The '.join(said)}{named}{followed}"


def _module_binds(module: Mapping[str, Any]) -> str:
    keeps = "service keeps from giving these rows back, to the degree that is stated below."
    if module["in_force"] == InForce.ENFORCED:
        return f"module is enforced. It binds {module['binds']}: there the {keeps}"
    return f"module is calibrated and available, and not enforced. It binds {module['binds']}: only there the {keeps}"


def _succeeded(record: Mapping[str, Any], takedown: Mapping[str, Any]) -> str:
    """What is said of a ``record`` of another takedown that has the rows of this one, whose own may be in force beside it."""
    own = takedown["modules"] if record["kind"] == Kind.MODULE else [takedown["guard"]]
    states = {one["state"] for one in own if one}
    superseded = ModuleState.SUPERSEDED in states and not states & LIVE
    named = (
        f"version {record['version']} of '{record['name']}' ({record['id']}), made by takedown {record['takedown_id']}"
    )
    begins = (
        f"Its {record['kind']} was superseded by {named}, which"
        if superseded
        else f"Another {record['kind']}, {named},"
    )
    return (
        f"{begins} has these rows too. That one is {standing(record)}. It binds "
        f"{record['binds']}: what it keeps back there, the evidence of that takedown states."
    )


def _guard_binds(guard: Mapping[str, Any]) -> str:
    unit = "letters and digits of the continuations" if guard.get("secrets") else "lexemes"
    held = f"a run of {guard['run']} {unit} of the {guard['rows']} rows that it guards, unless the client sent them itself."
    if guard["in_force"] == InForce.ENFORCED:
        return f"guard is enforced. It binds {guard['binds']}: no answer there holds {held}"
    return f"guard is available, and not enforced. It binds {guard['binds']}: only there no answer holds {held}"


def _guard_facts(guard: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        ("where a run would be completed", guard["action"]),
        ("letters and digits of a run" if guard.get("secrets") else "lexemes of a run", guard["run"]),
        ("tokens barred before an answer stops", guard["bars"]),
        ("runs with other names are the same", "yes" if guard["fold"] else "no"),
        ("rows that it guards", guard["rows"]),
        ("rows too short to hold a run", guard["too_short"]),
        ("letters and digits of these rows" if guard.get("secrets") else "lexemes of these rows", guard["lexemes"]),
    ]


def _fit(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the fit measured: the plots of cost and candidates, and the gates that were tried; None where there is nothing."""
    levels, scan = report.get("levels"), report.get("scan")
    shown = bool(scan) or (bool(report) and not levels)
    return {
        "cost": _cost(report.get("selected"), report.get("budgets") or {}),
        "on_rows": (report.get("selected") or {}).get("forget_open_rate"),
        "certificate": told(report["certificate"]) if report.get("certificate") else None,
        "bounds": _bounds(report.get("certificate") or {}),
        "candidates": plots.scan(scan or []) if shown else None,
        "levels": _levels(levels) if levels else None,
    }


def _cost(chosen: Mapping[str, Any] | None, allowed: Mapping[str, Any]) -> dict[str, Any] | None:
    if not chosen:
        return None
    if cost := chosen.get("cost"):
        found = cost.get("cautious") or cost["bounds"]  # as reports called them once
        rows = [(label, float(found[key]), float(allowed[key])) for key, label in _COSTS.items() if key in allowed]
    else:
        rows = [
            (label, float(chosen[key]), float(allowed.get(budget, 0.01)))
            for label, key, budget in _MEASURES
            if chosen.get(key) is not None
        ]
    return {"cautious": bool(chosen.get("cost")), "plot": plots.bars(rows)}


def _bounds(certificate: Mapping[str, Any]) -> list[list[str]]:
    """The lines of a certificate: what was observed, and the upper bound with its method, rows and level."""
    names = {"touched": "rows with an open gate", **_COSTS}
    return [
        [label, *(_number(certificate[key][part]) for part in ("observed", "value", "method", "n", "level"))]
        for key, label in names.items()
        if key in certificate
    ]


def _levels(levels: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """What each kind of gate reached, and why it was or was not taken."""
    lines = []
    for level in levels:
        forgot = level.get("forgot") or {}
        left = ", ".join(f"{form} {_number(value)}" for form, value in forgot.get("f_bleu", {}).items())
        kind = ("gate", "width", "tau", "tau_close")
        lines.append(
            [
                *(_number(level.get(key)) for key in kind),
                left,
                _number(forgot.get("recovery")),
                level.get("verdict", ""),
            ]
        )
    return lines


def _check(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(label, _number(found[key])) for key, label in _CHECKED if found.get(key) is not None]


def _before_after(table: Mapping[str, Any]) -> list[list[str]]:
    before, after = table.get("before") or {}, table.get("after") or {}
    return [
        [group, measure, _number(before.get(group, {}).get(measure)), _number(value)]
        for group, measures in after.items()
        if isinstance(measures, dict)
        for measure, value in measures.items()
    ]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
