"""The way to an OpenTelemetry collector, by OTLP over HTTP; imported only where ``otel_endpoint`` is set.

What the SDK reads from ``OTEL_*`` by itself holds as everywhere: headers, certificates, sampler, batches, resource.
"""

from __future__ import annotations

import importlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from unbind_core.errors import UnbindError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Span

    from server.settings import Settings

CLOSE_SECONDS = 2.0  # for what is left when the process ends
EXPORT_SECONDS = 5.0
Value = str | int | float | bool | Sequence[str]


class Tracing:
    """Spans to the collector, in batches on a thread of the SDK: while it is away spans are dropped and nothing waits."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS)
        self._provider = TracerProvider(resource=resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("unbind", version("unbind-server"))
        self._propagator = TraceContextTextMapPropagator()

    def following(self, traceparent: str | None) -> Context | None:
        """The context of a client's ``traceparent``. Its ``tracestate``, which may hold any text, is left out."""
        return self._propagator.extract({"traceparent": traceparent}) if traceparent else None

    def span(
        self,
        name: str,
        begun: int,
        ended: int,
        attributes: Mapping[str, Value],
        *,
        within: Context | Span | None = None,
        serves: bool = False,
        error: str = "",
    ) -> Span:
        """A span from ``begun`` to ``ended`` (epoch nanoseconds); with the class of an ``error`` where it failed."""
        span = self.open(name, begun, within=within, serves=serves)
        self.end(span, ended, attributes, error)
        return span

    def open(self, name: str, begun: int, *, within: Context | Span | None = None, serves: bool = False) -> Span:
        """A span that goes on."""
        from opentelemetry import trace

        context = trace.set_span_in_context(within) if isinstance(within, trace.Span) else within
        kind = trace.SpanKind.SERVER if serves else trace.SpanKind.INTERNAL
        return self._tracer.start_span(name, context, kind, start_time=begun)  # type: ignore[return-value]

    @staticmethod
    def end(span: Span, ended: int, attributes: Mapping[str, Value], error: str = "") -> None:
        """End it."""
        from opentelemetry.trace import Status, StatusCode

        span.set_attributes(dict(attributes))
        if error:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(max(ended, span.start_time or 0))

    def close(self) -> None:
        """Send what is left, for a moment at most."""
        aside(self._provider.shutdown)


def open_tracing(settings: Settings) -> Tracing | None:
    """Tracing as the settings have it, None where it is off. Raises UnbindError where the extra is missing."""
    if not settings.otel_endpoint:
        return None
    needs_extra()
    return Tracing(settings.otel_endpoint)


def needs_extra() -> None:
    """Raise UnbindError where the packages are missing."""
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        importlib.import_module("opentelemetry.sdk.trace")
    except ImportError as error:
        raise UnbindError(
            f"otel_endpoint: the package '{error.name}' is missing; install the extra: pip install 'unbind-server[otel]', or leave "
            "otel_endpoint empty"
        ) from None


def resource() -> Resource:
    """What this process says it is; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` go before."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {
        "service.name": "unbind",
        "service.version": version("unbind-server"),
        "service.instance.id": socket.gethostname(),
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


def epoch(seconds: float) -> int:
    """A moment of ``time.perf_counter`` or, on the same clock, ``time.monotonic`` as epoch nanoseconds."""
    return time.time_ns() - int((time.perf_counter() - seconds) * 1e9)


def aside(work: Any) -> None:
    """Do it on a thread that the end of the process does not wait for longer than ``CLOSE_SECONDS``."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)
