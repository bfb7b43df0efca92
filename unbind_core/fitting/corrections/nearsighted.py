"""A reference for a model that has none but itself: the model asked with the last few tokens of the text alone.

They say what comes next, and hardly whose text it is: of a row that the model has memorised they leave it about as sure as a model
is that never saw the row. What they do not say, as whether a docstring is open, one of the model's first layers does, which has all
of the text and is not where a row is known; how both together tell what comes next is learned on retained code (``leading.py``,
and docs/experiments.md, "The last tokens, and one of the first layers").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unbind_core.architecture import decoder_layers
from unbind_core.encoding import beginning
from unbind_core.evaluation.replay import Replay
from unbind_core.fitting.context import Context
from unbind_core.fitting.corrections.leading import leading
from unbind_core.fitting.corrections.reference import PART, Reference
from unbind_core.fitting.corrections.states import Met, Near
from unbind_core.rows import spread

TOKENS = 4  # more of them give rows away where a model was trained on the code that it is compared with
READ = 2  # tokens that the model goes through for each position by so many, some of which share a piece of the text
ASKED = 48  # windows in which a row is met that say what it gives away, spread over the rows and the ways


def near_by(context: Context, tokens: int = TOKENS) -> Near:
    """The context's model by so many last tokens, and a layer before the middle of its layers, where that is not the last."""
    early = (len(decoder_layers(context.model)) - 1) // 2
    return Near(tokens, tuple(beginning(context.tokenizer)), early if early < context.layers[0] else None)


def nearsighted(
    context: Context, reference: Reference, near: Near, met: Sequence[Met], retained: Replay
) -> Reference | None:
    """``reference`` as it is ``near``, led to what the model says of retained code with all of the text; as it is, where that is no
    nearer, or leaves the rows' own next tokens, where they are ``met``, more of the mass than ordinary code's have with all of the
    text (``retained``); None where that leaves them more, too.
    """
    plain = replace(reference, near=near)
    led, found = [], leading(context, plain)
    if found is not None and found[1].divergence < found[0]:
        led = [replace(plain, near=replace(near, parts=found[1].parts), led=(found[0], found[1].divergence))]
    with context.clock.stage("reference"):
        ordinary = float(torch.cat([kept.nll.float() for kept in retained.batches]).neg().exp().mean())
        asked = [met[i] for i in spread(range(len(met)), ASKED)]
        return next((each for each in (*led, plain) if _mass(context, each, asked) <= ordinary), None)


def _mass(context: Context, reference: Reference, asked: Sequence[Met]) -> float:
    """What the reference gives the rows' own next tokens of the mass, on average."""
    assert reference.near is not None
    states = torch.cat(reference.near.states(context.model, asked, context.pad, context.progress))
    own = torch.cat([torch.tensor(one.window.ids)[one.at + 1] for one in asked])
    said, parts = reference.log_probabilities(context.model), own.to(states.device).split(PART)
    each = zip(states.split(PART), parts, strict=True)
    return sum(_likely(said(some.float(), own), own) for some, own in each) / len(states)


def _likely(said: Tensor, own: Tensor) -> float:
    return float(said.gather(1, own[:, None]).exp().sum())
