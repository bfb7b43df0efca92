"""What a new token does to an answer, whichever engine chose it: text, stops, lines, log-probabilities, guards, and the end."""

from __future__ import annotations

import logging
import time
from typing import Any

from transformers import PreTrainedTokenizerBase

from server.engine.request import Delta, FinishReason, Flight, TokenLogprob
from unbind_core.encoding import fim_end

log = logging.getLogger("unbind.engine")
TOO_MUCH = "the answer's grammar was too much for it"


def advanced(flight: Flight, token: int, scored: tuple[TokenLogprob, ...] = ()) -> Delta:
    """Append ``token``, which its guard let pass, to the answer; what is to be handed over, ``finish_reason`` where it ends.

    ``scored``: the token's log-probability where the request asks. Nothing is appended where the guard ends the answer, or where
    the request wants no token.
    """
    sampling, first, guarding = flight.request.sampling, not flight.output, flight.guarding
    if guarding is not None and guarding.blocked is not None:
        return filtered(flight)
    prompt = _of_prompt(flight)
    if sampling.max_tokens == 0:
        return Delta("", (), "length", prompt_logprobs=prompt)
    if (constraint := flight.constraint) is not None:
        constraint.take(token)
        if constraint.failed and not (token in flight.ends and flight.opened is not None):
            return Delta("", (), "error", f"{TOO_MUCH}: {constraint.failed}")
    flight.output.append(token)
    if flight.forcing is not None:
        flight.forcing.take(token, flight.length - 1)
    now = time.monotonic()
    if first:
        flight.first_at = now
    else:
        flight.gaps.append(now - flight.last_at)
    flight.last_at = now
    text, reason, stopped_by = _read(flight, token)
    gates = (flight.activations,) if flight.request.report else ()
    return Delta(text, (token,), reason, None, scored, prompt, gates, stopped_by)


def filtered(flight: Flight) -> Delta:
    """The end of an answer that its guard does not let go on."""
    return Delta("", (), "content_filter", prompt_logprobs=_of_prompt(flight))


def _of_prompt(flight: Flight) -> tuple[TokenLogprob | None, ...]:
    """What the first part of the answer tells of the prompt."""
    wanted = flight.request.sampling.prompt_logprobs is not None and not flight.output
    return (None, *flight.prompt_logprobs) if wanted else ()


def hand_over(flight: Flight, delta: Delta) -> None:
    """Give the listener a part of the answer, or its end, as far as the guard does not withhold it."""
    guarding = flight.guarding
    if guarding is None:
        flight.deliver(delta)
    elif delta.finish_reason is not None:
        flight.deliver(guarding.last(delta))
    elif (passed := guarding.passed(delta)) is not None:
        flight.deliver(passed)


def hand_over_end(flight: Flight, delta: Delta) -> None:
    """Give the listener the end of the answer, whatever comes of it: else it would wait for ever."""
    try:
        hand_over(flight, delta)
    except BaseException as error:  # its guard cannot say what may be sent: nothing, and nobody else ends by it
        log.exception("the end of an answer could not be handed over")
        flight.deliver(Delta("", (), "error", delta.error or dropped(error)))


def dropped(error: BaseException) -> str:
    """Why one answer ended, for whoever waits for it."""
    return f"the answer could not go on ({type(error).__name__}); the request was dropped"


def told(flight: Flight, entry: TokenLogprob) -> tuple[TokenLogprob, ...]:
    """The entry of a token as its guard lets it be told."""
    return (entry,) if flight.guarding is None else tuple(flight.guarding.shown([entry]))


def _read(flight: Flight, token: int) -> tuple[str, FinishReason | None, int | str | None]:
    """The text that a new token makes certain, whether and how the answer ends with it, and the ``stop_reason``."""
    sampling = flight.request.sampling
    if token in flight.ends:  # asked before the length: what ends with its last token has ended
        text, _ = flight.lines.take(flight.text.flush())
        return text, "stop", token if token in sampling.stop_token_ids else None
    new, stop = flight.text.push(token)
    text, unindented = flight.lines.take(new)
    if unindented:
        return text, "length", None
    if stop:
        return text, "stop", stop
    if flight.constraint is not None and flight.constraint.ended:
        rest, _ = flight.lines.take(flight.text.flush())
        return text + rest, "stop", None
    late = sampling.predict_seconds and time.monotonic() - flight.first_at > sampling.predict_seconds
    if len(flight.output) < sampling.max_tokens and not (late and flight.lines.any_ended):
        return text, None, None
    rest, _ = flight.lines.take(flight.text.flush())
    return text + rest, "length", None


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer: the generation settings', as plain ``generate`` takes them, and the tokenizer's. CodeLlama's own
    end of a filled gap stands in neither: past it a model writes on, and as texts leave the token out no client could stop there.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id, fim_end(tokenizer)] if i is not None)
