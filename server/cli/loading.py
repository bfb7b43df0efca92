"""What the port answers while the model is loaded: alive, not ready, come back.

``unbind serve`` binds before it loads, so that nobody meets a closed port, and hands the same socket on to the server.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from server.errors import error_body
from unbind_core.errors import UnbindError

MOST_READ = 1024 * 1024  # of a body, so that a client that is still sending hears the answer


class _NotReady(BaseHTTPRequestHandler):
    timeout = 5

    def _answer(self) -> None:
        length = self.headers.get("Content-Length", "0")
        self.rfile.read(min(int(length) if length.isdigit() else 0, MOST_READ))
        alive = self.path.split("?")[0] == "/health"
        told = {"status": "ok"} if alive else error_body(503, "the server is loading its model", code="not_ready")
        body = json.dumps(told).encode()
        self.send_response(200 if alive else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if not alive:
            self.send_header("Retry-After", "2")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _answer  # noqa: N815 - names of the base

    def log_message(self, *_: object) -> None:
        """Probes are nothing to write down."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(("", 0), _NotReady, bind_and_activate=False)
        self.socket.close()
        self.socket = listening


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, port 0 for any free one. Raises UnbindError that names the address and the remedy."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as unless_bound:
            bound = unless_bound.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            unless_bound.pop_all()
    except OSError as error:
        raise UnbindError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port"
        ) from None
    return bound


@contextmanager
def not_ready(bound: socket.socket) -> Iterator[None]:
    """Answer 200 at ``/health`` and 503 at everything else inside the block; afterwards connections wait for who comes next."""
    bound.listen(2048)
    server = _Server(bound.dup())
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="unbind-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
