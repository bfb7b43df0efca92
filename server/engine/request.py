"""What a caller asks of the engine, what it gets back, and the engine's own record of a request in flight.

API -> ``GenerationRequest`` -> ``Flight`` (scheduler, runner, sampler) -> ``Delta``s back to the API.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from server.engine.lines import Lines
from server.engine.pinned import NOTHING, PinnedSet
from unbind_core.guard.book import GuardSet
from unbind_core.guard.sent import Sent

if TYPE_CHECKING:
    from server.engine.forcing import Forcing
    from server.engine.grammars import Constraint, Grammar
    from server.engine.guarding import Guarded, Guarding
    from server.engine.text import TextStream
    from unbind_core.applying.passes import Forced
    from unbind_core.guard.escapes import Reading

FinishReason = Literal["stop", "length", "content_filter", "cancelled", "error"]


class Status(StrEnum):
    """Where a request is. Only the scheduler changes it."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedy at temperature 0; without a seed every call draws its own numbers.

    ``top_k`` 0, ``min_p`` 0 and ``top_p`` 1 leave out nothing; penalties of 0 (repetition: 1) change nothing.
    ``max_tokens`` 0 computes the prompt alone. ``logprobs`` and ``prompt_logprobs``: None for none, else the number of
    alternatives to list beside each token; they are of the model's own distribution, before penalties and temperature.

    ``stop_token_ids`` end the answer as the model's own end tokens do; among the first ``min_tokens`` none of either is chosen,
    and no stop string ends the answer. ``prompt_seconds`` bounds the prompt's computing and ``predict_seconds`` the time from
    the first token on, once a line has ended (0: no bound); ``least_indent``: see ``Lines``. All three end it as a length does.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[()] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    prompt_seconds: float = 0.0
    predict_seconds: float = 0.0
    least_indent: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @cached_property
    def reshapes(self) -> bool:
        """Whether logits change before anything is chosen."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(self.logit_bias or penalties or self.min_tokens)

    @cached_property
    def greedy(self) -> bool:
        """Whether the token is the model's likeliest, and nothing else need be looked at."""
        return self.temperature <= 0 and not self.reshapes

    @cached_property
    def asks(self) -> bool:
        """Whether log-probabilities are read or the choice of tokens is steered: what ``GenerationRequest.strips`` concerns."""
        return self.logprobs is not None or self.prompt_logprobs is not None or self.reshapes or self.ignore_eos

    @property
    def warms_up(self) -> bool:
        """Whether nothing is asked for but that the prompt be known: it stays out of what is counted of the gates."""
        return self.max_tokens == 0 and self.prompt_logprobs is None


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its natural-log probability under the model, and the likeliest tokens in its place, best first.

    ``rank``: 1 for the likeliest token of all. ``logprob`` None: withheld, and so is everything but the token itself.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


def withheld_logprob(token: int) -> TokenLogprob:
    """A token of which nothing else is told."""
    return TokenLogprob(token, None, rank=0)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue. ``modules`` stays as it was pinned, whatever is loaded or unloaded meanwhile.

    ``report`` asks for each position's gate activations beside the text. ``strips``: from the first position at which a gate
    that acts is open, to the end of the answer, log-probabilities are withheld and nothing steers the choice of tokens.
    ``guards``: whose runs the answer must not hold. ``internal``: it is the server's own, and no client's. ``owner``: who asks;
    what was computed for one is never taken over for another, as how much that is tells what the other sent.
    ``grammar``: what it must look like; it is heeded while a gate is open, and the model may then end the answer all the same.
    ``shown``: special tokens that its text spells. ``readings``: begin those in which guards follow it as well.
    ``sent``: the prompt as its guards read it, once for all requests that have the same.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    modules: PinnedSet = NOTHING
    report: bool = False
    strips: bool = False
    guards: GuardSet | None = None
    internal: bool = False
    owner: str = ""
    grammar: Grammar | None = None
    shown: frozenset[int] = frozenset()
    readings: tuple[Callable[[], Reading], ...] = ()
    sent: Sent | None = None

    @cached_property
    def packed(self) -> array[int]:
        """The prompt as numbers in a row, which compare much faster than objects."""
        return array("q", self.prompt)

    @cached_property
    def quiet(self) -> bool:
        """Whether it stays out of what is counted of the gates."""
        return self.internal or self.sampling.warms_up

    @cached_property
    def watches(self) -> bool:
        """Whether it matters to this request where its gates open."""
        asks = self.sampling.asks or self.grammar is not None
        return self.strips and asks and any(self.modules.strengths.values())


@dataclass(frozen=True)
class Delta:
    """One step's worth of answer, or a few steps'. ``error`` is set where the engine failed the request (finish_reason "error").

    ``logprobs`` has one entry for each of ``tokens`` where the request asked for them; ``prompt_logprobs`` comes with
    the first delta, None at the first position, which nothing predicts.
    ``activations``: module -> activation behind its open gate (0: closed), one entry for each token, if the request asked for
    a report. A token that ends the answer is among ``tokens`` and has no text. ``stop_reason``: the stop string or the one of
    ``stop_token_ids`` that ended it, None where that was the model's own end. ``guarded``: with the last delta, what guards did.
    """

    text: str
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    activations: tuple[Mapping[str, float], ...] = ()
    stop_reason: int | str | None = None
    guarded: Guarded | None = None

    def then(self, later: Delta) -> Delta:
        """This part and the one after it as one."""
        return Delta(
            self.text + later.text,
            self.tokens + later.tokens,
            later.finish_reason,
            later.error,
            self.logprobs + later.logprobs,
            self.prompt_logprobs + later.prompt_logprobs,
            self.activations + later.activations,
            later.stop_reason,
            later.guarded,
        )


@dataclass(eq=False)
class Flight:
    """A request in the engine. ``computed`` counts the positions whose keys and values are in the slot.

    ``cached_tokens``: prompt positions taken over from an earlier request, known from admission on.
    ``opened``: the first position at which a gate that acts was open, where the request watches for it.
    """

    request: GenerationRequest
    text: TextStream
    deliver: Callable[[Delta], None]
    draw: Callable[[], float]  # uniform [0, 1) from the request's own generator
    status: Status = Status.WAITING
    slot: int = -1
    admitted: int = -1  # on the scheduler's clock
    computed: int = 0
    cached_tokens: int = 0
    output: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    activations: Mapping[str, float] = field(default_factory=dict)  # at the newest position, where a report is wanted
    cancelled: bool = False
    ends: frozenset[int] = frozenset()  # tokens that end this answer
    model_ends: frozenset[int] = frozenset()  # those of them that ``ignore_eos`` leaves out while no gate is open
    opened: int | None = None
    lines: Lines = field(default_factory=Lines)
    guarding: Guarding | None = None
    forcing: Forcing | None = None
    serial: int = field(default_factory=itertools.count().__next__)  # no other flight's
    submitted_at: float = field(default_factory=time.monotonic)
    constraint: Constraint | None = None
    begun_at: float = 0.0  # when its prompt was first computed on, by time.monotonic; 0: not yet
    first_at: float = 0.0  # when its first token was chosen
    last_at: float = 0.0  # when its newest was
    gaps: deque[float] = field(default_factory=deque)  # seconds between tokens, for whoever takes them

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self.request.prompt

    def opens(self, position: int) -> None:
        """A gate is open at this position, and at none before: from here on the answer ends where the model ends it."""
        self.opened = position
        self.ends |= self.model_ends

    @property
    def steered(self) -> bool:
        """Whether what the request says of logits holds for the next token."""
        return self.request.sampling.reshapes and self.opened is None

    @property
    def forced(self) -> tuple[Forced, ...]:
        """Where its gates are open whatever their detectors say, as far as that is known."""
        return self.forcing.spans if self.forcing is not None else ()

    @property
    def barred(self) -> Sequence[int]:
        """Tokens that a guard does not let follow here."""
        return self.guarding.barred if self.guarding is not None else ()

    @property
    def settled(self) -> int | None:
        """How much of its prompt others may take over whatever guards find in it; None where nothing is read for a guard."""
        return self.forcing.settled if self.forcing is not None else None

    @property
    def length(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def last_token(self) -> int:
        """The newest token: the decode step's input."""
        return self.output[-1] if self.output else self.request.prompt[-1]
