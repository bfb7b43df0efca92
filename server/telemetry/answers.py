"""How long answers took and how long they were, by their flights through the engine."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from server.engine.request import FinishReason, Flight
from server.telemetry.vllm_names import VllmNames

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
SIZES = ((0, "0"), (1, "1"), (4, "2-4"), (16, "5-16"))  # numbers of modules, up to and with each
MORE = "17+"


def size_of(modules: int) -> str:
    """A number of modules as a label."""
    return next((label for most, label in SIZES if modules <= most), MORE)


class Answers:
    """Times and lengths of answers; the event loop observes them, as deltas arrive."""

    def __init__(self, registry: CollectorRegistry, detail: bool) -> None:
        """``detail``: histograms too; else counters alone."""
        self.other_names: VllmNames | None = None
        self._queried = Counter(
            "unbind_prefix_queried_tokens", "Prompt tokens that were looked for in kept prefixes", registry=registry
        )
        self._reused = Counter(
            "unbind_prefix_reused_tokens", "Prompt tokens taken from a kept prefix, and not computed", registry=registry
        )
        self._detail = detail
        if not detail:
            return

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._queue = histogram("unbind_queue_seconds", "Time from admission to the first work on the prompt", SECONDS)
        self._prefill = histogram("unbind_prefill_seconds", "Time from there to the first token", SECONDS)
        self._decode = histogram("unbind_decode_seconds", "Time from the first token to the last", SECONDS)
        self._inter_token = histogram("unbind_inter_token_seconds", "Time from token to token", TOKEN_SECONDS)
        decode_token = histogram(
            "unbind_decode_token_seconds",
            "Mean time from token to token of an answer, by the number of modules that it was made under",
            TOKEN_SECONDS,
            ("modules",),
        )
        self._decode_token = {label: decode_token.labels(label) for label in (*dict(SIZES).values(), MORE)}
        self._prompt_length = histogram("unbind_prompt_length_tokens", "Length of a prompt", TOKENS)
        self._answer_length = histogram("unbind_answer_length_tokens", "Length of a finished answer", TOKENS)

    def begun(self, flight: Flight) -> None:
        """The first part of an answer has come."""
        self._queried.inc(len(flight.prompt))
        self._reused.inc(flight.cached_tokens)
        if self.other_names is not None:
            self.other_names.begun(flight)
        if not self._detail:
            return
        self._prompt_length.observe(len(flight.prompt))
        if flight.begun_at:
            self._queue.observe(max(0.0, flight.begun_at - flight.submitted_at))
        if flight.begun_at and flight.first_at:
            self._prefill.observe(max(0.0, flight.first_at - flight.begun_at))

    def went_on(self, flight: Flight, tokens: int) -> None:
        """A part of so many tokens has come: take in the times between the tokens so far."""
        if self.other_names is not None:
            self.other_names.went_on(tokens)
        while flight.gaps:
            gap = flight.gaps.popleft()
            if self.other_names is not None:
                self.other_names.waited(gap)
            if self._detail:
                self._inter_token.observe(gap)

    def ended(self, flight: Flight, reason: FinishReason) -> None:
        """The answer has ended of itself."""
        if self.other_names is not None:
            self.other_names.ended(flight, reason)
        if not self._detail or not flight.first_at:
            return
        made = len(flight.output)
        self._answer_length.observe(made)
        if made > 1:
            seconds = flight.last_at - flight.first_at
            self._decode.observe(seconds)
            self._decode_token[size_of(len(flight.request.modules.entries))].observe(seconds / (made - 1))
