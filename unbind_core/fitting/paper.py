"""The paper's module: Fisher detector, eigenvector axis, and the (layer, quantile, strength) search (section 4, appendix B).

rows -> partitions -> windows -> one-pass capture -> moments -> detector, axis -> gates -> search -> module
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unbind_core.applying.gates import activation
from unbind_core.errors import FittingError
from unbind_core.evaluation.completions import retain_completions
from unbind_core.evaluation.replay import Replay, retain_replay
from unbind_core.fitting.calibration import Gate, gates, strengths
from unbind_core.fitting.context import Context
from unbind_core.fitting.moments import CrossMoments, FisherDetector, Moments, OutputAxis, fisher_detector, output_axis
from unbind_core.fitting.options import FitOptions, FitReport, Outcome
from unbind_core.fitting.retained import retain_moments
from unbind_core.fitting.search import Candidate, search
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback, counted
from unbind_core.running.capture import capture
from unbind_core.running.shape import Shape
from unbind_core.windows import Window, batches


@dataclass(frozen=True)
class LayerFit:
    """What one layer's statistics gave: detector, axis, candidate gates, and the mean norm of its retain states."""

    layer: int
    detector: FisherDetector
    axis: OutputAxis
    gates: list[Gate]
    mean_norm: float


def forget_statistics(
    model: nn.Module, windows: Sequence[Window], layers: Sequence[int], pad: int, progress: ProgressCallback
) -> tuple[dict[int, Moments], dict[int, CrossMoments]]:
    """Moments of the forget states of every layer, and sums of their products with the gradients."""
    device = next(model.parameters()).device
    moments: dict[int, Moments] = {}
    cross: dict[int, CrossMoments] = {}
    every = list(batches(windows, pad, tokens=Shape.of(model).gradient_tokens, device=device))
    for batch in counted(every, len(every), "forget states and gradients", progress):
        one = capture(model, batch, layers)
        for layer, states in one.states.items():
            moments.setdefault(layer, Moments(states.shape[1], device)).add(states)
            cross.setdefault(layer, CrossMoments(states.shape[1], device)).add(states, one.gradients[layer])
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
    device = next(model.parameters()).device
    for batch in batches(calibration, pad, tokens=Shape.of(model).gradient_tokens, device=device):
        one = capture(model, batch, layers)
        for layer in layers:
            states[layer].append(one.states[layer])
            gradients[layer].append(one.gradients[layer])
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


def fit_paper(context: Context) -> tuple[UnbindModule, FitReport]:
    """Exactly the paper's module, within the budgets, by the paper's rule. With outcome "ineffective" kappa is 0."""
    model, layers, options, parts, pad = context.model, context.layers, context.options, context.parts, context.pad
    clock, progress = context.clock, context.progress
    retain_fit = context.retain_windows(parts.retain_fit)
    with clock.stage("retain states"):
        kept = retain_moments(
            model,
            retain_fit,
            layers,
            pad=pad,
            cache=context.cache,
            fingerprint=context.identity.fingerprint,
            progress=progress,
        )
    with clock.stage("forget states and gradients"):
        moments, cross = forget_statistics(model, context.forget_windows(parts.forget_fit), layers, pad, progress)
        fits = _layer_fits(model, context.forget_windows(parts.forget_calibration), moments, cross, kept, options, pad)
    candidates = [
        Candidate(f.layer, gate, grid, kappa)
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

    def as_module(candidate: Candidate, measured: dict[str, Any] | None = None) -> UnbindModule:
        detector = by_layer[candidate.layer].detector
        return context.module(
            layer=candidate.layer,
            w=detector.w.float().cpu(),
            v=candidate.gate.v.cpu(),
            s_ref=detector.s_ref,
            tau=candidate.gate.tau,
            kappa=candidate.kappa,
            quantile=candidate.gate.quantile,
            measured=measured or {},
        )

    with clock.stage("calibration states"):
        forget_replay = Replay(model, context.forget_windows(parts.forget_validation), layers, pad=pad)
        calibration = context.retain_windows(parts.retain_calibration)
        shared = {"pad": pad, "cache": context.cache, "fingerprint": context.identity.fingerprint}
        retain = retain_replay(model, calibration, layers, progress=progress, **shared)  # type: ignore[arg-type]
    with clock.stage("retain completions"):
        completions = retain_completions(
            model,
            context.tokenizer,
            context.retain,
            parts.retain_calibration,
            layers,
            context.cache,
            context.identity.fingerprint,
            progress,
        )
    with clock.stage("search"):
        best = search(
            candidates,
            as_module,
            forget_replay,
            retain,
            completions,
            options.limits,
            full_scan=options.full_scan,
            progress=progress,
        )
    usable = next(f for f in fits if f.gates)
    chosen = best or Candidate(usable.layer, usable.gates[0], "paper", 0.0, verdict="ineffective")
    report = FitReport(
        outcome=Outcome.CALIBRATED if best else Outcome.INEFFECTIVE,
        selected=best.to_json() if best else None,
        scan=[candidate.to_json() for candidate in candidates],
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
            "retain_calibration": retain.count,
        },
        seconds=clock.seconds,
        memory=clock.memory,
        exactness=context.exactness,
    )
    return as_module(chosen, {**chosen.to_json(), "positions": report.positions}), report
