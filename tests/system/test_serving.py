"""The service as clients meet it: a real process, the official client, errors, metrics."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI, RateLimitError

from server.worker.process import python
from tests.support.modules import build_module
from tests.system.conftest import ROOT, ServerProcess, serving
from unbind_core.architecture import load_model

PROMPT = "def add(first, second):\n"


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two modules, a small queue and no worker; beside the modules lies a damaged file."""
    folder = tmp_path_factory.mktemp("serving")
    identity = load_model(checkpoint).identity
    for number, name in enumerate(("one", "two")):
        build_module(identity, name, layer=number, seed=number).save(folder / "modules" / f"{name}.safetensors")
    whole = (folder / "modules" / "one.safetensors").read_bytes()
    (folder / "modules" / "damaged.safetensors").write_bytes(whole[: len(whole) // 2])
    with serving(checkpoint, folder, worker=False, model_name="tiny", max_slots=4, queue_limit=4) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    """The official client."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_official_client_completes_streams_and_samples(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**fields)
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert (
        whole.usage is not None
        and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    )
    with client.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    sampled = {**fields, "temperature": 1.0, "top_p": 0.95, "seed": 7, "n": 2}
    first, again = client.completions.create(**sampled), client.completions.create(**sampled)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) == 2


def test_prompts_come_as_text_tokens_and_lists(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    one = client.completions.create(prompt=PROMPT, **fields).choices[0].text
    many = client.completions.create(prompt=[PROMPT, "class", PROMPT], **fields).choices
    assert [choice.index for choice in many] == [0, 1, 2]
    assert many[0].text == many[2].text == one
    tokens = client.completions.create(prompt=[[9, 10, 11], [9, 10, 11]], **fields).choices
    assert tokens[0].text == tokens[1].text == client.completions.create(prompt=[9, 10, 11], **fields).choices[0].text
    echoed = client.completions.create(prompt=PROMPT, echo=True, **fields).choices[0].text
    assert echoed == PROMPT + one
    only_echo = client.completions.create(model="tiny", prompt=PROMPT, echo=True, max_tokens=0).choices[0]
    assert (only_echo.text, only_echo.finish_reason) == (PROMPT, "length")
    assert client.completions.create(prompt=PROMPT, suffix="    return third\n", **fields).choices[0].text != one


def test_stop_strings_end_the_answer(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    full = client.completions.create(**fields).choices[0].text
    stop = full[5:8]
    stopped = client.completions.create(**fields, stop=[stop, "\x00never"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (full[: full.index(stop)], "stop")


def test_modules_are_named_in_body_or_header_and_answered_by_digest(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    plain = client.completions.with_raw_response.create(**fields)
    assert "X-Unbind-Modules" not in plain.headers
    body = client.completions.with_raw_response.create(**fields, extra_body={"unbind": {"modules": ["one"]}})
    header = client.completions.with_raw_response.create(**fields, extra_headers={"X-Unbind-Modules": "one"})
    assert body.headers["X-Unbind-Modules"].startswith("one@")
    assert body.parse().choices[0].text == header.parse().choices[0].text != plain.parse().choices[0].text
    both = client.completions.with_raw_response.create(
        **fields, extra_body={"unbind": {"modules": ["one"]}}, extra_headers={"X-Unbind-Modules": "two, one"}
    )
    assert [label.split("@")[0] for label in both.headers["X-Unbind-Modules"].split(",")] == ["one", "two"]
    assert both.headers["x-request-id"]
    with pytest.raises(BadRequestError, match="did you mean one") as caught:
        client.completions.create(**fields, extra_body={"unbind": {"modules": ["onr"]}})
    assert (caught.value.param, caught.value.code) == ("unbind.modules", "unknown_module")


def test_concurrent_clients_with_different_modules_get_what_each_gets_alone(server: ServerProcess) -> None:
    sets: list[list[str]] = [[], ["one"], ["two"], ["one", "two"]]
    prompts = [PROMPT * (1 + number % 3) + "x" * number for number in range(8)]

    async def run() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                answer = await client.completions.create(
                    model="tiny",
                    prompt=prompts[number],
                    max_tokens=20,
                    temperature=0,
                    extra_body={"unbind": {"modules": sets[number % 4]}},
                )
                return answer.choices[0].text

            alone = [await one(number) for number in range(8)]
            return alone, list(await asyncio.gather(*(one(number) for number in range(8))))

    alone, together = asyncio.run(run())
    assert alone == together


def test_errors_have_the_shape_that_clients_read(server: ServerProcess, client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        client.completions.create(model="other", prompt=PROMPT)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")
    assert [model.id for model in client.models.list()] == [client.models.retrieve("tiny").id] == ["tiny"]
    with pytest.raises(BadRequestError, match="by 94;") as long:
        client.completions.create(model="tiny", prompt=[9] * 506, max_tokens=100)
    assert long.value.code == "context_length_exceeded"
    status, body, headers = server.call("/v1/nothing-here", {})
    assert (status, body["error"]["type"]) == (404, "not_found_error") and headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 5}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1e400}, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "n": 10_000}, "n"),
        ({"prompt": "a", "stop": [5]}, "stop.0"),
        ({"prompt": "a", "seed": 2**70}, "seed"),
        ({"prompt": "a", "unbind": {"modules": "one"}}, "unbind.modules"),
        ({"prompt": "a", "unbind": {"module": ["one"]}}, "unbind.module"),
        ({"prompt": "a", "unbind": {"modules": ["x" * 500]}}, "unbind.modules.0"),
        ({"prompt": "a", "unbind": {"modules": ["../../etc"]}}, "unbind.modules"),
        ({"prompt": ["a"], "suffix": "b"}, "suffix"),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(server: ServerProcess, body: Any, param: str | None) -> None:
    status, answer, _ = server.call("/v1/completions", body)
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"


def test_what_is_not_json_is_refused(server: ServerProcess) -> None:
    for raw in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'"text"', b"null", b'{"prompt": "\\ud800"}'):
        status, answer, _ = server.call("/v1/completions", raw)
        assert 400 <= status < 500, (raw[:20], answer)
        assert answer["error"]["message"]


def test_chat_needs_a_template(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])


def test_a_damaged_module_file_is_reported_and_skipped(server: ServerProcess) -> None:
    status, listed = server.admin("/modules")
    assert status == 200
    assert [module["name"] for module in listed["data"]] == ["one", "two"]
    assert len(listed["problems"]) == 1 and "damaged.safetensors" in listed["problems"][0]["file"]
    assert server.call("/admin/v1/modules")[0] == 401
    assert server.call("/admin/v1/modules", headers={"Authorization": "Bearer wrong"})[0] == 401


def test_metrics_count_gates_by_module_and_phase(server: ServerProcess) -> None:
    def read() -> dict[str, float]:
        text = server.call("/metrics")[1]
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    before = read()
    unseen = f"# asked by nobody else, so that no prefix of it is kept\n{PROMPT}"
    server.complete(unseen, max_tokens=8, ignore_eos=True, unbind={"modules": ["two"]})
    after = read()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('unbind_gate_evaluations_total{module="two",phase="decode"}') == 7
    assert grown('unbind_gate_evaluations_total{module="two",phase="prefill"}') > 3
    assert grown('unbind_gate_evaluations_total{module="one",phase="decode"}') == 0
    assert grown('unbind_gate_activations_total{module="two",phase="prefill"}') > 0
    assert grown("unbind_generated_tokens_total") == 8
    assert grown('unbind_requests_total{route="/v1/completions",status="200"}') == 1
    assert after["unbind_slots"] == 4


def test_a_client_that_leaves_frees_its_slot_and_a_full_queue_answers_429(server: ServerProcess) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 400,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }

    def until(running: int, waiting: int) -> None:
        deadline, text = time.monotonic() + 20, ""
        wanted = (f"unbind_requests_running {running}.0", f"unbind_requests_waiting {waiting}.0")
        while not all(line in text for line in wanted):
            assert time.monotonic() < deadline, text
            time.sleep(0.02)
            text = server.call("/metrics")[1]

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            # a stream answers with its first token, so that those in the queue are still being asked for
            asked = [asyncio.create_task(client.completions.create(**fields, stream=True)) for _ in range(8)]
            await asyncio.to_thread(until, 4, 4)
            with pytest.raises(RateLimitError) as refused:
                await client.completions.create(**fields)
            assert 1 <= int(refused.value.response.headers["Retry-After"]) <= 120
            for stream in asked:
                stream.cancel()
                with suppress(asyncio.CancelledError):
                    await (await stream).close()
        await asyncio.to_thread(until, 0, 0)

    asyncio.run(run())


def test_health_readiness_and_the_console_answer(server: ServerProcess) -> None:
    assert server.call("/health")[1] == {"status": "ok"}
    assert server.call("/ready")[1]["modules"] == ["one", "two"]
    assert "<title>Unbind</title>" in server.call("/")[1]
    told = server.call("/console/state.json")[1]
    assert [module["name"] for module in told["modules"]] == ["one", "two"] and told["rows"] == []


def test_a_body_over_the_limit_is_refused(server: ServerProcess) -> None:
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=20)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(17 * 1024 * 1024))
    connection.endheaders()  # the refusal comes before the body is sent
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "body_too_large")
    connection.close()


def test_a_module_dropped_into_the_folder_is_picked_up_and_a_removed_one_goes(
    server: ServerProcess, checkpoint: Path
) -> None:
    path = server.data_dir.parent / "modules" / "late.safetensors"
    build_module(load_model(checkpoint).identity, "late", layer=2, seed=5).save(path)
    assert [module["name"] for module in server.admin("/modules")[1]["data"]] == ["late", "one", "two"]
    assert server.complete(PROMPT, max_tokens=16, unbind={"modules": ["late"]}) != server.complete(
        PROMPT, max_tokens=16
    )
    path.unlink()
    assert [module["name"] for module in server.admin("/modules")[1]["data"]] == ["one", "two"]


def test_the_server_ends_in_good_order_and_takes_its_worker_along(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as server:
        deadline = time.monotonic() + 30
        while not server.worker_pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        (pid,) = server.worker_pids()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert json.dumps(server.log).count("Traceback") == 0


def test_who_presses_ctrl_c_twice_gets_no_traceback(checkpoint: Path, tmp_path: Path) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 400, "n": 16, "ignore_eos": True, "stream": True})
    with serving(checkpoint, tmp_path, worker=False, max_slots=1) as server:
        connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        stream = connection.getresponse()  # with its first token
        server.process.send_signal(signal.SIGINT)
        until = time.monotonic() + 60
        while server.call("/ready")[0] == 200 and time.monotonic() < until:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert server.process.wait(20) == 0
    assert "Traceback" not in "".join(server.log)


@pytest.mark.slow
def test_a_terminal_that_closes_ends_the_server_in_good_order_and_nohup_keeps_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True})
    asked = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what a child inherits: these tests may run under nohup, too
    try:
        with serving(checkpoint, tmp_path) as server:
            connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            stream = connection.getresponse()  # with its first token
            server.process.send_signal(signal.SIGHUP)
            said = stream.read()
            connection.close()
            assert said.endswith(b"data: [DONE]\n\n") and b'"error"' not in said and b'"length"' in said
            server.process.wait(20)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with serving(checkpoint, tmp_path / "nohup", worker=False) as server:
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.5)
            assert server.complete(PROMPT, max_tokens=2) and server.process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, asked)


@pytest.mark.parametrize(
    ("where", "then"),
    [
        ("a full disk", ""),
        ("a pipe that nobody reads", ""),
        ("nothing", " >&-"),
        ("errors on a full disk", " 2>/dev/full >>'{log}'"),
    ],
)
def test_a_server_serves_though_nothing_can_be_said_on_standard_output_or_error(
    checkpoint: Path, tmp_path: Path, where: str, then: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reading, writing = os.pipe()
    os.close(reading)
    output = os.open("/dev/full", os.O_WRONLY) if where == "a full disk" else writing
    command = [
        *("sh", "-c", f'exec "$@"{then.format(log=tmp_path / "log")}', "sh"),
        *python("server", "serve"),
        "--model",
        str(checkpoint),
        "--data-dir",
        str(tmp_path / "data"),
        "--no-worker",
    ]
    limits = ["--port", str(port), "--modules-dir", str(tmp_path), "--max-model-len", "512", "--log-format", "json"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *limits], stdout=output, stderr=log, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    try:
        deadline, status = time.monotonic() + 120, 0
        while status != 200 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            with suppress(OSError):
                connection = HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("GET", "/ready")
                status = connection.getresponse().status
                connection.close()
        said = (tmp_path / "log").read_text()
        assert status == 200, said
        if not then:
            assert "standard output cannot be written" in said
        if where != "errors on a full disk":
            assert all(json.loads(line)["time"] for line in said.splitlines())
    finally:
        process.terminate()
        process.wait(30)
        for descriptor in {writing, output}:
            os.close(descriptor)


@pytest.mark.slow
def test_streams_at_the_limit_are_ended_as_documented_and_the_process_is_gone_in_time(
    checkpoint: Path, tmp_path: Path
) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 480, "n": 8, "ignore_eos": True, "stream": True})
    with serving(checkpoint, tmp_path, drain_timeout=1, max_slots=1) as server:

        def ask() -> HTTPConnection:
            connection = HTTPConnection(server.url.removeprefix("http://"), timeout=30)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            return connection

        begun_with = ask()
        stream = begun_with.getresponse()  # with its first token; the others wait for theirs
        waiting = [ask() for _ in range(7)]
        server.process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        error, done, rest = stream.read().split(b"\n\n")[-3:]
        assert (done, rest) == (b"data: [DONE]", b"") and b'"code":"shutting_down"' in error
        refused = [connection.getresponse() for connection in waiting]
        assert [answer.status for answer in refused] == [503] * 7
        assert {json.loads(answer.read())["error"]["code"] for answer in refused} == {"shutting_down"}
        for connection in (begun_with, *waiting):
            connection.close()
        server.process.wait(20)
        assert time.monotonic() - begun < 1 + 2
    log = "".join(server.log)
    assert "1 requests that still ran and" in log and "Traceback" not in log
