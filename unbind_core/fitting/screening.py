"""What a gate is found by: the states of both sides at the last layer, captured once, and detectors trained on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unbind_core.evaluation.replay import Replay
from unbind_core.fitting.context import Context
from unbind_core.fitting.corrections.reference import Reference
from unbind_core.fitting.corrections.states import Met, met_part
from unbind_core.fitting.network import Network, train_network
from unbind_core.fitting.retained import contradicting_paths, retained
from unbind_core.fitting.separation import EARLY, FIRST, WINDOWS, Scored, Separation, alike, as_decided, separation
from unbind_core.progress import counted
from unbind_core.rows import retain_digest, spread
from unbind_core.running.capture import capture_states
from unbind_core.running.generation import Sampling, complete
from unbind_core.windows import Batch, Window, batches, forget_prompt, with_room

# Tokens of a continuation by the reference, and prompts that are continued at most, spread over the rows.
CONTINUED, MOST_CONTINUED = 64, 160
MOST_MET = 4 << 30  # bytes of states of rows met elsewhere; of more every so-manieth position of each window


class Screening:
    """The states of one fit's rows at the layer that is edited: ``forget`` and ``retain`` with what an edit is tried on,
    ``retained`` [N,d] a larger sample of retain states, ``met`` states of the rows in all ways to meet them, their ``own`` windows
    first, with those of an ``early`` layer where one is named.

    Retain rows that repeat forget rows are left out of all of it: ``left_out``, by number. ``alike``: those among the rows which
    choose that the detector has learned too, as each is nearly a forget row.
    """

    def __init__(self, context: Context, early: int | None = None) -> None:
        self.context, self.clock, self.early = context, context.clock, early
        (self.layer,) = context.layers
        self.left_out, self.alike = context.contradicting(), list[int]()
        rest = retained(context)
        # by digest in the module, whose costs beside other modules are not to be measured on these rows either
        self.contradicting = {"retain_left_out": [retain_digest(context.retain[i]) for i in self.left_out]}
        if self.left_out:
            rest = rest.without(self.left_out, contradicting_paths(context, rest.completions))
        self.retained = rest.states
        self.retain, self.completions = rest.calibration, rest.completions
        with self.clock.stage("forget states"):
            self.forget = forget_states(context, [] if early is None else [early])
        plain = [one for kept in self.forget.batches for one in self._met(kept.batch, kept.states)]
        self.own, self.met = len(plain), [*plain, *self._elsewhere()]

    def _elsewhere(self) -> Iterator[Met]:
        """The rows as they are met elsewhere: what a detector has to know."""
        context = self.context
        with self.clock.stage("rows met elsewhere"):
            windows = context.varied_windows()
            every = list(batches(windows, context.pad, device=self.retain.device))
            one, layers = self.forget.bytes_of(1), self.forget.layers
            step = max(1, -(-sum(len(window.ids) - window.start for window in windows) * one // MOST_MET))
            count = 0
            for batch in counted(every, len(every), "rows met elsewhere", context.progress):
                found = capture_states(context.model, batch, layers, roughly=True)
                yield from self._met(batch, found, step, count)
                count += len(batch.windows)

    def _met(self, batch: Batch, states: Mapping[int, Tensor], step: int = 1, count: int = 0) -> Iterator[Met]:
        """The row's part of every window of a batch, out of states [B,T,d] by layer; ``count`` windows came before."""
        for place, (window, own) in enumerate(_unpadded(batch, states[self.layer])):
            early = None if self.early is None else states[self.early][place, : len(window.ids)]
            yield met_part(window, own, step, (count + place) % step, early)

    def continued(self, reference: Reference) -> list[Met]:
        """What the reference writes in place of the rows, greedily and once more by chance, behind their own prompts: where a gate
        that has opened stays open for a while. Nothing where the model is its own reference, which writes the rows.
        """
        context, tokenizer = self.context, self.context.tokenizer
        if reference.model is None:
            return []
        every = [
            (i, form) for form in context.forms for i in range(len(context.forget))
        ]  # so that some are of all forms
        asked = [every[i] for i in spread(range(len(every)), MOST_CONTINUED)]
        prompts = [forget_prompt(tokenizer, context.forget[i], form)[0] for i, form in asked]
        prompts = with_room(context.model, prompts, CONTINUED + 1)  # and one that ends it
        end, windows = tokenizer.eos_token_id, list[Window]()
        for temperature in (0.0, 1.0):
            outputs = complete(
                reference.source(context.model),
                prompts,
                Sampling(CONTINUED, temperature, seed=context.options.seed),
                pad=context.pad,
                end=end,
                stage="continuations",
                progress=context.progress,
            )
            for (number, form), prompt, ids in zip(asked, prompts, outputs, strict=True):
                ended = [] if end is None or len(ids) == CONTINUED else [end]
                start = max(0, len(prompt) - 1 - FIRST)
                windows.append(Window((*prompt, *ids, *ended), len(prompt), number, form, start))
        found = list[Met]()
        for batch in batches(windows, context.pad, device=self.retain.device):
            states = capture_states(context.model, batch, [self.layer], roughly=True)[self.layer]
            parts = [met_part(window, own) for window, own in _unpadded(batch, states)]
            # a view would keep the prompts' states too
            found += [replace(one, states=one.states.clone()) for one in parts]
        return found

    def detector(
        self, width: int, steps: int, batch: int
    ) -> tuple[Network, list[Separation], list[Scored], list[Scored]]:
        """A network trained on all rows against the retain states, how far apart it puts the two sides with each window, and the
        scores of the rows' own windows, from the position on at which their gate is to be open, and of the retain rows.
        """
        with self.clock.stage("detector"):
            how, stage = {"width": width, "steps": steps, "batch": batch}, f"detector of {width}"
            network, ours, theirs, splits = self._trained(stage, **how)
            self.alike = alike(splits, ours, theirs, self.context.options.limits.open_rate)
            if self.alike:
                more = [one for window, one in _sequences(self.retain, self.layer) if window.row in self.alike]
                network, ours, theirs, splits = self._trained(f"{stage}, again", **how, more=torch.cat(more))
            each = counted(splits, len(splits), "separation", self.context.progress)
            splits = [as_decided(split, ours, theirs) for split in each]
            if self.alike:  # what is left of the rows to choose by says too little of others that are alike
                splits = [replace(split, retained=max(split.retained, split.highest)) for split in splits]
            return network, splits, ours, theirs

    def _trained(self, stage: str, **how: Any) -> tuple[Network, list[Scored], list[Scored], list[Separation]]:
        network = train_network(
            torch.cat([one.states for one in self.met]),
            torch.cat([torch.full((len(one.states),), one.window.row) for one in self.met]),
            self.retained,
            seed=self.context.options.seed,
            progress=self.context.progress,
            stage=stage,
            **how,
        )
        ours, theirs = (self._scored(network, replay) for replay in (self.forget, self.retain))
        ours = [(row, min(EARLY, len(scores) - 1), scores) for row, _, scores in ours]
        rate = self.context.options.limits.open_rate
        return network, ours, theirs, [separation(ours, theirs, window, rate) for window in WINDOWS]

    def scored_parts(self, network: Network) -> list[Scored]:
        """The scores of the rows' parts of all windows in which they are met, from where on what is averaged lies in the part."""
        whole = (one for one in self.met if len(one.at) < 2 or one.at[1] - one.at[0] == 1)
        return [(one.window.row, max(WINDOWS), network.scores(one.states)) for one in whole]

    def _scored(self, network: Network, replay: Replay) -> list[Scored]:
        return [(window.row, 0, network.scores(states)) for window, states in _sequences(replay, self.layer)]


def forget_states(context: Context, more: Sequence[int] = ()) -> Replay:
    """The rows to forget, as they are, with their states at the layer that is edited, and at ``more`` layers."""
    every = context.forget_windows(range(len(context.forget)))
    stage, progress = "forget states", context.progress
    return Replay(context.model, every, [*context.layers, *more], pad=context.pad, stage=stage, progress=progress)


def _sequences(replay: Replay, layer: int) -> Iterator[tuple[Window, Tensor]]:
    """Every window with its states [T,d]."""
    for kept in replay.batches:
        yield from _unpadded(kept.batch, kept.states[layer])


def _unpadded(batch: Batch, states: Tensor) -> Iterator[tuple[Window, Tensor]]:
    """Every window of a batch with its states [T,d] out of [B,T,d], without the padding."""
    for window, own in zip(batch.windows, states, strict=True):
        yield window, own[: len(window.ids)]
