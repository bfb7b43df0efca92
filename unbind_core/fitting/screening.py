"""What a gate is found by: the states of both sides at the last layer, captured once, and detectors trained on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unbind_core.evaluation.replay import Replay
from unbind_core.fitting.context import Context
from unbind_core.fitting.network import FIRST_POSITION, Network, train_network
from unbind_core.fitting.retained import retained
from unbind_core.fitting.separation import WINDOWS, Scored, Separation, as_decided, evidence, separation
from unbind_core.progress import counted
from unbind_core.rows import retain_digest
from unbind_core.running.capture import capture_states
from unbind_core.windows import Batch, Window, batches

EARLY = 12  # tokens of a row within which its gate is to be open
Sequences = Sequence[tuple[Window, Tensor]]  # windows with their states [T,d]


class Screening:
    """The states of one fit's rows at the layer that is edited: ``forget`` and ``retain`` with what an edit is tried on,
    ``retained`` [N,d] a larger sample of retain states, ``met`` the rows in all ways to meet them, their ``own`` windows first.

    Retain rows that repeat forget rows are left out of all of it: ``left_out``, by number.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.clock = context, context.clock
        (self.layer,) = context.layers
        rest = retained(context)
        self.left_out = context.contradicting()
        # by digest in the module, whose costs beside other modules are not to be measured on these rows either
        self.contradicting = {"retain_left_out": [retain_digest(context.retain[i]) for i in self.left_out]}
        if self.left_out:
            paths = zip(rest.completions.prompts, rest.completions.references, strict=True)
            own = [i for i, (prompt, reference) in enumerate(paths) if context.holds_protected([*prompt, *reference])]
            rest = rest.without(self.left_out, own)
        self.retained = rest.states[self.layer]
        self.retain, self.completions = rest.calibration, rest.completions
        with self.clock.stage("forget states"):
            self.forget = Replay(
                context.model,
                context.forget_windows(range(len(context.forget))),
                [self.layer],
                pad=context.pad,
                stage="forget states",
                progress=context.progress,
            )
        plain = list(_sequences(self.forget, self.layer))
        self.own, self.met = len(plain), [*plain, *self._elsewhere()]

    def _elsewhere(self) -> Iterator[tuple[Window, Tensor]]:
        """The rows as they are met elsewhere: what a detector has to know."""
        context = self.context
        with self.clock.stage("rows met elsewhere"):
            every = list(batches(context.varied_windows(), context.pad, device=self.retain.device))
            for batch in counted(every, len(every), "rows met elsewhere", context.progress):
                yield from _unpadded(
                    batch, capture_states(context.model, batch, [self.layer], roughly=True)[self.layer]
                )

    def detector(self, width: int, steps: int, batch: int) -> tuple[Network, list[Separation]]:
        """A network trained on all rows against the retain states, and how far apart it puts the two sides with each window."""
        with self.clock.stage("detector"):
            parts = [(window.row, states[window.start + FIRST_POSITION : -1]) for window, states in self.met]
            network = train_network(
                torch.cat([states for _, states in parts]),
                torch.cat([torch.full((len(states),), row) for row, states in parts]),
                self.retained,
                width=width,
                steps=steps,
                batch=batch,
                seed=self.context.options.seed,
                progress=self.context.progress,
                stage=f"detector of {width}",
            )
            ours, theirs = self.scored(network), self._scored(network, self.retain)
            rate = self.context.options.limits.open_rate
            each = counted(WINDOWS, len(WINDOWS), "separation", self.context.progress)
            return network, [as_decided(separation(ours, theirs, window, rate), ours, theirs) for window in each]

    def scored(self, network: Network) -> list[Scored]:
        """The forget rows' own windows, from the position on at which their gate is to be open."""
        return [(row, min(EARLY, len(scores) - 1), scores) for row, _, scores in self._scored(network, self.forget)]

    def opens_within(self, network: Network, split: Separation, threshold: float) -> list[int | None]:
        """How many tokens of each of the rows' own windows there are before its gate opens; None where it stays shut."""
        found: list[int | None] = []
        for one in evidence(self.scored(network), split.window, split.reference):
            hits = (one.e >= threshold).nonzero()
            found.append(int(hits[0, 0]) if len(hits) else None)
        return found

    def _scored(self, network: Network, replay: Replay) -> list[Scored]:
        return [(window.row, 0, network.scores(states)) for window, states in _sequences(replay, self.layer)]


def _sequences(replay: Replay, layer: int) -> Iterator[tuple[Window, Tensor]]:
    """Every window with its states [T,d]."""
    for kept in replay.batches:
        yield from _unpadded(kept.batch, kept.states[layer])


def _unpadded(batch: Batch, states: Tensor) -> Iterator[tuple[Window, Tensor]]:
    """Every window of a batch with its states [T,d] out of [B,T,d], without the padding."""
    for window, own in zip(batch.windows, states, strict=True):
        yield window, own[: len(window.ids)]
