"""An OpenTelemetry collector on loopback that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Received:
    """Spans and log records, in the order in which they came. ``refuses``: the answer is a 400."""

    def __init__(self, url: str) -> None:
        self.url, self.refuses = url, False
        self.spans: list[Any] = []
        self.records: list[Any] = []
        self.raw: list[bytes] = []
        self.service = ""

    def take(self, path: str, body: bytes) -> None:
        """One request."""
        self.raw.append(body)
        if path == "/v1/traces":
            for found in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.service = attributes(found.resource)["service.name"]
                self.spans += [span for scope in found.scope_spans for span in scope.spans]
        elif path == "/v1/logs":
            for logs in ExportLogsServiceRequest.FromString(body).resource_logs:
                self.records += [record for scope in logs.scope_logs for record in scope.log_records]


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a span, a record or a resource, lists as lists."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(each) for each in found.values] if kind == "array_value" else found

    return {each.key: plain(each.value) for each in of.attributes}


@contextmanager
def collector() -> Iterator[Received]:
    """Listen as long as it is needed."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not received.refuses:
                received.take(self.path, body)
            self.send_response(400 if received.refuses else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Received(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
