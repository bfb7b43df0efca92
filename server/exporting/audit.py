"""The rows of the audit trail to a SIEM: a JSON line each to a file or to standard output, and a log record each to a collector.

The registry is the truth. A row is read back after it was committed, and the place that was come to is kept beside the data: so a
restart goes on there, and a row that may have been lost is sent once more. Its number and digest tell gaps and repeats.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.exporting.otel import EXPORT_SECONDS, aside, resource
from server.registry.registry import Registry
from server.settings import Settings
from unbind_core.errors import UnbindError
from unbind_core.files import write_text

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import ReadableLogRecord

log = logging.getLogger("unbind.audit")
PAGE = 200
NAMED = ("id", "actor", "source", "action", "subject", "digest", "previous")  # attributes of a log record
Row = dict[str, Any]


class Feed:
    """The trail to one place. ``send`` raises OSError where it does not take the rows: they are sent again."""

    def __init__(self, registry: Registry, kept: Path, where: str, send: Callable[[Sequence[Row]], None]) -> None:
        self.where = where
        self._registry, self._kept, self._send = registry, kept, send
        self._place: int | None = None

    async def send_new(self) -> None:
        """``go_on`` on a thread."""
        await asyncio.to_thread(self.go_on)

    def go_on(self) -> None:
        """Send what was added. Raises OSError, SQLAlchemyError."""
        place = self._place if self._place is not None else self._begin()
        while rows := self._registry.audit(place, PAGE):
            self._send(rows)
            place = self._place = int(rows[-1]["id"])
            write_text(self._kept, f"{place} {rows[-1]['digest']}\n")
        self._place = place

    def _begin(self) -> int:
        """Where to go on; the beginning where nothing is kept, or where the trail is another by now."""
        try:
            number, digest = self._kept.read_text(encoding="ascii").split()
            if [row["digest"] for row in self._registry.audit(int(number) - 1, 1)] == [digest]:
                return int(number)
            log.warning("%s names no row of the audit trail: the whole trail is sent again", self._kept)
        except FileNotFoundError:
            pass
        except ValueError:
            log.warning("%s is damaged: the whole audit trail is sent again", self._kept)
        return 0


def to_file(path: Path) -> Callable[[Sequence[Row]], None]:
    """Lines at the end of a file for its owner alone, which may be moved away at any time. Raises OSError, and nothing of the rows
    is left then: as they are sent again, they would take whatever room somebody makes on a full disk.
    """

    def send(rows: Sequence[Row]) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            end, written = file.seek(0, os.SEEK_END), 0
            torn = end and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            left = memoryview((b"\n" if torn else b"") + b"".join(map(line, rows)))
            try:
                while written < len(left):
                    written += file.write(left[written:]) or 0
                os.fsync(descriptor)
            except OSError:
                if os.fstat(descriptor).st_size == end + written:  # and nobody else has written
                    with suppress(OSError):
                        file.truncate(end)
                raise

    return send


def to_stdout(rows: Sequence[Row]) -> None:
    """Lines on standard output. Raises OSError."""
    sys.stdout.write(b"".join(map(line, rows)).decode())
    sys.stdout.flush()


def line(row: Row) -> bytes:
    """A row as a line: all fields of the trail, its time in words, and what marks it among other lines."""
    at = datetime.fromtimestamp(row["at"], UTC).isoformat(timespec="milliseconds")
    return json.dumps({"event": "unbind.audit", "time": at, **row}, ensure_ascii=True).encode() + b"\n"


class Collector:
    """Rows as OpenTelemetry log records, sent at once rather than in batches that may be dropped."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter

        self._exporter = OTLPLogExporter(f"{endpoint.rstrip('/')}/v1/logs", timeout=EXPORT_SECONDS)
        self._resource = resource()

    def send(self, rows: Sequence[Row]) -> None:
        """One record each. Raises OSError where the collector does not take them."""
        from opentelemetry.sdk._logs.export import LogRecordExportResult

        if self._exporter.export([self._record(row) for row in rows]) is not LogRecordExportResult.SUCCESS:
            raise OSError("the collector at otel_endpoint does not take the audit trail's rows; they are sent again")

    def _record(self, row: Row) -> ReadableLogRecord:
        from opentelemetry._logs import LogRecord, SeverityNumber
        from opentelemetry.sdk._logs import ReadableLogRecord
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        record = LogRecord(
            timestamp=int(row["at"] * 1e9),
            severity_number=SeverityNumber.INFO,
            body=line(row).decode().rstrip(),
            attributes={f"unbind.audit.{name}": row[name] for name in NAMED},
            event_name="unbind.audit",
        )
        return ReadableLogRecord(record, self._resource, InstrumentationScope("unbind.audit"))

    def close(self) -> None:
        """End what is under way."""
        aside(self._exporter.shutdown)


class AuditFeeds:
    """All places that the settings name."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self.feeds: list[Feed] = []
        self._collector: Collector | None = None
        where = settings.audit_log
        if where:
            path = Path(where)
            if where != "-" and not path.parent.is_dir():
                raise UnbindError(f"audit_log: the folder {path.parent} is not there; make it, or name another file")
            send = to_stdout if where == "-" else to_file(path)
            self.feeds.append(Feed(registry, settings.data_dir / "audit.logged", "audit_log", send))
        if settings.otel_endpoint:
            self._collector = Collector(settings.otel_endpoint)
            self.feeds.append(
                Feed(registry, settings.data_dir / "audit.collected", "otel_endpoint", self._collector.send)
            )

    def close(self) -> None:
        """End what is under way."""
        if self._collector is not None:
            self._collector.close()
