"""A request becomes a flight: with its text stream, its lines, its random numbers, its guard and what that holds open."""

from __future__ import annotations

import random
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from server.engine.forcing import Forcing
from server.engine.guarding import Guarding
from server.engine.lines import Lines
from server.engine.request import Delta, Flight, GenerationRequest
from server.engine.text import TextStream


def uniform_source(seed: int | None) -> Callable[[], float]:
    """Uniform numbers in [0, 1): repeatable for a seed, fresh without one."""
    return random.Random(seed).random


def flight_of(
    request: GenerationRequest,
    tokenizer: PreTrainedTokenizerBase,
    ends: frozenset[int],
    deliver: Callable[[Delta], None],
) -> Flight:
    """``ends``: the tokens with which the model ends an answer. ``deliver`` hears of each part of it."""
    sampling, guarding = request.sampling, None
    forcing = Forcing.of(request, tokenizer)
    if request.guards is not None:
        shows = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        guarding = Guarding(
            request.guards,
            tokenizer,
            request.prompt,
            sent=request.sent,
            cuts=bool(sampling.stop),
            shows=shows,
            readings=request.readings,
            forcing=forcing,
        )
    return Flight(
        request,
        TextStream(tokenizer, sampling.stop, sampling.min_tokens, request.shown, request.prompt),
        deliver,
        uniform_source(sampling.seed),
        ends=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else ends),
        model_ends=ends,
        lines=Lines(sampling.least_indent),
        guarding=guarding,
        forcing=forcing,
        constraint=request.grammar.begin() if request.grammar is not None else None,
    )
