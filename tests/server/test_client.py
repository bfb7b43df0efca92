"""The command line's client: one call, a form, a stream, and what a user is told where one fails."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from server.cli import build
from server.cli.client import Client
from server.cli.takedown import shown
from unbind_core.errors import UnbindError

SAID = b'"eta_seconds": null, "stage": "fit", "progress": 0.5, "message": ""}\n\n'
CUT = b'event: progress\ndata: {"state": "running", ' + SAID
EVENTS = CUT + b'event: end\ndata: {"state": "succeeded", ' + SAID


class Handler(BaseHTTPRequestHandler):
    """Answers by path, and says what it was sent."""

    protocol_version = "HTTP/1.1"
    turns: ClassVar[
        list[tuple[int, bytes]]
    ] = []  # what a job's events are, one call after the other; then those of its end

    def do_GET(self) -> None:
        """Every method alike."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size + 2)[:-2]
            self.rfile.readline()
        told = {"method": self.command, "body": body.decode(), "key": self.headers["Authorization"]}
        status, answer = {
            "/admin/v1/refused": (409, b'{"error": {"message": "module \'x\' is being made"}}'),
            "/admin/v1/broken": (502, b"<h1>bad gateway</h1>"),
            "/admin/v1/events": (200, EVENTS),
            "/admin/v1/cut": (200, CUT),
            "/admin/v1/page": (200, b"<h1>Sign in</h1>"),
            "/admin/v1/list": (200, b"[]"),
            "/admin/v1/bare": (502, b""),
            "/admin/v1/moved": (301, b""),
            "/admin/v1/jobs/j/events": self.turns.pop(0) if self.turns else (200, EVENTS),
        }.get(self.path, (200, json.dumps(told).encode()))
        self.send_response(status)
        if EVENTS.startswith(answer[:20]) and answer:
            self.send_header("Content-Type", "text/event-stream")
        if status == 301:
            self.send_header("Location", "https://elsewhere.invalid/admin/v1/moved")
        self.send_header("Content-Length", str(len(answer) + (1000 if answer == CUT else 0)))
        self.end_headers()
        self.wfile.write(answer)
        self.close_connection = True

    do_POST = do_GET  # noqa: N815 - the library calls it so

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a server that says what it was sent."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_call_carries_key_and_body_and_its_method_follows_from_them(url: str) -> None:
    client = Client(f"{url}/", "é-key")
    assert client.call("/x") == {"method": "GET", "body": "", "key": "Bearer é-key"}
    assert client.call("/x", {"name": "m"})["body"] == '{"name": "m"}'
    assert client.call("/x", method="POST")["method"] == "POST"


def test_a_proxy_of_the_environment_is_not_asked_for_loopback(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, dead)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert Client(url, "k").call("/x")["key"] == "Bearer k"
    assert Client(url.replace("127.0.0.1", "localhost"), "k").call("/x")["key"] == "Bearer k"
    with pytest.raises(
        UnbindError, match=r"does not answer .*refused"
    ):  # elsewhere the proxy is what the environment says
        Client("http://unbind.invalid", "k").call("/x")


def test_a_form_holds_the_fields_and_the_file(url: str, tmp_path: Path) -> None:
    file = tmp_path / 'rows "é".jsonl'
    file.write_bytes(b'{"text": "\xc3\xa9"}\n')
    told = Client(url, "k").upload("/x", {"name": "m", "options": "{}"}, file, {"Idempotency-Key": "1"})
    parts = told["body"].split("--" + told["body"].splitlines()[0].removeprefix("--"))
    contents = {re.findall(r'name="(\w+)"', part)[0]: part.split("\r\n\r\n", 1)[1][:-2] for part in parts[1:-1]}
    assert contents == {"name": "m", "options": "{}", "file": '{"text": "é"}\n'}
    with pytest.raises(FileNotFoundError):
        Client(url, "k").upload("/x", {}, tmp_path / "missing", {})


def test_a_file_whose_name_is_no_text_is_sent(url: str, tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"rows\xfc.jsonl")
    file.write_text("{}\n")
    assert 'filename="rows\ufffd.jsonl"' in Client(url, "k").upload("/x", {"name": "m"}, file, {})["body"]


def test_an_argument_that_is_no_text_is_refused_in_one_line(url: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "x"}\n')
    words = ["takedown", "submit", str(file), "--name", os.fsdecode(b"m\xfc"), "--scope", "none"]
    told = CliRunner().invoke(build(), [*words, "--url", url, "--key", "k"])
    assert isinstance(told.exception, SystemExit) and told.exit_code == 1
    assert "an argument holds bytes that are no UTF-8" in told.output


def test_a_refusal_is_told_in_the_server_s_words(url: str) -> None:
    with pytest.raises(UnbindError, match=r"^module 'x' is being made \(409\)$"):
        Client(url, "k").call("/refused", {})
    with pytest.raises(UnbindError, match=r"^<h1>bad gateway</h1> \(502\)$"):
        Client(url, "k").call("/broken")
    with pytest.raises(UnbindError, match=r"^Bad Gateway \(502\)$"):
        Client(url, "k").call("/bare")
    with pytest.raises(UnbindError, match="being made"):
        list(Client(url, "k").events("/refused"))


@pytest.mark.parametrize("path", ["/page", "/list"])
def test_an_answer_that_no_server_of_ours_gives_is_told_with_the_remedy(url: str, path: str) -> None:
    said = r"^--url: .*/admin/v1 is answered by something else .*give the address"
    with pytest.raises(UnbindError, match=said):
        Client(url, "k").call(path)
    with pytest.raises(UnbindError, match=said):
        list(Client(url, "k").events(path))


@pytest.mark.parametrize("body", [None, {}])
def test_an_address_that_sends_elsewhere_is_told_and_not_followed(url: str, body: dict[str, str] | None) -> None:
    with pytest.raises(UnbindError, match=r"sends on to https://elsewhere.invalid \(301\), .* give that address"):
        Client(url, "k").call("/moved", body)


def test_a_stream_tells_its_events_and_ends_where_it_breaks_off(url: str) -> None:
    assert [event["state"] for event in Client(url, "k").events("/events")] == ["running", "succeeded"]
    assert [event["state"] for event in Client(url, "k").events("/cut")] == ["running"]


def test_a_job_is_followed_beyond_the_end_of_its_server(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "AGAIN_SECONDS", 0.0)
    words = ["takedown", "watch", "j", "--json", "--key", "k", "--url", url]
    cut, loading = (200, CUT), (503, b'{"error": {"message": "the server is loading its model"}}')
    monkeypatch.setattr(Handler, "turns", [cut, loading, loading, cut])
    told = CliRunner().invoke(build(), words)
    assert told.exit_code == 0 and json.loads(told.stdout)["state"] == "succeeded", told.output
    assert told.stderr.count("the server went away; waiting for it") == 2
    monkeypatch.setattr(Handler, "turns", [cut, (404, b'{"error": {"message": "no job \'j\'"}}')])
    told = CliRunner().invoke(build(), words)
    assert told.exit_code == 1 and told.stderr.endswith("error: no job 'j' (404)\n")
    monkeypatch.setattr(shown, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(Handler, "turns", [cut])
    told = CliRunner().invoke(build(), words)
    assert told.exit_code == 1 and "`unbind takedown watch j` follows it again" in told.stderr
    monkeypatch.setattr(Handler, "turns", [loading])  # nobody was there to begin with
    told = CliRunner().invoke(build(), words)
    assert told.exit_code == 1 and told.stderr == "error: the server is loading its model (503)\n"


def test_a_server_that_is_not_there_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UnbindError, match=rf"127.0.0.1:{port}/admin/v1 does not answer .*refused.*unbind serve"):
        Client(f"http://127.0.0.1:{port}", "k").call("/x")


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://host", "http://[::1", "http://host:port", "http://"])
def test_what_is_no_address_is_named_with_an_example(address: str) -> None:
    with pytest.raises(UnbindError, match=r"--url: .* is not an address such as http://127"):
        Client(address, "k")


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown() -> None:
    with pytest.raises(UnbindError, match="Authorization: only characters of Latin-1") as caught:
        Client("http://127.0.0.1:9", "ключ").call("/x")
    assert "ключ" not in str(caught.value)


@pytest.mark.parametrize("end", ["\r", "\r\n", "\x00", " ", "\x1b[0m"])  # as of a key's file that was written elsewhere
def test_a_key_with_the_end_of_its_line_is_refused_and_not_shown(end: str) -> None:
    with pytest.raises(UnbindError, match="Authorization: holds the end of a line") as caught:
        Client("http://127.0.0.1:9", f"ubk_secret{end}").call("/x")
    assert "secret" not in str(caught.value)


def test_the_address_of_the_server_is_taken_from_the_environment_where_no_flag_gives_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNBIND_URL", "nowhere")
    told = CliRunner().invoke(build(), ["takedown", "cancel", "job", "--key", "k"])
    assert told.exit_code == 1 and "'nowhere' is not an address" in told.output
    told = CliRunner().invoke(build(), ["takedown", "cancel", "job", "--key", "k", "--url", url, "--json"])
    assert json.loads(told.output)["method"] == "POST"


def test_where_no_admin_key_is_found_the_file_and_the_data_folder_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNBIND_ADMIN_KEY", raising=False)
    monkeypatch.setenv("UNBIND_DATA_DIR", str(tmp_path))
    with pytest.raises(UnbindError) as caught:
        Client("http://127.0.0.1:9", None)
    said = str(caught.value)
    assert (
        f"'{tmp_path / 'admin.key'}' cannot be read" in said and "UNBIND_DATA_DIR to the server's data folder" in said
    )


@pytest.mark.parametrize("action", ["suspend", "shadow", "retire", "rollback"])
def test_a_flag_that_a_change_of_a_module_does_not_know_is_refused(url: str, action: str) -> None:
    told = CliRunner().invoke(build(), ["module", action, "m", "--override", "--key", "k", "--url", url])
    assert told.exit_code == 1 and told.stderr.startswith("error: --override: goes with `unbind module activate`")


@pytest.mark.parametrize(("held", "said"), [(b"\n", "is empty"), (b"\xff\xfe", "is not text")])
def test_a_key_s_file_that_holds_none_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bytes, said: str
) -> None:
    file = tmp_path / "admin.key"
    file.write_bytes(held)
    monkeypatch.delenv("UNBIND_ADMIN_KEY", raising=False)
    monkeypatch.setenv("UNBIND_ADMIN_KEY_FILE", str(file))
    with pytest.raises(UnbindError, match=f"no admin key: '{re.escape(str(file))}' {said}; write the key into it"):
        Client("http://127.0.0.1:9", None)


def test_a_key_is_read_from_a_file_with_line_ends_and_a_mark_of_its_encoding(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "admin.key").write_bytes(b"\xef\xbb\xbfubk_x\r\n\n")
    monkeypatch.delenv("UNBIND_ADMIN_KEY", raising=False)
    monkeypatch.setenv("UNBIND_ADMIN_KEY_FILE", str(tmp_path / "admin.key"))
    assert Client(url, None).call("/x")["key"] == "Bearer ubk_x"
    monkeypatch.delenv("UNBIND_ADMIN_KEY_FILE")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.setenv("UNBIND_DATA_DIR", f"~/{tmp_path.name}")  # as a server reads it
    assert Client(url, None).call("/x")["key"] == "Bearer ubk_x"
