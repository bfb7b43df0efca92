"""A request as spans, by OpenTelemetry's conventions for generative AI: itself, policy, and of each answer queue, prefill, decode.

They are made when the request has ended, from times that were kept anyway. No text of a client is in them: no prompt, no answer,
no key, and not the model's name as the client wrote it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from server.exporting.otel import Tracing, Value, epoch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.engine.request import Flight

log = logging.getLogger("unbind.tracing")
TRACE_KEY = "unbind.trace"  # where the middleware leaves the trace of a request
CHAT = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
MOST_CHOICES = 16  # answers of a call that have spans of their own
MOST_LABELS = 64


class Choice(Protocol):
    """One answer, as far as spans tell of it."""

    flight: Flight
    tokens: int
    last_at: float
    reason: str | None


class Generation(Protocol):
    """The answers of a call."""

    started: float

    @property
    def choices(self) -> Sequence[Choice]:
        """One each."""

    def usage(self) -> dict[str, Any]:
        """Token counts."""

    @property
    def labels(self) -> tuple[str, ...]:
        """What was applied."""


@dataclass
class RequestTrace:
    """One request. The routes add what they know of it: when policy was asked (``time.perf_counter``), and its answers."""

    tracing: Tracing
    traceparent: str | None
    host: str
    model: str
    begun: int
    policy: tuple[float, float] | None = None
    generation: Generation | None = None

    def end(self, route: str, status: int, request_id: str) -> None:
        """Hand the spans over; whatever goes wrong with them is not the request's."""
        try:
            self._end(route, status, request_id)
        except Exception:
            log.exception("a request's spans could not be made")

    def _end(self, route: str, status: int, request_id: str) -> None:
        operation = "chat" if route in CHAT else "text_completion"
        told: dict[str, Value] = {
            "http.request.method": "POST",
            "http.route": route,
            "http.response.status_code": status,
            "server.address": self.host,
            "unbind.request_id": request_id,
        }
        reasons: list[str] = []
        if (made := self.generation) is not None:
            usage = made.usage()
            reasons = [choice.reason or "cancelled" for choice in made.choices]
            told |= {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "unbind",
                "gen_ai.request.model": self.model,
                "gen_ai.response.model": self.model,
                "gen_ai.usage.input_tokens": usage["prompt_tokens"],
                "gen_ai.usage.output_tokens": usage["completion_tokens"],
                "gen_ai.response.finish_reasons": tuple(reasons),
                "unbind.modules": made.labels[:MOST_LABELS],
            }
        error = str(status) if status >= 400 else "engine_error" if "error" in reasons else ""
        name = f"{operation} {self.model}" if made is not None else f"POST {route}"
        within = self.tracing.following(self.traceparent)
        span = self.tracing.span(name, self.begun, time.time_ns(), told, within=within, serves=True, error=error)
        if self.policy is not None:
            asked, answered = map(epoch, self.policy)
            self.tracing.span("policy", asked, answered, {}, within=span)
        for number, choice in enumerate(made.choices[:MOST_CHOICES] if made is not None else ()):
            self._answer(span, made.started if made else 0.0, number, choice)

    def _answer(self, span: Any, submitted: float, number: int, choice: Choice) -> None:
        flight, now = choice.flight, time.perf_counter()
        about: dict[str, Value] = {"unbind.choice": number}
        ended = choice.last_at or now
        begun, first = flight.begun_at or ended, flight.first_at or ended
        parts: list[tuple[str, float, float, dict[str, Value]]] = [("queue", submitted, begun, {})]
        if flight.begun_at:
            parts.append(("prefill", begun, first, {"unbind.cached_tokens": flight.cached_tokens}))
        if flight.first_at:
            parts.append(("decode", first, ended, {"gen_ai.usage.output_tokens": choice.tokens}))
        for name, start, end, more in parts:
            self.tracing.span(name, epoch(start), epoch(end), about | more, within=span)
