"""One answer from vLLM's tokens: leg after leg, as long as guards or gates have what follows asked for anew."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

from server.engine.answering import advanced, filtered, hand_over, told
from server.engine.request import Delta, Flight, TokenLogprob, withheld_logprob
from server.engine.vllm.asking import entry, parameters
from server.engine.vllm.gates import GateReports
from server.engine.vllm.model import Model


class Leg:
    """What vLLM is asked for at a time: the rest of an answer from where it stands."""

    def __init__(self, flight: Flight, name: str, digest: str, model: Model) -> None:
        """``name``: never given to another leg; ``digest`` of the request's set of modules, "" for none."""
        sampling = flight.request.sampling
        self._flight, self._name, self._model = flight, name, model
        self._asked = parameters(flight, name, digest)
        self._forced = flight.forced
        self._salt = f"{digest or 'none'}/{flight.request.owner}"
        self._watched = bool((self._asked.extra_args or {}).get("leg"))
        changes = sampling.reshapes or sampling.ignore_eos or flight.constraint is not None
        self._steers = flight.opened is None and changes

    @property
    def _reports(self) -> GateReports:
        return self._model.reports

    async def run(self) -> bool:
        """Whether the answer has ended; else what follows is to be asked for anew. Raises EngineDeadError, RuntimeError."""
        flight, came = self._flight, False
        if self._stuck():
            hand_over(flight, filtered(flight))
            return True
        if self._watched:
            self._reports.watch(self._name)
        prompt = {"prompt_token_ids": [*flight.prompt, *flight.output], "cache_salt": self._salt}
        first = not flight.begun_at
        flight.begun_at = flight.begun_at or time.monotonic()
        begins = not flight.output
        try:
            async with aclosing(self._model.generate(prompt, self._asked, self._name)) as outputs:
                try:
                    async with asyncio.timeout(self._patience if begins else None):
                        output = await anext(outputs, None)
                except TimeoutError:
                    hand_over(flight, Delta("", (), "length"))
                    return True
                if begins and output is not None and not await self._begin(output, first):
                    return False
                while output is not None:
                    came |= bool(output.outputs[0].token_ids)
                    ended = await self._read(output.outputs[0])
                    if ended is not None:
                        return ended
                    output = await anext(outputs, None)
        finally:
            self._reports.forget(self._name)
        if not came:
            raise RuntimeError("vLLM ended an answer without a token")
        return False  # it was one token's, in whose place others were barred

    def _stuck(self) -> bool:
        """Whether a guard has barred all that the answer's grammar allows."""
        flight = self._flight
        if flight.constraint is None or flight.guarding is None or not flight.barred:
            return False
        allowed = flight.constraint.allowed(or_end=flight.opened is not None)
        allowed[list(flight.barred)] = False
        if not allowed.any():
            flight.guarding.gives_up()
        return not allowed.any()

    @property
    def _patience(self) -> float | None:
        """Seconds that the prompt may take."""
        sampling = self._flight.request.sampling
        return None if sampling.warms_up else sampling.prompt_seconds or None

    async def _begin(self, output: Any, first: bool) -> bool:
        """Take in what the first output tells of the prompt; whether the leg may go on. ``first``: no other was before it, whose
        pages a later one finds.
        """
        flight = self._flight
        if first:
            flight.cached_tokens = output.num_cached_tokens or 0
            # vLLM has a queue of its own; its processes and this one read the same clock
            flight.begun_at = getattr(output.metrics, "scheduled_ts", 0.0) or flight.begun_at
        if self._watched and flight.request.watches and flight.opened is None:
            opened = (await self._reports.until(self._name, len(flight.prompt) - 1)).opened
            if opened is not None:
                flight.opens(opened)
        wanted = flight.request.sampling.prompt_logprobs
        if wanted is not None and not flight.prompt_logprobs:
            scored = [
                entry(token, found, wanted)
                for token, found in zip(flight.prompt[1:], output.prompt_logprobs[1:], strict=True)
            ]
            open_from = len(scored) if flight.opened is None else flight.opened
            shown = scored[:open_from]
            flight.prompt_logprobs += shown if flight.guarding is None else flight.guarding.shown(shown)
            flight.prompt_logprobs += [withheld_logprob(token) for token in flight.prompt[1:][open_from:]]
        return not (self._steers and flight.opened is not None)

    async def _read(self, part: Any) -> bool | None:
        """Take in new tokens. None: go on listening; else what ``run`` tells."""
        flight = self._flight
        for place, token in enumerate(part.token_ids):
            if self._watched and not await self._look(flight.length - 1):
                return False
            guarding = flight.guarding
            if guarding is not None and not guarding.lets(token, flight.text.peek(token), token in flight.ends):
                return False
            delta = advanced(flight, token, tuple(self._scored(token, part, place)))
            hand_over(flight, delta)
            if delta.finish_reason is not None:
                return True
            if flight.forced != self._forced:
                return False
        return None

    async def _look(self, position: int) -> bool:
        """Hear what gates did at the position that predicted the next token; whether that token stands."""
        flight, request = self._flight, self._flight.request
        heard = await self._reports.until(self._name, position)
        if request.report:
            values = heard.activations.get(position, {})
            flight.activations = {e.module.name: values.get(e.key, 0.0) for e in request.modules.entries}
        if request.watches and flight.opened is None and heard.opened is not None and heard.opened <= position:
            flight.opens(heard.opened)
            return not self._steers  # what the request says of logits holds no more
        return True

    def _scored(self, token: int, part: Any, place: int) -> Iterator[TokenLogprob]:
        flight, count = self._flight, self._flight.request.sampling.logprobs
        if count is None:
            return
        if flight.opened is not None:
            yield withheld_logprob(token)
        else:
            yield from told(flight, entry(token, part.logprobs[place], count))


async def prompt_read(flight: Flight) -> None:
    """Have what guards say of the prompt known, which takes a while for a long one: in a thread."""
    if (forcing := flight.forcing) is not None:
        await asyncio.to_thread(lambda: forcing.spans)


def digest_of(flight: Flight) -> str:
    """What keys and values computed for a request depend on beside its tokens; "" for no modules."""
    identity = flight.request.modules.identity
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:32] if identity else ""
