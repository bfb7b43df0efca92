"""Logits -> one token for each row, and log-probabilities where they are asked for.

Each request draws one uniform number a token from its own generator, and each row is computed from itself alone, so a
seed gives the same answer whatever else is in the batch. Greedy rows without penalties cost one argmax for all.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from server.engine.grammars import narrow
from server.engine.request import Flight, TokenLogprob


def sample(logits: Tensor, flights: Sequence[Flight]) -> tuple[list[int], list[bool]]:
    """Token of each row and whether the row was finite; ``logits`` [B,V] stay as they are."""
    tokens = logits.argmax(dim=-1, keepdim=True)  # the place of a NaN where there is one, so it checks the row as well
    chosen, sound = tokens[:, 0].tolist(), logits.gather(1, tokens)[:, 0].isfinite().tolist()
    special = [
        i
        for i, f in enumerate(flights)
        if sound[i]
        and (f.barred or f.constraint is not None or (not f.request.sampling.greedy and (_hot(f) or f.steered)))
    ]
    if not special:
        return chosen, sound
    rows = logits[special].float()
    picked = [flights[i] for i in special]
    for row, flight in zip(rows, picked, strict=True):
        if flight.steered:
            _reshape(row, flight)
        _bind(row, flight)
    for i, token in zip(special, rows.argmax(dim=-1).tolist(), strict=True):
        chosen[i] = token
    hot = [i for i, flight in enumerate(picked) if _hot(flight)]
    if hot:
        for i, token in zip(hot, _draw(rows[hot], [picked[i] for i in hot]), strict=True):
            chosen[special[i]] = token
    return chosen, sound


def choose(logits: Tensor, flights: list[Flight]) -> tuple[list[int], list[bool]]:
    """As ``sample``, with tokens that guards let pass; a flight that is ``blocked`` then has one that must not be published."""
    tokens, sound = sample(logits, flights)
    asked = [i for i, flight in enumerate(flights) if flight.guarding is not None and sound[i]]
    while asked := [i for i in asked if not _stands(flights[i], tokens[i])]:
        again, _ = sample(logits[torch.tensor(asked)], [flights[i] for i in asked])
        for i, token in zip(asked, again, strict=True):
            tokens[i] = token
    return tokens, sound


def _bind(row: Tensor, flight: Flight) -> None:
    """What may not follow at all, on one row [V] in place: what the grammar forbids and what guards have barred."""
    if flight.constraint is not None:
        narrow(row, flight.constraint.allowed(or_end=flight.opened is not None))
    if flight.barred:
        row[torch.tensor(flight.barred, device=row.device)] = -torch.inf
        if flight.guarding is not None and not row.isfinite().any():
            flight.guarding.gives_up()


def _stands(flight: Flight, token: int) -> bool:
    assert flight.guarding is not None
    return flight.guarding.lets(token, flight.text.peek(token), token in flight.ends)


def _hot(flight: Flight) -> bool:
    return flight.request.sampling.temperature > 0


def _reshape(row: Tensor, flight: Flight) -> None:
    """Penalties, bias and what is barred, on one row [V] in place.

    Repetition divides a positive logit of any token seen, prompt included, and multiplies a negative one; presence and
    frequency are subtracted for tokens of the answer, once and per occurrence; the bias is added last. Whatever it is, nothing
    that ends the answer is chosen before ``min_tokens``.
    """
    sampling, output = flight.request.sampling, flight.output
    if sampling.repetition_penalty != 1:
        # One that comes again is written as often, the same each time: telling them apart takes a long prompt milliseconds.
        seen = torch.frombuffer(flight.request.packed + array("q", output), dtype=torch.int64).to(row.device)
        value = row[seen]
        factor = sampling.repetition_penalty
        row[seen] = torch.where(value > 0, value / factor, value * factor)
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(output)
        seen = torch.tensor(list(counts), device=row.device)
        often = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[seen] -= sampling.presence_penalty + sampling.frequency_penalty * often
    if bias := dict(sampling.logit_bias):
        row[torch.tensor(list(bias), device=row.device)] += torch.tensor(
            list(bias.values()), dtype=row.dtype, device=row.device
        )
    if len(output) < sampling.min_tokens and flight.ends:
        row[torch.tensor(sorted(flight.ends), device=row.device)] = -torch.inf


def _draw(logits: Tensor, flights: Sequence[Flight]) -> list[int]:
    """Inverse transform over what top_k, top_p and min_p leave, likeliest first; ``logits`` float32 [B,V].

    Order: temperature, top_k, then top_p of the mass that top_k leaves, and min_p as a share of the likeliest token.
    """
    samplings = [flight.request.sampling for flight in flights]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    temperature = column([sampling.temperature for sampling in samplings])
    shifted = (logits - logits.max(dim=-1, keepdim=True).values).double()  # first: a tiny temperature would overflow
    probabilities, order = torch.softmax(shifted / temperature, dim=-1).sort(dim=-1, descending=True, stable=True)
    top_k = column([sampling.top_k or logits.shape[1] for sampling in samplings])
    probabilities *= torch.arange(logits.shape[1], device=logits.device) < top_k
    mass = probabilities.cumsum(dim=-1)
    # a token stays while the mass before it is short of top_p
    probabilities *= (mass - probabilities) < column([sampling.top_p for sampling in samplings]) * mass[:, -1:]
    probabilities *= probabilities >= column([sampling.min_p for sampling in samplings]) * probabilities[:, :1]
    mass = probabilities.cumsum(dim=-1)
    uniform = column([flight.draw() for flight in flights])
    index = (mass <= uniform * mass[:, -1:]).sum(dim=-1)
    last = ((probabilities > 0).sum(dim=-1) - 1).clamp_(min=0)  # extreme parameters can leave no token any mass
    tokens: list[int] = order.gather(1, torch.minimum(index, last)[:, None])[:, 0].tolist()
    return tokens


def logprobs(logits: Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """Log-probability of each row's token under the model itself, before penalties and temperature; ``logits`` [B,V]."""
    scores = torch.log_softmax(logits.float(), dim=-1)
    chosen = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])
    ranks = (scores > chosen).sum(dim=-1) + 1
    values, ids = scores.topk(min(alternatives, scores.shape[1]), dim=-1)
    columns = tokens, chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist()
    return [
        TokenLogprob(token, value, tuple(zip(row_ids, row_values, strict=True)), rank)
        for token, value, rank, row_ids, row_values in zip(*columns, strict=True)
    ]
