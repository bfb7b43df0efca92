"""Plots as SVG text, drawn here so that a page needs nothing from anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, EDGE = 640, 240, 40
COLOURS = ("#b3261e", "#1f6f8b", "#6a8d2f", "#8a5fb0", "#c77d00", "#4d4d4d", "#009e8f", "#a23b72")


def _frame(body: str, x_label: str, y_label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f'<path d="M{EDGE} 10V{HEIGHT - EDGE}H{WIDTH - 10}" fill="none" stroke="#888"/>{body}'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text x="12" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 12 {HEIGHT / 2})">{escape(y_label)}</text></svg>'
    )


def _at(value: float, low: float, high: float, *, vertical: bool = False) -> float:
    share = (value - low) / (high - low) if high > low else 0.5
    share = min(max(share, 0.0), 1.0)
    return HEIGHT - EDGE - share * (HEIGHT - EDGE - 14) if vertical else EDGE + share * (WIDTH - EDGE - 14)


def histogram(found: Mapping[str, Any]) -> str:
    """Shares of forget and retain positions by gate score, on a logarithmic axis, with the threshold."""
    low, high, threshold = float(found["low"]), float(found["high"]), float(found["threshold"])
    body = []
    for colour, (name, counts) in zip(COLOURS, sorted(found["counts"].items()), strict=False):
        total = max(sum(counts), 1)
        points = []
        for index, count in enumerate(counts):
            height = math.log10(max(count / total, 1e-5)) + 5
            x0, x1 = (_at(low + (high - low) * (index + step) / len(counts), low, high) for step in (0, 1))
            y = _at(height, 0, 5, vertical=True)
            points.append(f"{x0:.1f},{y:.1f} {x1:.1f},{y:.1f}")
        body.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        place = 20 + 16 * len(body)
        body.append(f'<text x="{WIDTH - 120}" y="{place}" fill="{colour}">{escape(str(name))} ({total})</text>')
    x = _at(threshold, low, high)
    body.append(f'<path d="M{x:.1f} 10V{HEIGHT - EDGE}" stroke="#000" stroke-dasharray="4 3"/>')
    body.append(f'<text x="{x + 4:.1f}" y="20">threshold {threshold:.4g}</text>')
    return _frame("".join(body), str(found.get("score", "gate score w'h - s")), "share of positions (log)")


def scan(trials: Sequence[Mapping[str, Any]]) -> str:
    """Gain on forget rows over the strength, a colour for each layer; the candidate that was chosen is ringed."""
    shown = [trial for trial in trials if trial.get("forget_gain") is not None and (trial.get("kappa") or 0) > 0]
    if not shown:
        return "<p>No candidate was measured.</p>"
    strengths = [math.log10(trial["kappa"]) for trial in shown]
    gains = [float(trial["forget_gain"]) for trial in shown]
    limits = (min(strengths), max(strengths)), (min(0.0, *gains), max(gains))
    layers = sorted({int(trial["layer"]) for trial in shown})
    body = []
    for trial, strength, gain in zip(shown, strengths, gains, strict=True):
        x, y = _at(strength, *limits[0]), _at(gain, *limits[1], vertical=True)
        colour = COLOURS[layers.index(int(trial["layer"])) % len(COLOURS)]
        chosen = trial.get("verdict") == "selected"
        ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="#000"/>' if chosen else ""
        title = escape(
            f"layer {trial['layer']}, quantile {trial['quantile']}, kappa {trial['kappa']:.3g}: {trial['verdict']}"
        )
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"><title>{title}</title></circle>{ring}')
    for index, layer in enumerate(layers):
        colour = COLOURS[index % len(COLOURS)]
        body.append(f'<text x="{EDGE + 8}" y="{22 + 14 * index}" fill="{colour}">layer {layer}</text>')
    return _frame("".join(body), "strength kappa (log10)", "forget NLL gained")


def bars(rows: Sequence[tuple[str, float, float]]) -> str:
    """What was measured (bar) against what was allowed (line), each in its own measure."""
    body = []
    for index, (name, measured, allowed) in enumerate(rows):
        y = 24 + 44 * index
        scale = max(abs(measured), allowed, 1e-9) * 1.15
        width = max(measured, 0.0) / scale * (WIDTH - 260)
        limit = 180 + allowed / scale * (WIDTH - 260)
        colour = COLOURS[2] if measured <= allowed else COLOURS[0]
        body.append(
            f'<text x="8" y="{y + 14}">{escape(name)}</text><rect x="180" y="{y}" width="{width:.1f}" height="18" fill="{colour}"/>'
            f'<path d="M{limit:.1f} {y - 6}v30" stroke="#000"/>'
            f'<text x="186" y="{y + 34}">{measured:.4f} of {allowed:g} allowed</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {30 + 44 * len(rows)}" role="img" xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>'
