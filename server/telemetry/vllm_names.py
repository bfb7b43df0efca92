"""The same figures under vLLM's names, labels and buckets, for the dashboards, autoscalers and gateways that know those."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.engine.engine import EngineStats
from server.engine.request import FinishReason, Flight

# As vLLM 0.32 has them.
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM's number of an engine core; here there is one to be seen


class VllmNames:
    """What ``Answers`` observes, once more."""

    def __init__(self, registry: CollectorRegistry, model: str, length: int, read: Callable[[], EngineStats]) -> None:
        """``model``: the name that it is served by; ``length``: most tokens of a request, which bounds the buckets of lengths."""
        self._own = (model, ENGINE)
        tokens = tuple(m * 10**e for e in range(7) for m in (1, 2, 5) if m * 10**e <= length)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=registry).labels(*self._own)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, LABELS, registry=registry).labels(*self._own)

        self._first = histogram("time_to_first_token_seconds", "Time to the first token", FIRST)
        self._inter_token = histogram("inter_token_latency_seconds", "Time from token to token", TOKEN)
        self._mean = histogram("request_time_per_output_token_seconds", "Its mean over an answer", TOKEN)
        self._whole = histogram("e2e_request_latency_seconds", "Time from arrival to the last token", REQUEST)
        self._queue = histogram("request_queue_time_seconds", "Time in the queue", REQUEST)
        self._inference = histogram("request_inference_time_seconds", "Time from there to the last token", REQUEST)
        self._prefill = histogram("request_prefill_time_seconds", "Of this, up to the first token", REQUEST)
        self._decode = histogram("request_decode_time_seconds", "And from there on", REQUEST)
        self._prompt_length = histogram("request_prompt_tokens", "Length of a prompt", tokens)
        self._answer_length = histogram("request_generation_tokens", "Length of a finished answer", tokens)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens taken in")
        self._generation_tokens = counter("generation_tokens", "Tokens generated")
        self._queries = counter("prefix_cache_queries", "Prompt tokens that were looked for in kept prefixes")
        self._hits = counter("prefix_cache_hits", "Prompt tokens taken from a kept prefix")
        self._success = Counter(
            "vllm:request_success", "Answers that have ended", (*LABELS, "finished_reason"), registry=registry
        )
        for reason in ("stop", "length"):
            self._success.labels(*self._own, reason)
        registry.register(_Present(self._own, read))

    def begun(self, flight: Flight) -> None:
        """The first part of an answer has come."""
        self._prompt_tokens.inc(len(flight.prompt))
        self._queries.inc(len(flight.prompt))
        self._hits.inc(flight.cached_tokens)
        if flight.first_at:
            self._first.observe(flight.first_at - flight.submitted_at)

    def went_on(self, tokens: int) -> None:
        """So many tokens have come."""
        self._generation_tokens.inc(tokens)

    def waited(self, seconds: float) -> None:
        """From a token to the next."""
        self._inter_token.observe(seconds)

    def ended(self, flight: Flight, reason: FinishReason) -> None:
        """The answer has ended of itself."""
        self._success.labels(*self._own, reason).inc()
        made = len(flight.output)
        self._prompt_length.observe(len(flight.prompt))
        self._answer_length.observe(made)
        if not flight.first_at:
            return
        decode = flight.last_at - flight.first_at
        self._whole.observe(flight.last_at - flight.submitted_at)
        self._queue.observe(max(0.0, flight.begun_at - flight.submitted_at))
        self._inference.observe(flight.last_at - flight.begun_at)
        self._prefill.observe(flight.first_at - flight.begun_at)
        self._decode.observe(decode)
        if made > 1:
            self._mean.observe(decode / (made - 1))


class _Present(Collector):
    def __init__(self, own: tuple[str, str], read: Callable[[], EngineStats]) -> None:
        self._own, self._read = own, read

    def collect(self) -> Iterable[Metric]:
        """What is true at this moment."""
        stats = self._read()
        for name, text, value in (
            ("num_requests_running", "Requests that hold a slot", stats.running),
            ("num_requests_waiting", "Requests in the queue", stats.waiting),
            ("kv_cache_usage_perc", "Share of the memory for keys and values that is held; 1: all", stats.kv_usage),
        ):
            if value is not None:
                gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
                gauge.add_metric(self._own, value)
                yield gauge
        if stats.preemptions is not None:
            counter = CounterMetricFamily("vllm:num_preemptions", "Requests that were computed again", labels=LABELS)
            counter.add_metric(self._own, stats.preemptions)
            yield counter
