"""What is settled before a route runs: paths, names of the server, keys before bodies, characters, sizes."""

from __future__ import annotations

import pytest

from tests.server.live import Live


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/completions//", "/v1/models/", "/infill/", "/tokenize/"])
@pytest.mark.parametrize("door", ["", "/p/safe"])
def test_a_slash_too_many_is_a_404_and_never_a_redirect_that_loses_the_profile(
    server: Live, door: str, path: str
) -> None:
    for body in (None, {"prompt": "a", "content": "a"}):
        answer = server.call(door + path, body, headers={"Host": "localhost"})
        assert answer.status in (404, 405) and answer.error["message"]
        assert "location" not in answer.headers
