"""The choice among gates: from the simplest to the richest, the first that forgets within the budgets (``gate="auto"``).

Levels: the paper's linear gate where it can tell the rows apart; a network with one head a row over a window of positions, with
one threshold, then with a lower one to close, then wider. What each reached is in the report. Strength is the least that
reaches the target: what is gained by more is paid for wherever a gate opens by mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from unbind_core.axis import constrained_axis, gradient_axis, output_axis
from unbind_core.capture import capture_states
from unbind_core.detector import fisher_detector
from unbind_core.errors import FittingError
from unbind_core.gates import activation
from unbind_core.judging import Forgot, Judge
from unbind_core.module import UnbindModule
from unbind_core.moments import CrossMoments, Moments
from unbind_core.network import (
    BATCH,
    FIRST_POSITION,
    WINDOWS,
    Network,
    Separation,
    evidence,
    separation,
    train_network,
)
from unbind_core.options import FitReport
from unbind_core.paper import fit_paper
from unbind_core.preparation import Preparation
from unbind_core.progress import Progress, counted
from unbind_core.replay import gradients_above
from unbind_core.retained import retain_completions, retain_replay, retain_states
from unbind_core.rows import make_partitions, retain_digest, spread
from unbind_core.strength import Search
from unbind_core.trials import Replay, RetainCompletions
from unbind_core.windows import Batch, Window, batches

MOST_LAYERS = 8  # a deep model's upper layers are much alike
SCREEN_WIDTH, SCREEN_STEPS, SCREEN_BATCH = 64, 120, 1024
SCREEN_TIE = 0.1  # margins so close, relative, are a tie
Sequences = Sequence[tuple[Window, Tensor]]  # windows with their states [T,d]
# tau_close / tau: one threshold, a little lower, nearly a latch; and how dear each is, in steps of the opening threshold
CLOSING = {1.0: 0, 0.9: 1, 0.5: 3}
LINEAR_COVERAGE = 0.9  # a linear gate that covers less of the forget positions cannot reach the target
GRADIENT_ROWS = 60
FEW = 150  # rows, up to which a narrower network and fewer states a step do


@dataclass(frozen=True)
class Retained:
    """What ``gate="auto"`` needs of the retain rows alone: the layers that are tried, a sample of the states there with the row
    that each is of, the calibration windows with theirs, and the unedited completions.
    """

    layers: list[int]
    states: dict[int, Tensor]
    rows: Tensor
    calibration: Replay
    completions: RetainCompletions

    def without(self, rows: Sequence[int], completions: Sequence[int]) -> Retained:
        """The same without some retain rows, and without the completions at some places. Takes the states over: the last ones
        move to where those were that go, as copying a gigabyte to be rid of a few takes seconds.
        """
        stay = torch.isin(self.rows, torch.tensor(rows), invert=True)
        count = int(stay.sum())
        gone, moved = (~stay[:count]).nonzero()[:, 0], count + stay[count:].nonzero()[:, 0]
        for part in (*self.states.values(), self.rows):
            part[gone.to(part.device)] = part[moved.to(part.device)]
        states = {layer: part[:count] for layer, part in self.states.items()}
        return Retained(
            self.layers,
            states,
            self.rows[:count],
            self.calibration.without(rows),
            self.completions.without(completions),
        )


def retained(given: Preparation) -> Retained:
    """From the cache where it is known; nothing of it depends on the forget rows."""
    layers, fingerprint = spread(given.layers, MOST_LAYERS), given.identity.fingerprint
    with given.clock.stage("retain states"):
        states, rows = retain_states(
            given.model, given.alternating_windows(given.parts.retain_fit), layers, pad=given.pad,
            limit_bytes=given.options.state_bytes, cache=given.cache, fingerprint=fingerprint, progress=given.progress,
        )  # fmt: skip
    with given.clock.stage("calibration states"):
        windows = given.retain_windows(given.parts.retain_calibration)
        calibration = retain_replay(
            given.model, windows, layers, pad=given.pad, cache=given.cache, fingerprint=fingerprint
        )
    with given.clock.stage("retain completions"):
        completions = retain_completions(
            given.model, given.tokenizer, given.retain, given.parts.retain_calibration, layers, given.cache, fingerprint,
            given.progress,
        )  # fmt: skip
    return Retained(layers, states, rows, calibration, completions)


class _Auto:
    """One run: what is captured once, and the trials on it."""

    def __init__(self, given: Preparation) -> None:
        self.given, self.clock = given, given.clock
        self.budgets, self.target = given.options.limits, given.options.target
        self.every = range(len(given.forget))
        self.levels: list[dict[str, Any]] = []
        self._capture()

    def _capture(self) -> None:
        given = self.given
        kept = retained(given)
        self.left_out = given.contradicting()
        # by digest in the module, whose costs beside other modules are not to be measured on these rows either
        self.contradicting = {"retain_left_out": [retain_digest(given.retain[i]) for i in self.left_out]}
        if self.left_out:
            paths = zip(kept.completions.prompts, kept.completions.references, strict=True)
            own = [i for i, (prompt, reference) in enumerate(paths) if given.holds_protected([*prompt, *reference])]
            kept = kept.without(self.left_out, own)
        self.layers = layers = kept.layers
        self.retained, self.retain = kept.states, kept.calibration
        with self.clock.stage("forget states"):
            self.forget = Replay(
                given.model, given.forget_windows(self.every), layers, pad=given.pad, stage="forget states",
                progress=given.progress,
            )  # fmt: skip
        with self.clock.stage("rows before"):
            self.judge = Judge(given, kept.calibration, kept.completions, self.forget)
        self.search = Search(self.judge, self.budgets, self.target, self.clock, self.every)

    # The levels.

    def linear(self) -> tuple[UnbindModule, FitReport] | None:
        """The paper's gate, where at the budgeted opening rate it covers enough of the forget positions to have a chance."""
        best = (0.0, -1)
        with self.clock.stage("linear screen"):
            for layer in self.layers:
                retain = self._retain_moments(layer)
                detector = fisher_detector(self._forget_moments(layer), retain, self.given.options.ridge)
                w, s_ref = detector.w.float()[None], torch.tensor([detector.s_ref], device=self.retain.device)
                theirs = torch.cat([activation(states, w, s_ref)[:, 0] for _, states in _sequences(self.retain, layer)])
                allowed = max(1, round(self.budgets.open_rate * len(theirs)))
                tau = theirs.topk(allowed).values[-1]
                ours = torch.cat(
                    [
                        activation(states[window.first_target - 1 :], w, s_ref)[:, 0]
                        for window, states in _sequences(self.forget, layer)
                    ]
                )
                best = max(best, (float((ours > tau).float().mean()), layer))
        coverage, layer = best
        level: dict[str, Any] = {"gate": "paper", "layer": layer, "coverage": round(coverage, 4)}
        self.levels.append(level)
        few = len(self.every) < 3
        if coverage < LINEAR_COVERAGE or few:
            level["verdict"] = (
                "fewer than 3 rows cannot be split as the paper does" if few else
                f"at the budgeted opening rate it opens on {coverage:.0%} of the forget positions; {LINEAR_COVERAGE:.0%} are needed"
            )  # fmt: skip
            return None
        options = replace(self.given.options, gate="paper", budgets=self.budgets)
        # the paper's gate keeps rows back for calibration and validation
        held = make_partitions(self.given.forget, self.given.retain, options.seed)
        parts = replace(
            self.given.parts, forget_fit=held.forget_fit, forget_calibration=held.forget_calibration,
            forget_validation=held.forget_validation,
            retain_fit=tuple(i for i in self.given.parts.retain_fit if i not in self.left_out),
            retain_calibration=tuple(i for i in self.given.parts.retain_calibration if i not in self.left_out),
        )  # fmt: skip
        module, report = fit_paper(replace(self.given, options=options, parts=parts))
        if report.outcome != "calibrated":
            level["verdict"] = "no strength within the budgets"
            return None
        cost, forgot = self.judge.cost(module), self.judge.forgot(module, self.every)
        level |= {"cost": asdict(cost), "forgot": asdict(forgot)}
        if cost.within(self.budgets) and forgot.reaches(self.target):
            level["verdict"] = "chosen"
            return module, report
        level["verdict"] = "misses the target" if cost.within(self.budgets) else "over budget"
        return None

    def _retain_moments(self, layer: int) -> Moments:
        """From a sample of the kept states that is ample for a covariance."""
        states = self.retained[layer]
        moments = Moments(states.shape[1], self.retain.device)
        moments.add(states[:: max(1, len(states) // (64 * states.shape[1]))])
        return moments

    def _forget_moments(self, layer: int) -> Moments:
        moments: Moments | None = None
        for window, states in _sequences(self.forget, layer):
            moments = moments or Moments(states.shape[1], states.device)
            moments.add(states[window.first_target - 1 : -1])
        assert moments is not None  # a fit has rows
        return moments

    def best_layer(self) -> tuple[int, list[dict[str, Any]]]:
        """The layer at which a small network tells forget from retain rows best, and what each layer gave.

        Of layers that are as good the last, where an update does most: a network trained so briefly does not tell them apart.
        """
        found = []
        with self.clock.stage("layer screen"):
            for layer in self.layers:
                rows = list(_sequences(self.forget, layer))
                network = self._train(rows, layer, SCREEN_WIDTH, SCREEN_STEPS, f"screening layer {layer}", SCREEN_BATCH)
                (split,) = self._separations(network, rows, layer, WINDOWS[1:2])
                found.append({"layer": layer, **split.to_json()})
        least = max(one["margin"] for one in found)
        least -= SCREEN_TIE * abs(least)
        return max(int(one["layer"]) for one in found if one["margin"] >= least), found

    def embedded(self, layer: int) -> Sequences:
        """The rows as they are and as they are met elsewhere: what a detector has to know."""
        given = self.given
        found = list(_sequences(self.forget, layer))
        with self.clock.stage("embedded rows"):
            every = list(batches(given.embedded_windows(), given.pad, device=self.retain.device))
            for batch in counted(every, len(every), "embedded rows", given.progress):
                found += _unpadded(batch, capture_states(given.model, batch, [layer], roughly=True)[layer])
        return found

    def _train(self, forget: Sequences, layer: int, width: int, steps: int, stage: str, batch: int) -> Network:
        parts = [
            (window.row, states[min(window.start + FIRST_POSITION, window.first_target - 1) : -1])
            for window, states in forget
        ]
        rows = torch.cat([torch.full((len(states),), row) for row, states in parts])
        states = torch.cat([states for _, states in parts])
        return train_network(
            states, rows, self.retained[layer], width=width, steps=steps, batch=batch, seed=self.given.options.seed,
            progress=self.given.progress, stage=stage,
        )  # fmt: skip

    def _separations(self, network: Network, forget: Sequences, layer: int, windows: Sequence[int]) -> list[Separation]:
        ours, theirs = (
            [(one.row, one.first_target - 1, network.scores(states)) for one, states in of]
            for of in (forget, _sequences(self.retain, layer))
        )
        rate = self.budgets.open_rate
        return [separation(evidence(ours, width), evidence(theirs, width), width, rate) for width in windows]

    def axes(self, layer: int) -> dict[str, Tensor]:
        """Candidate output axes FP32 [d], each pointing so that subtracting it raises the loss.

        The mean gradient first: on the demo model the text under it ends, where under the others it goes round in circles.
        """
        given, retain = self.given, self._retain_moments(layer)
        with self.clock.stage("gradients"):
            some = self.forget.without(set(self.every).difference(spread(self.every, GRADIENT_ROWS)))
            cross = CrossMoments(given.identity.hidden_size, self.forget.device)
            for kept in counted(some.kept, len(some.kept), "gradients", given.progress):
                gradients = gradients_above(given.model, kept.batch, layer, kept.states[layer])
                cross.add(kept.states[layer][kept.batch.predictors], gradients)
        eigen = output_axis(cross).v0
        eigen = eigen if float(cross.gradient @ eigen) < 0 else -eigen
        found = {
            "gradient": gradient_axis(cross),
            "paper": eigen,
            "constrained": constrained_axis(cross, retain, given.options.ridge),
        }
        return {name: (axis / axis.norm()).float().cpu() for name, axis in found.items()}

    def network(
        self, rows: Sequences, layer: int, width: int
    ) -> Iterator[tuple[UnbindModule, Forgot | None, dict[str, Any]]]:
        """Modules of one network, for each window and pair of thresholds, at the least strength that reaches the target: with the
        first axis, and with the others where that one left least.
        """
        steps = network_steps(len(self.every))
        with self.clock.stage("detector"):
            net = self._train(rows, layer, width, steps, f"detector of {width}", network_batch(len(self.every)))
            splits = self._separations(net, rows, layer, WINDOWS)
        norm = float(self.retained[layer].float().norm(dim=1).mean())
        tensors = {
            "w": net.w.cpu(), "b": net.b.cpu(), "heads": net.heads.cpu(), "heads_b": net.heads_b.cpu(),
        }  # fmt: skip

        def module(axis: Tensor, split: Separation, threshold: float, closing: float, strength: float) -> UnbindModule:
            tau = threshold - split.reference
            return self.given.module(
                layer=layer, detector="network", v=axis, s_ref=split.reference, tau=tau, kappa=strength * norm,
                tau_close=None if closing == 1 else closing * tau, window=split.window, quantile=None, measured={}, **tensors,
            )  # fmt: skip

        # A gate that stays open costs most where it opens by mistake, a lower threshold opens it there more often: both come last.
        ways = sorted(
            (
                (number + dear, number, -split.margin, split, threshold, closing)
                for split in splits
                for number, threshold in enumerate(split.thresholds)
                for closing, dear in CLOSING.items()
            ),
            key=lambda way: way[:3],
        )
        for name, axis in self.axes(layer).items():
            left = []
            for *_, split, threshold, closing in ways:
                level: dict[str, Any] = {
                    "gate": "network", "layer": layer, "width": width, "steps": steps, "axis": name, "tau": threshold,
                    "tau_close": closing, "separation": split.to_json(),
                }  # fmt: skip
                self.levels.append(level)
                found = self.search.least(partial(module, axis, split, threshold, closing), level)
                self.given.progress(Progress("gates", len(self.levels), len(self.levels), str(level["verdict"])))
                yield found
                left.append(inf if found[1] is None else found[1].left)
            ways = [ways[left.index(min(left))]]  # what another axis changes is not when a gate opens


def network_steps(rows: int) -> int:
    """Training steps for so many heads: what they took on the demo model to tell their rows apart."""
    return 375 + 18 * rows if rows <= FEW else min(4000, 250 + 12 * rows)


def network_batch(rows: int) -> int:
    """States a step: for few heads more steps do more than more states, for many it was not so."""
    return BATCH if rows <= FEW else 2 * BATCH


def network_widths(rows: int) -> tuple[int, ...]:
    """Hidden widths to try, the smaller first."""
    return (128, 512) if rows <= 32 else (256, 512) if rows <= FEW else (512,)


def fit_auto(given: Preparation) -> tuple[UnbindModule, FitReport]:
    """The first of the levels that reaches the target within the budgets; else the best within the budgets, outcome "short".

    Outcome "ineffective", with kappa 0, where no level has any strength within the budgets.
    """
    run = _Auto(given)
    if (plain := run.linear()) is not None:
        module, report = plain
        return replace(module, measured={**module.measured, **run.contradicting}), replace(
            report, levels=run.levels, seconds=run.clock.seconds, retain_rows_left_out=run.left_out
        )
    layer, screened = run.best_layer()
    best: tuple[float, UnbindModule, dict[str, Any]] | None = None
    last: UnbindModule | None = None
    rows = run.embedded(layer)
    for width in network_widths(len(run.every)):
        for module, forgot, level in run.network(rows, layer, width):
            last = module
            if forgot is None:
                continue
            if best is None or forgot.left < best[0]:
                best = (forgot.left, module, level)
            if level["verdict"] == "chosen":
                return _finish(run, module, level, "calibrated", screened)
    if best is not None:
        left = run.judge.forgot(best[1], run.every, thorough=True)
        best[2].update(forgot=asdict(left), verdict="chosen: the best within the budgets")
        return _finish(run, best[1], best[2], "short", screened)
    if last is None:
        raise FittingError("no layer's states could be told apart; are the rows memorised at all?")
    return _finish(run, replace(last, kappa=0.0), run.levels[-1], "ineffective", screened)


def _finish(
    run: _Auto, module: UnbindModule, level: dict[str, Any], outcome: str, screened: list[dict[str, Any]]
) -> tuple[UnbindModule, FitReport]:
    """The module with what was measured, and the report."""
    positions = {
        "forget": run.forget.count,
        "retain_fit": len(run.retained[module.layer]),
        "retain_calibration": run.retain.count,
    }
    measured = {
        **{key: value for key, value in level.items() if key != "verdict"},
        "positions": positions,
        **run.contradicting,
    }
    report = FitReport(
        outcome=outcome,
        selected=None if outcome == "ineffective" else level,
        scan=[],
        layers=screened,
        positions=positions,
        seconds=run.clock.seconds,
        exactness=run.given.exactness,
        gate="network",
        levels=run.levels,
        retain_rows_left_out=run.left_out,
    )
    return replace(module, measured=measured), report


def _sequences(replay: Replay, layer: int) -> Iterator[tuple[Window, Tensor]]:
    """Every window with its states [T,d]."""
    for kept in replay.kept:
        yield from _unpadded(kept.batch, kept.states[layer])


def _unpadded(batch: Batch, states: Tensor) -> Iterator[tuple[Window, Tensor]]:
    """Every window of a batch with its states [T,d] out of [B,T,d], without the padding."""
    for window, own in zip(batch.windows, states, strict=True):
        yield window, own[: len(window.ids)]
