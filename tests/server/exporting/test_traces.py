"""Spans of requests and jobs, as a collector on loopback receives them; and that nothing of a client's text is in them."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.exporting.jobs import TracedJobs
from server.exporting.otel import Tracing, needs_extra
from server.registry.registry import Registry
from server.registry.tables import JobState
from tests.server.registry.test_registry import submit
from tests.support.collector import Received, attributes, collector
from tests.support.live import ADMIN_KEY, Live, live, until
from unbind_core.errors import UnbindError

ROOT = Path(__file__).parents[3]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROMPT = "def very_secret_prompt(alpha, beta):\n    return "


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are not waited for."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


@pytest.fixture
def traced(checkpoint: Path, tmp_path: Path) -> Iterator[tuple[Live, Received]]:
    with collector() as received, live(checkpoint, tmp_path, otel_endpoint=received.url) as server:
        yield server, received


def family(received: Received, name: str) -> tuple[Any, dict[str, Any]]:
    """The newest span whose name begins so, and its children by name."""
    root = next(span for span in reversed(received.spans) if span.name.startswith(name))
    return root, {span.name: span for span in received.spans if span.parent_span_id == root.span_id}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_parts_under_the_clients_own(traced: tuple[Live, Received], stream: bool) -> None:
    server, received = traced
    answer = server.complete(
        prompt=PROMPT, max_tokens=6, stream=stream, unbind={"modules": ["one"]}, headers={"traceparent": PARENT}
    )
    assert answer.status == 200
    until(lambda: any(span.name == "decode" for span in received.spans))
    root, parts = family(received, "text_completion")
    assert root.name == "text_completion tiny" and root.trace_id.hex() == PARENT.split("-")[1]
    assert root.parent_span_id.hex() == PARENT.split("-")[2]
    told = attributes(root)
    assert told["gen_ai.operation.name"] == "text_completion" and told["gen_ai.request.model"] == "tiny"
    assert told["gen_ai.usage.output_tokens"] == 6 and told["gen_ai.usage.input_tokens"] > 4
    assert told["gen_ai.response.finish_reasons"] == ["length"] and told["server.address"] == "127.0.0.1"
    assert told["http.response.status_code"] == 200 and "error.type" not in told
    assert told["unbind.modules"][0].startswith("one@")
    assert set(parts) == {"policy", "queue", "prefill", "decode"}
    starts = [parts[name].start_time_unix_nano for name in ("policy", "queue", "prefill", "decode")]
    assert starts == sorted(starts) and root.start_time_unix_nano <= starts[0]
    for part in parts.values():
        assert part.trace_id == root.trace_id and part.start_time_unix_nano <= part.end_time_unix_nano
    assert parts["decode"].end_time_unix_nano <= root.end_time_unix_nano
    assert received.service == "unbind"


def test_no_text_of_a_client_and_no_key_is_in_what_is_sent(traced: tuple[Live, Received]) -> None:
    server, received = traced
    answer = server.complete(prompt=PROMPT, key=ADMIN_KEY, headers={"traceparent": PARENT, "tracestate": "x=secretive"})
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "model": "tiny"}
    assert server.call("/v1/chat/completions", chat, key=ADMIN_KEY).status == 200
    refused = server.complete(prompt=PROMPT, unbind={"modules": ["secretive"]})
    assert refused.status == 400
    until(lambda: any(attributes(span).get("error.type") == "400" for span in received.spans))
    assert any(span.name == "chat tiny" for span in received.spans)
    for raw in received.raw:
        for text in ("very_secret", "secretive", ADMIN_KEY, *filter(str.strip, [answer.text])):
            assert text.encode() not in raw
    assert not any(attributes(span).get("http.route", "").startswith("/admin") for span in received.spans)


def test_a_collector_that_is_away_holds_up_neither_requests_nor_the_end(checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with live(checkpoint, tmp_path, otel_endpoint=address) as server:
            assert [server.complete().status for _ in range(5)] == [200] * 5


def test_off_it_is_not_imported() -> None:
    naming = {path for path in (ROOT / "server").rglob("*.py") if "opentelemetry" in path.read_text()}
    assert {path.parent.name for path in naming} == {"exporting"}
    files = ", ".join(f"server.exporting.{path.stem}" for path in naming)
    code = f"import sys, {files}; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'", name="opentelemetry")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UnbindError, match=r"otel_endpoint: .*unbind-server\[otel\]"):
        needs_extra()


def test_a_job_is_a_span_and_so_is_each_stage(registry: Registry) -> None:
    with collector() as received:
        tracing = Tracing(received.url)
        registry.jobs = TracedJobs(registry.transactions, tracing)
        job = submit(registry)
        claim = registry.jobs.claim("w", 1.0, 15.0, 3)
        assert claim is not None
        registry.jobs.stage_done(claim, "fit", {"seconds": 2.5, "folder": "f", "result": {}})
        registry.jobs.finish(claim, JobState.FAILED, 2.0, error="something secretive in a row")
        tracing.close()
        root, stages = family(received, "job takedown")
        told = attributes(root)
        assert told["unbind.job.id"] == job and told["unbind.job.state"] == "failed" and told["error.type"] == "failed"
        stage = stages["stage fit"]
        assert 2.4e9 < stage.end_time_unix_nano - stage.start_time_unix_nano < 2.6e9
        assert not any(b"secretive" in raw for raw in received.raw)
