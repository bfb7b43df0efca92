"""What the choice among gates goes by: the states of both sides, captured once, and what they say of layers, detectors and axes.

``auto.py`` chooses; here is what can be known of a layer or a detector without trying an edit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unbind_core.applying.gates import activation
from unbind_core.evaluation.replay import Replay
from unbind_core.fitting.axes import constrained_axis, gradient_axis, output_axis
from unbind_core.fitting.context import Context
from unbind_core.fitting.fisher import fisher_detector
from unbind_core.fitting.moments import CrossMoments, Moments
from unbind_core.fitting.network import FIRST_POSITION, Network, train_network
from unbind_core.fitting.retained import (
    retained,
)
from unbind_core.fitting.separation import WINDOWS, Separation, as_decided, evidence, separation
from unbind_core.progress import counted
from unbind_core.rows import retain_digest, spread
from unbind_core.running.capture import capture_states
from unbind_core.running.upper_layers import gradients_above
from unbind_core.windows import Batch, Window, batches

SCREEN_WIDTH, SCREEN_STEPS, SCREEN_BATCH = 64, 120, 1024
SCREEN_TIE = 0.1  # margins so close, relative, are a tie
GRADIENT_ROWS = 60
Sequences = Sequence[tuple[Window, Tensor]]  # windows with their states [T,d]


class Screening:
    """The states of one fit's rows at the layers that are tried: ``forget`` and ``retain`` with what an edit is tried on,
    ``retained`` a larger sample of retain states by layer.

    Retain rows that repeat forget rows are left out of all of it: ``left_out``, by number.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.clock = context, context.clock
        self.every = range(len(context.forget))
        rest = retained(context)
        self.left_out = context.contradicting()
        # by digest in the module, whose costs beside other modules are not to be measured on these rows either
        self.contradicting = {"retain_left_out": [retain_digest(context.retain[i]) for i in self.left_out]}
        if self.left_out:
            paths = zip(rest.completions.prompts, rest.completions.references, strict=True)
            own = [i for i, (prompt, reference) in enumerate(paths) if context.holds_protected([*prompt, *reference])]
            rest = rest.without(self.left_out, own)
        self.layers, self.retained = rest.layers, rest.states
        self.retain, self.completions = rest.calibration, rest.completions
        with self.clock.stage("forget states"):
            self.forget = Replay(
                context.model,
                context.forget_windows(self.every),
                self.layers,
                pad=context.pad,
                stage="forget states",
                progress=context.progress,
            )

    def linear_coverage(self) -> tuple[float, int]:
        """The largest share of forget positions that a layer's linear gate opens on at the budgeted opening rate; that layer."""
        best = (0.0, -1)
        with self.clock.stage("linear screen"):
            for layer in counted(self.layers, len(self.layers), "linear screen", self.context.progress):
                retain = self._retain_moments(layer)
                detector = fisher_detector(self._forget_moments(layer), retain, self.context.options.ridge)
                w, s_ref = detector.w.float()[None], torch.tensor([detector.s_ref], device=self.retain.device)
                theirs = torch.cat([activation(states, w, s_ref)[:, 0] for _, states in _sequences(self.retain, layer)])
                allowed = max(1, round(self.context.options.limits.open_rate * len(theirs)))
                tau = theirs.topk(allowed).values[-1]
                ours = torch.cat(
                    [
                        activation(states[window.first_target - 1 :], w, s_ref)[:, 0]
                        for window, states in _sequences(self.forget, layer)
                    ]
                )
                best = max(best, (float((ours > tau).float().mean()), layer))
        return best

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
        context = self.context
        found = list(_sequences(self.forget, layer))
        with self.clock.stage("embedded rows"):
            every = list(batches(context.embedded_windows(), context.pad, device=self.retain.device))
            for batch in counted(every, len(every), "embedded rows", context.progress):
                found += _unpadded(batch, capture_states(context.model, batch, [layer], roughly=True)[layer])
        return found

    def detector(
        self, rows: Sequences, layer: int, width: int, steps: int, batch: int
    ) -> tuple[Network, list[Separation]]:
        """A network trained on ``rows`` against the retain states, and how far apart it puts the two sides with each window."""
        with self.clock.stage("detector"):
            network = self._train(rows, layer, width, steps, f"detector of {width}", batch)
            return network, self._separations(network, rows, layer, WINDOWS, served=True)

    def retain_norm(self, layer: int) -> float:
        """The mean norm of a retain state."""
        return float(self.retained[layer].float().norm(dim=1).mean())

    def axes(self, layer: int) -> dict[str, Tensor]:
        """Candidate output axes FP32 [d], each pointing so that subtracting it raises the loss.

        The mean gradient first: on the demo model the text under it ends, where under the others it goes round in circles.
        """
        context, retain = self.context, self._retain_moments(layer)
        with self.clock.stage("gradients"):
            some = self.forget.without(set(self.every).difference(spread(self.every, GRADIENT_ROWS)))
            cross = CrossMoments(context.identity.hidden_size, self.forget.device)
            for kept in counted(some.batches, len(some.batches), "gradients", context.progress):
                gradients = gradients_above(context.model, kept.batch, layer, kept.states[layer])
                cross.add(kept.states[layer][kept.batch.predictors], gradients)
        eigen = output_axis(cross).v0
        eigen = eigen if float(cross.gradient @ eigen) < 0 else -eigen
        found = {
            "gradient": gradient_axis(cross),
            "paper": eigen,
            "constrained": constrained_axis(cross, retain, context.options.ridge),
        }
        return {name: (axis / axis.norm()).float().cpu() for name, axis in found.items()}

    def _train(self, forget: Sequences, layer: int, width: int, steps: int, stage: str, batch: int) -> Network:
        parts = [
            (window.row, states[min(window.start + FIRST_POSITION, window.first_target - 1) : -1])
            for window, states in forget
        ]
        rows = torch.cat([torch.full((len(states),), row) for row, states in parts])
        states = torch.cat([states for _, states in parts])
        return train_network(
            states,
            rows,
            self.retained[layer],
            width=width,
            steps=steps,
            batch=batch,
            seed=self.context.options.seed,
            progress=self.context.progress,
            stage=stage,
        )

    def _separations(
        self, network: Network, forget: Sequences, layer: int, windows: Sequence[int], served: bool = False
    ) -> list[Separation]:
        """What each window gives; ``served``: with thresholds through the arithmetic of the gate that is served."""
        ours, theirs = (
            [(one.row, one.first_target - 1, network.scores(states)) for one, states in of]
            for of in (forget, _sequences(self.retain, layer))
        )
        rate, found = self.context.options.limits.open_rate, []
        for width in counted(windows, len(windows), "separation", self.context.progress):
            split = separation(evidence(ours, width), evidence(theirs, width), width, rate)
            found.append(as_decided(split, ours, theirs) if served else split)
        return found

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


def _sequences(replay: Replay, layer: int) -> Iterator[tuple[Window, Tensor]]:
    """Every window with its states [T,d]."""
    for kept in replay.batches:
        yield from _unpadded(kept.batch, kept.states[layer])


def _unpadded(batch: Batch, states: Tensor) -> Iterator[tuple[Window, Tensor]]:
    """Every window of a batch with its states [T,d] out of [B,T,d], without the padding."""
    for window, own in zip(batch.windows, states, strict=True):
        yield window, own[: len(window.ids)]
