"""The evidence as a page for people: self-contained HTML, no script, nothing fetched; every text in it escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

from server.evidence import plots
from server.registry.lifecycle import InForce, standing

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:54em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:.5em 0 1.5em}td,th{border-bottom:1px solid #ddd;padding:.2em .8em .2em 0;"
    "text-align:left;vertical-align:top}pre{background:#f6f6f6;padding:.7em;overflow:auto;white-space:pre-wrap}svg{width:100%;font-size:12px}"
    "code{word-break:break-all}"
)
WEIGHTS = (
    "Nothing is removed from the weights of the model: whoever holds the weights holds what is in them, and a request that is not "
    "bound is answered without the module."
)


def page(payload: Mapping[str, Any]) -> str:
    """The whole page."""
    takedown = payload["takedown"]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Takedown {escape(takedown["id"])}</title>'
        f"<style>{STYLE}</style><body><h1>Takedown {escape(takedown['name'])}</h1>"
        f"<p><strong>{escape(binding(payload))}</strong></p><p>{escape(WEIGHTS)}</p>{''.join(_sections(payload))}</body></html>"
    )


def binding(payload: Mapping[str, Any]) -> str:
    """What the takedown's module bound when the document was made, and no more than that."""
    takedown = payload["takedown"]
    named = (
        f" Rules that name it, and bind what they apply to: {', '.join(payload['named_by'])}."
        if payload["named_by"]
        else ""
    )
    when = f"As of {payload['made_at']}"
    match takedown["in_force"]:
        case InForce.ENFORCED:
            return (
                f"{when}, the module is enforced. It binds {takedown['binds']}: there the service keeps from giving these rows "
                f"back, to the degree that is stated below.{named}"
            )
        case InForce.AVAILABLE:
            return (
                f"{when}, the module is calibrated and available, and not enforced. It binds {takedown['binds']}: only there the "
                f"service keeps from giving these rows back, to the degree that is stated below.{named}"
            )
    return f"{when}, the service does nothing about these rows: the takedown binds {takedown['binds']}."


def _sections(payload: Mapping[str, Any]) -> Iterable[str]:
    takedown, result = payload["takedown"], payload.get("result") or {}
    yield "<h2>What was asked</h2>" + _table(
        [
            ("takedown", takedown["id"]), ("received here", _time(takedown["created_at"])), ("rows", takedown["row_count"]),
            ("SHA-256 of the rows", takedown["forget_digest"]),
            ("rows deleted", _time(takedown["purged_at"]) if takedown["purged_at"] else "no"),
            *takedown["notice"].items(),
        ]
    )  # fmt: skip
    yield "<h2>What was done</h2>" + _table(
        [("outcome of the job", result.get("outcome", "none yet")), ("in force now", takedown["in_force"]),
         ("scope", takedown["scope"] or "none"), ("binds", takedown["binds"]),
         ("rules that name the module", ", ".join(payload["named_by"]) or "none"), ("model", payload["model"].get("name")),
         ("model fingerprint", payload["model"].get("fingerprint")), ("software", payload["software"])]
    )  # fmt: skip
    yield _rows(
        ["module", "version", "state", "binds", "SHA-256 of the file"],
        [
            [m["name"], m["version"], standing(m["state"], m["scope"]), m["binds"], m["digest"]]
            for m in takedown["modules"]
        ],
    )
    if result.get("verify"):
        yield "<h2>Before and after</h2>" + _before_after(result["verify"])
    report = payload.get("report")
    if report:
        yield from _fit(report)
    exhibits = payload.get("exhibits")
    if exhibits:
        yield "<h2>Where the gate opens</h2>" + plots.histogram(exhibits["histograms"])
        yield "<h2>Samples</h2>" + "".join(
            f"<h3>Row {number}</h3><p>Prompt</p>{_pre(sample['prompt'])}<p>Before</p>{_pre(sample['before'])}"
            f"<p>After</p>{_pre(sample['after'])}"
            for number, sample in enumerate(exhibits["samples"], start=1)
        )
    elif takedown["purged_at"]:
        yield "<p>Samples and plots were deleted with the rows.</p>"
    yield "<h2>Who did what</h2>" + _rows(
        ["entry", "time", "actor", "action", "subject"],
        [[row["id"], _time(row["at"]), row["actor"], row["action"], row["subject"]] for row in payload["audit"]],
    )


def _fit(report: Mapping[str, Any]) -> Iterable[str]:
    chosen = report.get("selected")
    allowed = report.get("budgets") or {}
    if chosen and chosen.get("cost"):
        bounds = chosen["cost"]["bounds"]
        names = {"kl": "retain KL", "nll": "retain NLL increase", "bleu": "retain BLEU drop", "open_rate": "gates open"}
        rows = [(label, float(bounds[key]), float(allowed[key])) for key, label in names.items() if key in allowed]
        yield "<h2>Cost against budget</h2><p>Upper 95 % bounds.</p>" + plots.bars(rows)
    elif chosen:
        measures = (
            ("retain KL", "retain_kl", "kl"),
            ("retain NLL increase", "retain_nll_increase", "nll"),
            ("retain BLEU drop", "retain_bleu_drop", "bleu"),
        )
        yield "<h2>Cost against budget</h2>" + plots.bars(
            [
                (label, float(chosen[key]), float(allowed.get(budget, 0.01)))
                for label, key, budget in measures
                if chosen.get(key) is not None
            ]
        )
    if report.get("scan") or not report.get("levels"):
        yield "<h2>Candidates</h2>" + plots.scan(report.get("scan") or [])
    if report.get("levels"):
        yield "<h2>Gates that were tried</h2>" + _levels(report["levels"])


def _levels(levels: Iterable[Mapping[str, Any]]) -> str:
    """What each kind of gate reached, and why it was or was not taken."""
    lines = []
    for level in levels:
        forgot = level.get("forgot") or {}
        left = ", ".join(f"{form} {_number(share)}" for form, share in forgot.get("f_bleu_left", {}).items())
        kind = ("gate", "layer", "width", "tau_close", "axis", "strength")
        lines.append(
            [
                *(_number(level.get(key)) for key in kind),
                left,
                _number(forgot.get("recovery")),
                level.get("verdict", ""),
            ]
        )
    heads = ["gate", "layer", "width", "closing", "axis", "strength", "share of F-BLEU left", "recovery", "verdict"]
    return _rows(heads, lines)


def _before_after(table: Mapping[str, Any]) -> str:
    before, after = table.get("before") or {}, table.get("after") or {}
    lines = [
        [group, measure, _number(before.get(group, {}).get(measure)), _number(value)]
        for group, measures in after.items()
        if isinstance(measures, dict)
        for measure, value in measures.items()
    ]
    return _rows(["rows", "measure", "before", "after"], lines)


def _table(pairs: Iterable[tuple[Any, Any]]) -> str:
    return "<table>" + "".join(f"<tr><th>{_text(key)}<td>{_text(value)}" for key, value in pairs) + "</table>"


def _rows(heads: list[str], lines: Iterable[list[Any]]) -> str:
    head = "".join(f"<th>{escape(name)}" for name in heads)
    return (
        f"<table><tr>{head}" + "".join("<tr>" + "".join(f"<td>{_text(v)}" for v in line) for line in lines) + "</table>"
    )


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"<code>{escape(text)}</code>" if len(text) >= 64 and " " not in text else escape(text)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
