"""Logits of many positions, a few at a time: nothing as large as positions times vocabulary ever stands in memory.

Where the whole fits in one part the model is asked as it is. Else its layers run once without the head, and the head is
applied to some positions after others: each is then a sequence of its own above the last decoder layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from unbind_core.architecture import decoder_layers, unwrap
from unbind_core.running.recording import frozen, recording
from unbind_core.running.upper_layers import logits_above, starting_above

MOST_LOGITS = 1 << 26  # in one part: 256 MiB in float32, 440 positions of a vocabulary of 152,000


def vocabulary(model: nn.Module) -> int:
    """How many logits a position has."""
    return int(unwrap(model).config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]


def at_once(model: nn.Module, positions: int) -> bool:
    """Whether the logits of so many positions are one part."""
    return positions * vocabulary(model) <= MOST_LOGITS


def part_size(model: nn.Module) -> int:
    """Positions of one part."""
    return max(1, MOST_LOGITS // vocabulary(model))


def logits_in_parts(
    model: nn.Module,
    ids: Tensor,
    attention_mask: Tensor,
    wanted: Tensor | None,
    layer: int | None = None,
    states: Tensor | None = None,
) -> Iterator[Tensor]:
    """Logits [n,V] of the positions that are true in ``wanted`` (bool [B,T]; None: all), in their order.

    They come in parts of at most MOST_LOGITS.

    ``ids`` and ``attention_mask`` int64 [B,T]. With ``layer`` that decoder layer puts out ``states`` [B,T,d], as in
    :func:`unbind_core.running.upper_layers.logits_above`. No gradients.
    """
    if at_once(model, ids.numel()):
        if layer is None or states is None:
            with torch.no_grad(), frozen(model):
                logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
        else:
            logits = logits_above(model, ids, attention_mask, layer, states)
        yield logits.flatten(0, 1) if wanted is None else logits[wanted]
        return
    last = len(decoder_layers(model)) - 1
    if layer is None or states is None:
        states = last_states(model, ids, attention_mask)
    elif layer < last:
        with starting_above(model, layer, states):
            states = last_states(model, ids, attention_mask)
    yield from logits_of(model, states.flatten(0, 1) if wanted is None else states[wanted])


def last_states(model: nn.Module, ids: Tensor, attention_mask: Tensor) -> Tensor:
    """What the last decoder layer puts out, [B,T,d]; no gradients."""
    last = len(decoder_layers(model)) - 1
    with torch.no_grad(), frozen(model), recording(model, [last]) as states:
        unwrap(model).base_model(input_ids=ids, attention_mask=attention_mask, use_cache=False)  # type: ignore[operator]
        return states[last]


def logits_of(model: nn.Module, states: Tensor) -> Iterator[Tensor]:
    """Logits [n,V] of states [N,d] of the last decoder layer, in their order and in parts of at most MOST_LOGITS.

    Differentiable in the states where the caller has gradients enabled and each part is done with before the next.
    """
    last = len(decoder_layers(model)) - 1
    for part in states.split(part_size(model)):
        ids = torch.zeros((len(part), 1), dtype=torch.int64, device=part.device)
        yield logits_above(model, ids, torch.ones_like(ids), last, part[:, None], gradients=True)[:, 0]
