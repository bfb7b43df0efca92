"""Metrics on a port of their own, where no key is asked for and nothing else is shown."""

from __future__ import annotations

from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from unbind_core.errors import UnbindError


class Port:
    """Closed until ``listen``."""

    def __init__(self) -> None:
        self._listening: tuple[WSGIServer, Thread] | None = None

    def listen(self, what: Collector, host: str, port: int, setting: str) -> int:
        """Show ``what``; returns the port. Raises UnbindError, which names the ``setting``, where it is taken."""
        shown = CollectorRegistry()
        shown.register(what)
        try:
            self._listening = start_http_server(port, host, shown)
        except OSError as error:
            raise UnbindError(
                f"{setting}: cannot listen on {host}:{port} ({error.strerror or error}); choose another"
            ) from None
        return self._listening[0].server_port

    @property
    def number(self) -> int | None:
        """Where it listens, None where it does not."""
        return None if self._listening is None else self._listening[0].server_port

    def close(self) -> None:
        """Give the port back."""
        if self._listening is not None:
            server, thread = self._listening
            server.shutdown()
            thread.join()
            server.server_close()
            self._listening = None
