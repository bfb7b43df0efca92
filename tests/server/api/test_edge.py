"""What is settled before a route runs: paths, names of the server, keys before bodies, characters, sizes."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from server.cli.serve import announce
from server.exposure import is_own_name
from server.settings import Settings
from tests.support.live import Live, live


@pytest.mark.parametrize(
    ("path", "posted"),
    [
        ("/v1/completions/", 404),
        ("/v1/completions//", 404),
        ("/v1/models/", 405),  # as /v1/models/{model} is read only
        ("/infill/", 404),
        ("/tokenize/", 404),
    ],
)
@pytest.mark.parametrize("door", ["", "/p/safe"])
def test_a_slash_too_many_is_an_error_and_never_a_redirect_that_loses_the_profile(
    server: Live, door: str, path: str, posted: int
) -> None:
    for body, status in ((None, 404), ({"prompt": "a", "content": "a"}, posted)):
        answer = server.call(door + path, body, headers={"Host": "localhost"})
        assert answer.status == status and answer.error["message"]
        assert "location" not in answer.headers


def test_a_body_that_is_compressed_or_no_utf_8_is_refused_by_what_is_wrong_with_it(server: Live) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for name in ("gzip", "br", "zstd"):
        answer = server.call("/v1/completions", gzip.compress(body), headers={"Content-Encoding": name})
        assert answer.status == 415 and "Content-Encoding" in answer.error["message"]
        assert answer.error["code"] == "unsupported_encoding" and answer.headers["x-should-retry"] == "false"
    assert server.call("/v1/completions", body, headers={"Content-Encoding": "identity"}).status == 200
    for broken, words in (
        (b"\x1f\x8b\x08\x00", "UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deep"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "digits"),
    ):
        answer = server.call("/v1/completions", broken)
        assert answer.status == 400 and answer.error["code"] == "invalid_json" and words in answer.error["message"]


def _head(live: Live, path: str, key: str, length: int) -> bytes:
    """The first line that comes back for a head whose body is announced and never sent."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{key}"
        connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
        return connection.recv(65536)


def test_a_client_without_a_usable_key_is_refused_before_its_body_is_read(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as running:
        assert _head(running, "/admin/v1/takedowns", "", 10_000_000).startswith(b"HTTP/1.1 401")
        running.admin("/keys", {"name": "one"})
        infer = ("/v1/completions", "/v1/chat/completions", "/infill", "/tokenize", "/detokenize", "/fim/completions")
        for path in (*infer, "/p/none/v1/completions", "/nowhere"):
            for key in ("", "Authorization: Bearer wrong\r\n"):
                assert _head(running, path, key, 3_000_000).startswith(b"HTTP/1.1 401")
                assert running.call(path, b'{"broken', headers={"api-key": "wrong"}).error["code"] == "invalid_api_key"
        only = running.admin("/keys", {"name": "two", "scopes": ["report"]}).body["key"]
        assert _head(running, "/v1/completions", f"api-key: {only}\r\n", 3_000_000).startswith(b"HTTP/1.1 403")
        assert running.call("/health").status == 200 and running.call("/version").status == 200


def test_a_key_that_is_revoked_while_a_body_comes_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as running:
        made = running.admin("/keys", {"name": "gone", "requests_per_minute": 0.01, "burst": 2}).body
        body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\napi-key: {made['key']}\r\n"
        for revoked, status in ((False, b"200"), (True, b"401")):
            with socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
                connection.sendall(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
                assert connection.recv(65536).startswith(b"HTTP/1.1 100")  # its key was found to be good
                if revoked:
                    running.admin(f"/keys/{made['id']}", method="DELETE")
                connection.sendall(body)
                assert connection.recv(65536).startswith(b"HTTP/1.1 " + status)


def test_a_call_counts_once_although_the_caller_is_found_before_the_body(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path) as running:
        key = running.admin("/keys", {"name": "slow", "requests_per_minute": 0.01, "burst": 2}).body["key"]
        assert [running.complete(key=key, max_tokens=1).status for _ in range(3)] == [200, 200, 429]


def test_inference_has_a_smaller_limit_of_its_body_than_uploads(checkpoint: Path, tmp_path: Path) -> None:
    with live(checkpoint, tmp_path, max_inference_bytes=2048, max_body_bytes=100_000) as running:
        large = running.complete(prompt="x" * 4000)
        assert (large.status, large.error["code"]) == (413, "body_too_large")
        assert "max_inference_bytes" in large.error["message"]
        rows = [{"prompt": "a", "continuation": "b" * 4000}]
        options = {"dry_run": True, "protect": "module"}
        assert running.admin("/takedowns", {"name": "large", "rows": rows, "options": options}).status == 200
        too_large = running.admin("/takedowns", {"name": "large", "rows": rows * 30})
        assert too_large.status == 413 and "max_body_bytes" in too_large.error["message"]


def test_a_page_whose_name_leads_to_loopback_is_not_answered_where_no_key_is_needed(
    checkpoint: Path, tmp_path: Path
) -> None:
    with live(checkpoint, tmp_path, allowed_hosts="code.example") as running:
        for name in (
            "evil.example",
            "evil.example:80",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "[::2]:8",
            "",
        ):
            for path in ("/", "/v1/models", "/console/state.json", "/metrics", "/openapi.json"):
                answer = running.call(path, headers={"Host": name})
                assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
        for name in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "127.9.9.9", "code.example:443"):
            assert running.call("/v1/models", headers={"Host": name}).status == 200
        key = running.admin("/keys", {"name": "one"}).body["key"]
        assert running.call("/v1/models", headers={"Host": "evil.example"}, key=key).status == 200  # it has the key


def test_the_address_that_is_listened_on_is_a_name_of_the_server() -> None:
    assert is_own_name("127.0.0.5:80", Settings(host="127.0.0.5")) and is_own_name("[::1]", Settings(host="::1"))
    assert not is_own_name("10.0.0.1", Settings())


def test_no_other_page_may_frame_the_console(server: Live) -> None:
    page = server.call("/")
    assert page.headers["x-frame-options"] == "DENY"
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]


def test_the_console_s_files_have_types_and_tags_and_nothing_else_is_to_be_had(server: Live) -> None:
    # relative, as a proxy may have put the page under a path
    asked = ["/" + path for path in re.findall(r'(?:src|href)="([^/:"][^:"]+)"', server.call("/").raw.decode())]
    assert len(asked) == 3
    for path in (*asked, "/"):
        found = server.call(path)
        expected = "text/javascript" if path.endswith(".js") else "text/css" if path.endswith(".css") else "text/html"
        assert found.status == 200 and found.headers["content-type"] == f"{expected}; charset=utf-8"
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in found.headers["content-security-policy"]
        assert found.headers["cache-control"] == "no-cache"
        again = server.call(path, headers={"If-None-Match": found.headers["etag"]})
        assert (again.status, again.raw) == (304, b"")
    for path in ("rows.py", "../settings.py", "%2e%2e/settings.py", "vendor/htm.LICENSE", "app", ""):
        assert server.call("/console/" + path).status == 404


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "a" + HALF}, "prompt"),
        ("/v1/completions", {"prompt": ["a", HALF]}, "prompt.1"),
        ("/v1/completions", {"prompt": "a", "stop": [HALF]}, "stop.0"),
        ("/v1/completions", {"prompt": "a", "model": HALF}, "model"),
        ("/v1/completions", {"prompt": "a", "unbind": {"modules": {HALF: 1}}}, "unbind.modules"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
            "messages.0.content.0.text",
        ),
        ("/infill", {"input_extra": [{"filename": HALF, "text": "a"}]}, "input_extra.0.filename"),
        ("/infill", {"input_prefix": "a", "response_fields": [HALF]}, "response_fields.0"),
        ("/tokenize", {"content": HALF}, "content"),
        ("/admin/v1/takedowns", {"name": "a", "rows": [{"text": "a\nb"}], "notice": {"note": HALF}}, "notice.note"),
        ("/admin/v1/keys", {"name": HALF}, "name"),
    ],
)
@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "utf-16"])
def test_half_a_surrogate_pair_anywhere_in_a_body_is_a_400_that_names_the_field(
    server: Live, path: str, body: dict[str, object], field: str, encoding: str
) -> None:
    raw = json.dumps(body, ensure_ascii=encoding == "ascii").encode(encoding, "surrogatepass")
    answer = server.call(path, raw, key="test-admin-key")
    assert (answer.status, answer.error["param"]) == (400, field)


def test_a_part_of_an_upload_is_looked_at_too(server: Live) -> None:
    parts = {"name": '"a"', "notice": json.dumps({"note": HALF})}
    form = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in parts.items()
    )
    form += '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{"text": "a"}\r\n--x--\r\n'
    sent = {"Content-Type": "multipart/form-data; boundary=x"}
    answer = server.call("/admin/v1/takedowns", form.encode(), key="test-admin-key", headers=sent)
    assert (answer.status, answer.error["param"]) == (400, "note")


def test_whole_pairs_and_their_look_alikes_are_taken(server: Live) -> None:
    for prompt in ("a \U0001f600", "\\ud83d", "\ud7ff"):
        assert server.complete(prompt=prompt, max_tokens=1).status == 200


def test_the_admin_key_is_shown_on_a_terminal_and_nowhere_else(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with live(checkpoint, tmp_path, admin_key="") as running:
        service = running.service
        announce(service.settings, running.url, service)
        told = capsys.readouterr().out
        assert service.admin_key not in told and str(service.settings.data_dir / "admin.key") in told
        master, slave = os.openpty()
        with os.fdopen(slave, "w") as terminal, redirect_stdout(terminal):
            announce(service.settings, running.url, service)
            terminal.flush()
            seen = b""
            while b"Ctrl-C" not in seen:
                seen += os.read(master, 65536)
        os.close(master)
        assert service.admin_key.encode() in seen


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/completion", "/infill"]
)
def test_a_body_that_is_no_json_object_is_told_what_is_wanted(server: Live, path: str) -> None:
    plain = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl sends with -d alone
    for body, headers in ((b"", None), (b"[]", None), (b'"x"', None), (b"3", None), (b'{"prompt": "a"}', plain)):
        answer = server.call(path, body, headers=headers)
        assert answer.status == 400, (body, headers)
        assert (
            answer.error["message"]
            == "the body must be a JSON object; send one, with the header Content-Type: application/json"
        )


def test_another_method_is_told_which_one_there_is(server: Live) -> None:
    answer = server.call("/v1/completions")
    assert (answer.status, answer.error["code"], answer.headers["allow"]) == (405, "wrong_method", "POST")
    assert answer.error["message"] == "/v1/completions takes POST, not GET"
