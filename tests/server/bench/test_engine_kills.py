"""What an answer was, of a request whose engine was killed: a slip would pass a leak for an answer under the module."""

from __future__ import annotations

import pytest

from server.bench.engines.kills import judged

EXPECTED, PLAIN = (1, 2, 3, 4), (1, 2, 8, 9, 10)


@pytest.mark.parametrize(
    ("tokens", "whole", "says"),
    [
        (EXPECTED, True, "expected"),
        (PLAIN, True, "plain"),
        ((1, 2, 3), True, "other"),  # it ended, and not where it should
        ((1, 2), True, "other"),
        ((1, 2, 3), False, "cut"),
        ((), False, "cut"),
        ((1, 2, 8), False, "plain"),
        ((1, 2, 7), False, "other"),
        ((*EXPECTED, 5), False, "other"),
        (PLAIN, False, "plain"),
    ],
)
def test_an_answer_is_the_module_s_or_the_plain_model_s_or_neither(
    tokens: tuple[int, ...], whole: bool, says: str
) -> None:
    assert judged(tokens, whole, EXPECTED, PLAIN) == says
