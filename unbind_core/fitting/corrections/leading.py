"""A reference brought nearer to the model that is fitted, on retained code alone, where nothing is learned of the rows to forget.

Most of what an adapter has learned are not those rows, and a model that never saw them would have the rest: so the model without
the adapter is led to what it does to retained code. And the model that is asked with the last tokens of a text alone is led to
what it says of retained code with all of it, as far as these and one of its first layers tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from unbind_core.applying.corrections import corrected
from unbind_core.architecture import decoder_layers
from unbind_core.encoding import encode
from unbind_core.errors import FittingError
from unbind_core.evaluation.replay import cache_key
from unbind_core.files import write_whole
from unbind_core.fitting.context import Context
from unbind_core.fitting.corrections.beginning import UNITS, Parts, beginning, learning
from unbind_core.fitting.corrections.learning import BATCH, TRIED, Correction
from unbind_core.fitting.corrections.objective import toward
from unbind_core.fitting.corrections.reference import Kind, Reference, last_logits
from unbind_core.fitting.corrections.states import Near, beside, last_states, states_at
from unbind_core.fitting.separation import FIRST
from unbind_core.progress import counted
from unbind_core.rows import spread
from unbind_core.running.device import SHARED_PASS, threads_for
from unbind_core.running.likelihood import divergences
from unbind_core.running.recording import frozen
from unbind_core.windows import Window

ROWS = 300  # retain rows that it is learned on
NEAR_ROWS = 150  # those by the last tokens, whose pieces are read besides
FEWEST = 24  # of these, however little effort is to be made
STEPS = 350  # of learning: twice as many bring it hardly nearer
HELD = 8  # every so-manieth of them says whether it helps


@contextmanager
def led(context: Context, reference: Reference) -> Iterator[Reference]:
    """``reference``, led if it is the model without its adapter and that brings it nearer on retained rows that it was not learned
    on. Its model is changed while the context is open, and as before then.
    """
    found = leading(context, reference)
    if reference.model is None or found is None or found[1].divergence >= found[0]:
        yield reference
        return
    before, correction = found

    def add(_layer: nn.Module, _given: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        changed = _apply(correction, states)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handle = decoder_layers(reference.model)[-1].register_forward_hook(add)
    try:
        yield replace(reference, led=(before, correction.divergence))
    finally:
        handle.remove()


def leading(context: Context, reference: Reference) -> tuple[float, Correction] | None:
    """KL(fitted ‖ reference) in nats on held rows as it is, and the correction for the reference, with what it leaves; None where
    that is one which is named, or the model itself but by its last tokens and an early layer, or there are too few retain rows.
    Kept in the context's cache: it depends on the forget rows only in that retain rows which repeat them are left out.
    """
    near = reference.near
    if (reference.kind is not Kind.BASE or reference.model is None) and (near is None or near.early is None):
        return None
    most = ROWS if near is None else NEAR_ROWS  # reading them takes most of the time
    drawn = spread(context.parts.retain_fit, max(FEWEST, round(min(1.0, context.options.effort) * most)))
    rows = [i for i in drawn if not context.holds_protected(encode(context.tokenizer, context.retain[i].text))]
    held = set(rows[::HELD])
    windows = [one for one in context.training_windows(rows) if len(one.ids) - 1 > one.start + FIRST]
    if len({one.row in held for one in windows}) < 2:
        return None
    with context.clock.stage("reference"):
        asked = reference.to_json(), near and near.early
        made_of = [(one.ids, one.start) for one in windows], asked, context.identity.fingerprint
        parameter = next(context.model.parameters())
        key = cache_key(*made_of, parameter.dtype, context.options.seed, context.options.effort)
        file = context.cache and context.cache / f"leading-{key}.safetensors"
        known = _known(file, parameter.device) if file else None
        if known is not None:
            return known
        at = [torch.arange(one.start + FIRST, len(one.ids) - 1) for one in windows]
        if near is not None and near.early is not None:
            ours, theirs = _by_last_tokens(context, near, near.early, windows, at)
        else:
            having = windows, at, context.pad, context.progress
            ours, theirs = (last_states(model, *having) for model in (context.model, reference.source(context.model)))
        sides = [
            tuple(
                torch.cat([states[i] for i, one in enumerate(windows) if (one.row in held) == of_held])
                for states in (theirs, ours)
            )
            for of_held in (False, True)
        ]
        found = _learn(context, reference.source(context.model), *sides)
        if file:
            _keep(file, *found)
        return found


def _by_last_tokens(
    context: Context, near: Near, early: int, windows: Sequence[Window], at: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """bfloat16 [n,2d] of each window by all of the text, and by its last tokens; both have the early layer's states behind."""
    last = len(decoder_layers(context.model)) - 1
    whole = states_at(context.model, windows, at, [early, last], context.pad, context.progress)
    short = near.short(context.model, windows, at, context.pad, context.progress)
    theirs = [beside(one, found[early]) for one, found in zip(short, whole, strict=True)]
    ours = [
        torch.cat((found[last], one[:, found[last].shape[1] :]), 1) for found, one in zip(whole, theirs, strict=True)
    ]
    return ours, theirs


def _learn(
    context: Context, model: nn.Module, learned_on: Sequence[Tensor], held: Sequence[Tensor]
) -> tuple[float, Correction]:
    """From last states [N,d] of ``model`` and of the one that is fitted, at the same positions; behind them there may be what is
    there on both sides, and is not changed.
    """
    generator = torch.Generator().manual_seed(context.options.seed)
    plain, fitted, device = last_logits(model), last_logits(context.model), learned_on[0].device
    width = context.model.get_output_embeddings().weight.shape[1]  # type: ignore[operator]

    def said(sides: Sequence[Tensor], places: Tensor, change: Correction | None) -> tuple[Tensor, Tensor]:
        theirs, ours = (states[places.to(device)].float() for states in sides)
        with torch.no_grad():
            wanted = log_softmax(fitted(ours[:, :width]), -1)
        return wanted, plain((theirs if change is None else _apply(change, theirs))[:, :width])

    def over(sides: Sequence[Tensor], change: Correction | None) -> float:
        parts = torch.arange(0, len(sides[0]), max(1, -(-len(sides[0]) // TRIED))).split(BATCH)
        with torch.no_grad():
            found = [divergences(*said(sides, part, change)) for part in parts]
        return float(torch.cat(found).mean())

    def left_by(parts: Parts) -> float:
        return over(learned_on, Correction(parts, 0.0, 0.0))

    ours, theirs = learned_on
    begun = beginning(ours, theirs, left_by, units=UNITS, generator=generator)
    steps = max(1, round(min(1.0, context.options.effort) * STEPS))
    parts, descent = learning(begun, learned_on[0], steps)
    correction = Correction(parts, 0.0, 0.0)
    work = BATCH * sum(parameter.numel() for parameter in model.get_output_embeddings().parameters())  # type: ignore[operator]
    with torch.enable_grad(), frozen(model), frozen(context.model):
        for _ in counted(range(steps), steps, "reference", context.progress):
            with threads_for(device, work, SHARED_PASS):
                places = torch.randint(len(learned_on[0]), (BATCH,), generator=generator)
                wanted, got = said(learned_on, places, correction)
                loss, _, gradient = toward(wanted, got.detach())
                got.backward(gradient)
                descent.step()
    if not bool(torch.isfinite(loss)):
        raise FittingError("the reference's correction is not finite; check the retain rows, or name a reference")
    before, after = (over(held, change) for change in (None, correction))
    return before, Correction(Parts(*(one.detach() for one in parts)), after, 0.0)


def _apply(correction: Correction, states: Tensor) -> Tensor:
    one = torch.ones(states.shape[:-1], device=states.device)
    return corrected(states, one, *correction.parts)


def _keep(file: Path, before: float, correction: Correction) -> None:
    tensors = {**correction.parts._asdict(), "apart": torch.tensor([before, correction.divergence])}
    write_whole(file, lambda temporary: save_file(tensors, temporary))


def _known(file: Path, device: torch.device) -> tuple[float, Correction] | None:
    """What a file holds; None where there is none or it is damaged."""
    try:
        with safe_open(file, framework="pt", device=str(device)) as opened:
            before, after = opened.get_tensor("apart").tolist()
            parts = Parts(*(opened.get_tensor(name) for name in Parts._fields))
            return before, Correction(parts, after, 0.0)
    except (OSError, SafetensorError):
        return None
