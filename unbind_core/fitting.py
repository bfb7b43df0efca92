"""Rows -> calibrated module + report: the whole method in order, with progress (paper section 4, appendix B).

rows -> partitions -> windows -> one-pass capture -> moments -> detector, axis -> gates -> search -> module
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from unbind_core.architecture import ModelIdentity, decoder_layers, identify
from unbind_core.axis import OutputAxis, output_axis
from unbind_core.bank import activation
from unbind_core.calibration import NORM_STRENGTHS, QUANTILES, STRENGTHS, Budgets, Gate, gates, strengths
from unbind_core.capture import capture, check_exactness
from unbind_core.detector import RIDGE, FisherDetector, fisher_detector
from unbind_core.errors import DataError, FittingError
from unbind_core.module import UnbindModule
from unbind_core.moments import CrossMoments, Moments
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_core.retained import retain_completions, retain_moments
from unbind_core.rows import ForgetRow, RetainRow, forget_digest, make_partitions
from unbind_core.search import Replay, Trial, search
from unbind_core.windows import (
    MAX_WINDOW,
    Window,
    available_forms,
    batches,
    forget_windows,
    pad_id,
    retain_windows,
)


@dataclass(frozen=True)
class FitOptions:
    """What can be chosen; the defaults are the paper's, with the norm-relative strengths beside its grid.

    ``layers`` None tries all; ``forms`` None takes all the tokenizer has; ``retain_limit`` rows are drawn for fitting and
    calibration together (None: all). ``full_scan`` measures every candidate's likelihood budgets, for the report alone.
    """

    layers: tuple[int, ...] | None = None
    forms: tuple[str, ...] | None = None
    seed: int = 0
    ridge: float = RIDGE
    quantiles: tuple[float, ...] = QUANTILES
    strengths: tuple[float, ...] = STRENGTHS
    norm_strengths: tuple[float, ...] = NORM_STRENGTHS
    budgets: Budgets = field(default_factory=Budgets)
    retain_limit: int | None = 600
    max_window: int = MAX_WINDOW
    full_scan: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, as the module file records them."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LayerFit:
    """What one layer's statistics gave: detector, axis, candidate gates, and the mean norm of its retain states."""

    layer: int
    detector: FisherDetector
    axis: OutputAxis
    gates: list[Gate]
    mean_norm: float


@dataclass(frozen=True)
class FitReport:
    """How a module came about. ``outcome``: "calibrated", or "ineffective" where no strength above 0 met the budgets."""

    outcome: str
    selected: dict[str, Any] | None
    scan: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    positions: dict[str, int]
    seconds: dict[str, float]
    exactness: float

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


class _Clock:
    """Seconds spent per stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - begun, 3)


def _forget_statistics(
    model: nn.Module, windows: Sequence[Window], layers: Sequence[int], pad: int, progress: ProgressCallback
) -> tuple[dict[int, Moments], dict[int, CrossMoments]]:
    device = next(model.parameters()).device
    moments: dict[int, Moments] = {}
    cross: dict[int, CrossMoments] = {}
    every = list(batches(windows, pad, device=device))
    for batch in counted(every, len(every), "forget states and gradients", progress):
        captured = capture(model, batch, layers)
        for layer, states in captured.states.items():
            moments.setdefault(layer, Moments(states.shape[1], device)).add(states)
            cross.setdefault(layer, CrossMoments(states.shape[1], device)).add(states, captured.gradients[layer])
    return moments, cross


def _layer_fits(
    model: nn.Module,
    calibration: Sequence[Window],
    forget: dict[int, Moments],
    cross: dict[int, CrossMoments],
    retain: dict[int, Moments],
    options: FitOptions,
    pad: int,
) -> list[LayerFit]:
    layers = sorted(forget)
    states: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    gradients: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for batch in batches(calibration, pad, device=next(model.parameters()).device):
        captured = capture(model, batch, layers)
        for layer in layers:
            states[layer].append(captured.states[layer])
            gradients[layer].append(captured.gradients[layer])
    fits = []
    for layer in layers:
        detector = fisher_detector(forget[layer], retain[layer], options.ridge)
        axis = output_axis(cross[layer])
        # Through the bank's own function, so that a boundary found here is the boundary at deployment.
        w, s_ref = detector.w.float()[None], torch.tensor([detector.s_ref], device=detector.w.device)
        activations = activation(torch.cat(states[layer]), w, s_ref)[:, 0]
        found = gates(axis.v0, activations, torch.cat(gradients[layer]), options.quantiles)
        fits.append(LayerFit(layer, detector, axis, found, retain[layer].mean_norm))
    return fits


def _check_options(options: FitOptions, layer_count: int) -> list[int]:
    layers = list(range(layer_count)) if options.layers is None else sorted(set(options.layers))
    for layer in layers:
        if not 0 <= layer < layer_count:
            raise DataError(f"layers: {layer} does not exist; the model has decoder layers 0 to {layer_count - 1}")
    if not layers:
        raise DataError("layers: the list is empty; leave it out to try every layer")
    if any(not 0 <= q <= 1 for q in options.quantiles) or not options.quantiles:
        raise DataError("quantiles: give at least one value between 0 and 1")
    if any(kappa < 0 for kappa in (*options.strengths, *options.norm_strengths)):
        raise DataError("strengths: must not be negative; the direction's sign is chosen by calibration")
    return layers


def fit(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[ForgetRow],
    retain: Sequence[RetainRow],
    *,
    name: str,
    retain_calibration: Sequence[RetainRow] = (),
    identity: ModelIdentity | None = None,
    options: FitOptions | None = None,
    progress: ProgressCallback = silent,
    cache: Path | None = None,
) -> tuple[UnbindModule, FitReport]:
    """Fit and calibrate one module that makes ``model`` forget the continuations of ``forget``.

    ``retain_calibration``: rows for the retain budgets that the model was not trained on, which makes honester rates;
    without them a fifth of ``retain`` is set aside. Partitions count them after ``retain``. ``identity`` (from
    :func:`unbind_core.load_model`) is computed if not given; give it where adapters were merged. ``cache`` is a folder for
    what does not depend on the forget set. The model is left as it was. Raises DataError, InsufficientRows, FittingError,
    UnsupportedArchitecture, and Cancelled where the callback raises it.

    With outcome "ineffective" the module has kappa = 0 and changes nothing: do not deploy it.
    """
    options = options or FitOptions()
    layers = _check_options(options, len(decoder_layers(model)))
    clock = _Clock()
    identity = identity or identify(model, tokenizer)
    forms = available_forms(tokenizer, options.forms)
    retain = [*retain, *retain_calibration]
    parts = make_partitions(forget, retain, options.seed, options.retain_limit, len(retain_calibration))
    pad = pad_id(tokenizer)

    def forget_part(indices: Sequence[int]) -> list[Window]:
        return forget_windows(tokenizer, forget, indices, forms, options.max_window)

    def retain_part(indices: Sequence[int]) -> list[Window]:
        return retain_windows(tokenizer, retain, indices, forms, options.max_window, options.seed)

    fit_windows, retain_fit = forget_part(parts.forget_fit), retain_part(parts.retain_fit)
    with clock.stage("self-check"):
        exactness = check_exactness(model, fit_windows[0], layers)
    with clock.stage("retain states"):
        shared = {"pad": pad, "cache": cache, "fingerprint": identity.fingerprint, "progress": progress}
        kept = retain_moments(model, retain_fit, layers, **shared)  # type: ignore[arg-type]
    with clock.stage("forget states and gradients"):
        moments, cross = _forget_statistics(model, fit_windows, layers, pad, progress)
        fits = _layer_fits(model, forget_part(parts.forget_calibration), moments, cross, kept, options, pad)
    candidates = [
        Trial(f.layer, gate, grid, kappa)
        for f in fits
        for gate in f.gates
        for grid, kappa in strengths(gate, f.mean_norm, options.strengths, options.norm_strengths)
        if kappa > 0  # kappa = 0 changes nothing and is always feasible: it is what remains when all else fails
    ]
    if not any(f.gates for f in fits):
        raise FittingError(
            "no forget-calibration position scores above the retain mean at any layer; are the rows memorised at all?"
        )
    by_layer = {f.layer: f for f in fits}

    def as_module(trial: Trial, measured: dict[str, Any] | None = None) -> UnbindModule:
        detector = by_layer[trial.layer].detector
        return UnbindModule(
            name=name, layer=trial.layer, w=detector.w.float().cpu(), v=trial.gate.v.cpu(), s_ref=detector.s_ref,
            tau=trial.gate.tau, kappa=trial.kappa, quantile=trial.gate.quantile, model=identity, forms=forms,
            partitions={key: tuple(rows) for key, rows in parts.to_json().items()}, budgets=asdict(options.budgets),
            measured=measured or {}, forget_digest=forget_digest(forget), settings=options.to_json(),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"), versions=_versions(),
        )  # fmt: skip

    with clock.stage("calibration states"):
        forget_replay = Replay(model, forget_part(parts.forget_validation), layers, pad=pad)
        retain_replay = Replay(model, retain_part(parts.retain_calibration), layers, pad=pad)
    with clock.stage("retain completions"):
        completions = retain_completions(
            model, tokenizer, retain, parts.retain_calibration, layers, cache, identity.fingerprint, progress
        )
    with clock.stage("search"):
        best = search(
            candidates, as_module, forget_replay, retain_replay, completions, options.budgets,
            full_scan=options.full_scan, progress=progress,
        )  # fmt: skip
    usable = next(f for f in fits if f.gates)
    chosen = best or Trial(usable.layer, usable.gates[0], "paper", 0.0, verdict="ineffective")
    report = FitReport(
        outcome="calibrated" if best else "ineffective",
        selected=best.to_json() if best else None,
        scan=[trial.to_json() for trial in candidates],
        layers=[
            {
                "layer": f.layer,
                "eigenvalue": f.axis.eigenvalue,
                "eigenvalue_gap": f.axis.gap,
                "mean_norm": f.mean_norm,
                "s_ref": f.detector.s_ref,
            }
            for f in fits
        ],
        positions={
            "forget_fit": moments[layers[0]].count,
            "retain_fit": kept[layers[0]].count,
            "forget_validation": forget_replay.count,
            "retain_calibration": retain_replay.count,
        },
        seconds=clock.seconds,
        exactness=exactness,
    )
    return as_module(chosen, {**chosen.to_json(), "positions": report.positions}), report


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
