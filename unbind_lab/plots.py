"""Figures of a run: forgetting over utility with curves of equal FU-H, what each attack recovers of each system, forgetting and
utility by a module's strength and by its layer, and how near gates are to opening.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unbind_lab.protocols import activations
from unbind_lab.table import Commands, Line, lines, measured, records

matplotlib.rcParams["svg.hashsalt"] = "unbind"  # the same records give the same file
KINDS = {"m-": ("references", "s"), "unbind-": ("Unbind", "*"), "": ("others", "o")}
CURVES = (50, 70, 80, 90, 95, 99)
MARGIN = 0.03
CROWDED, APART = 0.93, 0.032  # utility from which names stand in a column, and how far apart


def draw(folder: Path, out: Path, commands: Commands | None = None) -> list[Path]:
    """Write the figures that there are records for to ``out``. Raises UnbindError where M_full was not measured."""
    out.mkdir(parents=True, exist_ok=True)
    found = [_save(trade_off([one for one in lines(folder, commands) if "fu_h" in one]), out / "trade-off.svg")]
    attacks = measured(folder, "attacks")
    if attacks:
        found.append(_save(recovered(folder, attacks, commands), out / "attacks.svg"))
    for protocol, what, extra in (
        ("strengths", "strength", ()),
        ("layers", "decoder layer", (("cosine", "cos(w,v)"),)),
    ):
        varied = [one for one in measured(folder, protocol) if _variants(one)]
        if varied:
            found.append(_save(curves(varied, what, extra), out / f"{protocol}.svg"))
    near = [one for one in measured(folder, "activations") if "reached_forget" in one]
    if near:
        found.append(_save(histograms(folder, near, commands), out / "activations.svg"))
    return found


def histograms(folder: Path, found: Sequence[Line], commands: Commands | None) -> Figure:
    """The share of positions by what a gate goes by, in thresholds; a picture a system."""
    figure = Figure(figsize=(4 * len(found), 3.2))
    for axes, one in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        every = records(folder, "activations", one, commands)
        for role, label in (("retain", "retain rows"), ("forget", "rows to forget")):
            counts = activations.summed(row for row in every if row["role"] == role)
            places = [number / activations.BINS for number in counts]
            shares = [count / sum(counts.values()) for count in counts.values()]
            axes.bar(places, shares, 1 / activations.BINS, align="edge", alpha=0.6, label=label)
        axes.axvline(1.0, color="0.3", linewidth=1)
        axes.set(xlabel="in thresholds: opens at 1", ylabel="share of positions", yscale="log", title=one["system"])
    axes.legend(
        loc="upper right", fontsize=7
    )  # the best place takes a second to find on a busy machine, and matplotlib warns
    figure.tight_layout()
    return figure


def _variants(one: Line) -> list[str]:
    """Those that have a number, as ``0.25`` and ``layer-3`` do, rising."""
    names = {key.split(": ")[0] for key in one if ": " in key}
    return sorted((name for name in names if name != "none"), key=_number)


def _number(variant: str) -> float:
    return float(variant.removeprefix("layer-"))


def curves(found: Sequence[Line], what: str, extra: Sequence[tuple[str, str]] = ()) -> Figure:
    """FR and UR, and what else is named, over what a system's variants are numbered by; a picture a system."""
    figure = Figure(figsize=(4 * len(found), 3.2))
    for axes, one in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        names = _variants(one)
        for key, label in (("fr", "forgetting (FR)"), ("ur", "utility (UR)"), *extra):
            axes.plot([_number(name) for name in names], [one[f"{name}: {key}"] for name in names], "o-", label=label)
        axes.set(xlabel=what, ylim=(-MARGIN, 1 + MARGIN) if not extra else None, title=one["system"])
    axes.legend(loc="lower left", fontsize=7)
    figure.tight_layout()
    return figure


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    return path


def trade_off(found: Sequence[Line]) -> Figure:
    """FR over UR; a point a system and configuration, tuned and shipped ones named."""
    figure = Figure(figsize=(8, 6))
    axes: Axes = figure.subplots()
    utility = np.linspace(0.02, 1.0, 200)
    for score in CURVES:
        share = score / 100
        with np.errstate(divide="ignore", invalid="ignore"):
            forgetting = share * utility / (2 * utility - share)  # FU-H = 2 FR UR / (FR + UR)
        there = (forgetting >= 0) & (forgetting <= 1)
        axes.plot(utility[there], forgetting[there], color="0.85", linewidth=1, zorder=0)
        if there.any():
            axes.annotate(str(score), (utility[there][0], forgetting[there][0]), color="0.6", fontsize=7)
    for prefix, (kind, marker) in KINDS.items():
        own = [one for one in found if _kind(str(one["system"])) == prefix]
        axes.scatter([one["ur"] for one in own], [one["fr"] for one in own], marker=marker, label=kind, s=50)
    _name(axes, [one for one in found if one["configuration"] != "paper"])
    lowest = min((one["ur"] for one in found if one["fr"] > 0), default=0.0)
    axes.set(
        xlim=(max(0.0, lowest - MARGIN), 1 + MARGIN),
        ylim=(-MARGIN, 1 + MARGIN),
        xlabel="utility that is left (UR)",
        ylabel="forgetting (FR)",
        title="Forgetting over utility; grey: equal FU-H",
    )
    axes.legend(loc="lower left")
    return figure


def _name(axes: Axes, found: Sequence[Line]) -> None:
    """Names beside the points, and in a column on the right of those that crowd at full utility, none over another."""
    crowd = sorted((one for one in found if one["ur"] > CROWDED), key=lambda one: -float(one["fr"]))
    for one in found:
        if one not in crowd:
            axes.annotate(one["system"], (one["ur"], one["fr"]), xytext=(5, 3), textcoords="offset points", fontsize=7)
    above = 1 + 2 * APART
    for place, one in enumerate(crowd):
        lowest = -MARGIN + APART * (len(crowd) - 1 - place)  # so that those below it find room
        above = max(min(above - APART, float(one["fr"])), lowest)
        axes.annotate(
            one["system"],
            (one["ur"], one["fr"]),
            xytext=(1 + 2 * MARGIN, above),
            fontsize=7,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.5},
        )


def _kind(system: str) -> str:
    return next(prefix for prefix in KINDS if system.startswith(prefix))


def recovered(folder: Path, found: Sequence[Line], commands: Commands | None) -> Figure:
    """Mean recovery in per cent, a row a system, a column an attack."""
    names: list[str] = []
    table: list[dict[str, float]] = []
    for one in found:
        means: dict[str, list[float]] = {}
        for record in records(folder, "attacks", one, commands):
            if "recovery" in record:
                means.setdefault(record["attack"], []).append(100 * record["recovery"])
        names.append(f"{one['system']} ({one['configuration']})")
        table.append({attack: sum(values) / len(values) for attack, values in means.items()})
    attacks = list(dict.fromkeys(attack for row in table for attack in row))
    figure = Figure(figsize=(0.42 * len(attacks) + 3, 0.34 * len(names) + 2))
    axes: Axes = figure.subplots()
    cells = np.array([[row.get(attack, np.nan) for attack in attacks] for row in table])
    image = axes.imshow(cells, cmap="magma_r", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(attacks)), attacks, rotation=90, fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    for (row, column), value in np.ndenumerate(cells):
        if np.isfinite(value):
            axes.text(
                column, row, f"{value:.0f}", ha="center", va="center", fontsize=6, color="w" if value > 50 else "k"
            )
    figure.colorbar(image, label="mean recovery, %")
    axes.set_title("What attacks recover")
    return figure
