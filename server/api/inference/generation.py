"""From validated bodies to running requests and back: what the routes that generate share.

Everything is submitted before the answer starts, so that refusals are proper errors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from server.api.inference.bodies.fields import DEFAULT_MAX_TOKENS
from server.api.inference.bodies.generation import GenerationBody
from server.api.inference.opening import under_modules
from server.api.inference.prompts import Prompt
from server.api.inference.report import Report
from server.api.inference.separators import refuse_separated
from server.engine.answering import TOO_MUCH
from server.engine.grammars import Grammar
from server.engine.guarding import sent_of
from server.engine.request import Delta, Flight, GenerationRequest, TokenLogprob
from server.errors import ApiError, invalid
from server.policy import OFF, Assigned, heading, labels
from server.rules import WhenOpen
from server.service import Service
from unbind_core.guard.escapes import Reading
from unbind_core.guard.sent import Sent

ITSELF = "itself"  # the owner of the server's own requests: how much of a canary's prompt is known must not show


@dataclass
class Choice:
    """One answer of a call: its request in the engine and what has come of it so far."""

    index: int
    prompt: Prompt
    flight: Flight
    deltas: asyncio.Queue[Delta]
    report: Report | None = None
    tokens: int = 0
    first_at: float | None = None
    last_at: float = 0.0
    reason: str | None = None


@dataclass
class Result:
    """A finished answer."""

    text: str = ""
    reason: str = "stop"
    ended_by: str = "eos"
    stop_reason: int | str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)


def ended_by(delta: Delta) -> str:
    """What ended an answer, by its last delta: a limit, what the request named, or the model itself."""
    return (
        "limit"
        if delta.finish_reason in ("length", "content_filter")
        else "word"
        if delta.stop_reason is not None
        else "eos"
    )


@dataclass(frozen=True)
class Asked:
    """What a route asks of its answers beside their sampling: see ``GenerationRequest``.

    ``form``: the field that asked for the grammar.
    """

    grammar: Grammar | None = None
    form: str = ""
    shown: frozenset[int] = frozenset()
    readings: tuple[Callable[[], Reading], ...] = ()


class Generation:
    """The choices of one call."""

    def __init__(
        self,
        served: Service,
        prompts: Sequence[Prompt],
        assigned: Assigned,
        charge: Callable[[int], None],
        *,
        when_open: WhenOpen,
        report: bool = False,
        told: bool = False,
        route: str = "",
        echo: bool = False,
        asked: Asked = Asked(),
        owner: str = "",
    ) -> None:
        """``told``: whether the caller may hear which guard ended an answer; ``route``: where guards' doings are counted;
        ``owner``: see ``GenerationRequest``.
        """
        self.served, self.prompts = served, prompts
        self.pinned, self.guard_set, self.labels = assigned.modules, assigned.guards, assigned.labels
        self.choices: list[Choice] = []
        self.started = time.perf_counter()
        self._report, self._told, self._route, self._echo = report, told, route, echo
        self._asked = asked
        self._owner = ITSELF if served.internal else owner
        self._when_open = when_open
        self._charge = charge  # told of every token used

    def submit(self, body: GenerationBody) -> None:
        """Submit ``body.n`` requests for each prompt, or none at all where one is refused."""
        if len(self.prompts) * body.n > (room := self.served.most_requests):
            raise invalid(f"prompt: prompts times n are over the {room} requests that this server holds", "prompt")
        for field_name, ids in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
            if any(int(token) >= self.served.vocabulary for token in ids):
                raise invalid(f"{field_name}: token ids must be from 0 to {self.served.vocabulary - 1}", field_name)
        try:
            for prompt in self.prompts:
                if not prompt.ids:
                    raise invalid("prompt: has no tokens; give at least one character", "prompt")
                refuse_separated(prompt.ids, self.served, self.pinned, body.sampling(0, 0, self._echo))
                sent = sent_of(prompt.ids, self.served.loaded.tokenizer)
                for _ in range(body.n):
                    self._submit_one(body, prompt, sent)
        except BaseException:
            self.cancel()
            raise
        if body.wanted != 0:  # an editor that warms up asks for nothing yet
            for entry in self.pinned.entries:
                if self.pinned.strengths[entry.key] > OFF:
                    self.served.telemetry.module_requests.labels(entry.module.name).inc()
        taken = sum(len(prompt.ids) for prompt in self.prompts)
        self.served.telemetry.prompt_tokens.inc(taken)
        self._charge(taken)

    def _submit_one(self, body: GenerationBody, prompt: Prompt, sent: Sent) -> None:
        index = len(self.choices)
        tokens = self._tokens(body.wanted, len(prompt.ids))
        if body.min_tokens > tokens:
            raise invalid(
                f"min_tokens: is over the {tokens} tokens that the answer may have; raise max_tokens", "min_tokens"
            )
        sampling = body.sampling(tokens, index, self._echo)
        if labels(self.pinned):
            sampling = under_modules(sampling, self._when_open, self._asked.form, self.served.markers)
        request = GenerationRequest(
            tuple(prompt.ids),
            sampling,
            self.pinned,
            report=self._report,
            strips=self._when_open != "allow",
            guards=self.guard_set,
            internal=self.served.internal,
            owner=self._owner,
            grammar=self._asked.grammar,
            shown=self._asked.shown,
            readings=self._asked.readings,
            sent=sent,
        )
        flight, deltas = self.served.engine.submit(request)
        report = None
        if self._report or (self._told and self.guard_set):
            report = Report(self.pinned, full=self._report, about=self.served.offer.guards.about)
        self.choices.append(Choice(index, prompt, flight, deltas, report))

    def _tokens(self, wanted: int | None, prompt: int) -> int:
        """How many tokens to make: what was asked for, else the default or all that fit."""
        fitting = max(1, self.served.settings.max_model_len - prompt)
        if wanted is None:
            return min(DEFAULT_MAX_TOKENS, fitting)
        return fitting if wanted < 0 else wanted

    def cancel(self) -> None:
        """Free what still runs."""
        for choice in self.choices:
            self.served.engine.cancel(choice.flight)

    async def deltas(self, choice: Choice) -> AsyncIterator[Delta]:
        """The deltas of one choice, echoed text in front of the first; raises ApiError where the engine failed it."""
        lead = choice.prompt.text if self._echo else ""
        while True:
            delta = await choice.deltas.get()
            choice.reason = delta.finish_reason
            if delta.error is not None:
                raise self._failed(delta.error)
            choice.last_at, answers = time.perf_counter(), self.served.telemetry.answers
            if choice.first_at is None and (delta.tokens or delta.finish_reason):
                choice.first_at = choice.last_at
                answers.begun(choice.flight)
                if delta.tokens:
                    self.served.telemetry.first_token.observe(choice.first_at - self.started)
            answers.went_on(choice.flight, len(delta.tokens))
            choice.tokens += len(delta.tokens)
            self.served.telemetry.generated_tokens.inc(len(delta.tokens))
            self._charge(len(delta.tokens))
            if choice.report is not None:
                choice.report.add(delta)
            if delta.guarded is not None:
                self.served.telemetry.guarded(self._route, delta.guarded)
            if delta.finish_reason is not None and delta.finish_reason != "cancelled":
                answers.ended(choice.flight, delta.finish_reason)
            yield replace(delta, text=lead + delta.text) if lead else delta
            lead = ""
            if delta.finish_reason is not None:
                return

    def _failed(self, reason: str) -> ApiError:
        """The engine dropped a request, for its own form or as the server ends, where it is worth trying elsewhere."""
        if reason.startswith(TOO_MUCH):
            return invalid(f"{self._asked.form}: {reason}", self._asked.form, "invalid_grammar")
        if self.served.ready:
            return ApiError(500, reason, code="engine_error")
        return ApiError(503, reason, code="shutting_down", headers={"Retry-After": "10"})

    async def merged(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """The deltas of all choices as they come, each with its choice."""
        if len(self.choices) == 1:  # the rule, and each hop from task to task costs as much as the rest of a token
            async for delta in self.deltas(self.choices[0]):
                yield self.choices[0], delta
            return
        arrived: asyncio.Queue[tuple[Choice, Delta] | ApiError | None] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            try:
                async for delta in self.deltas(choice):
                    arrived.put_nowait((choice, delta))
                arrived.put_nowait(None)
            except ApiError as error:
                arrived.put_nowait(error)

        pumps = [asyncio.create_task(pump(choice)) for choice in self.choices]
        try:
            left = len(pumps)
            while left:
                item = await arrived.get()
                if isinstance(item, ApiError):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()

    async def whole(self) -> list[Result]:
        """Every choice, when all are done."""

        async def one(choice: Choice) -> Result:
            result = Result()
            parts: list[str] = []
            async for delta in self.deltas(choice):
                parts.append(delta.text)
                result.tokens += delta.tokens
                result.logprobs += delta.logprobs
                result.prompt_logprobs += delta.prompt_logprobs
                if delta.finish_reason:
                    result.reason, result.ended_by = delta.finish_reason, ended_by(delta)
                    result.stop_reason = delta.stop_reason
            result.text = "".join(parts)
            return result

        return list(await asyncio.gather(*(one(choice) for choice in self.choices)))

    def usage(self) -> dict[str, Any]:
        """Token counts as the official client reads them; a prompt counts once, however many answers it gets."""
        prompt = sum(len(prompt.ids) for prompt in self.prompts)
        made = sum(choice.tokens for choice in self.choices)
        each = max(1, len(self.choices) // max(1, len(self.prompts)))
        cached = sum(choice.flight.cached_tokens for choice in self.choices[::each])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def usage_so_far(self, body: GenerationBody) -> dict[str, Any]:
        """The ``usage`` field of a chunk within a stream: null until the last, or the counts up to there."""
        if not body.include_usage or body.stream_options is None:
            return {}
        return {"usage": self.usage() if body.stream_options.continuous_usage_stats else None}

    def reported(self, choice: Choice) -> dict[str, Any]:
        """The ``unbind`` part of a finished choice, where there is something to tell."""
        told = choice.report.whole() if choice.report else {}
        return {"unbind": told} if told else {}

    @property
    def headers(self) -> dict[str, str]:
        """Which modules and guards this answer was made under."""
        return heading(self.labels)
