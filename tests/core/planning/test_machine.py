"""What a machine does in a second is measured in a moment, however slow it is."""

from __future__ import annotations

import pytest
import torch

from unbind_core.planning.machine import MOMENT, ROWS, Machine, _most


@pytest.mark.parametrize(("a_row", "count"), [(MOMENT / 1e6, ROWS), (MOMENT / 16, 64), (MOMENT * 2, 1)])
def test_a_machine_is_asked_for_no_more_than_a_moment_tells(a_row: float, count: int) -> None:
    asked = list[int]()

    def seconds(rows: int) -> float:
        asked.append(rows)
        return a_row * rows

    assert _most(seconds, a_row) == (count, a_row * count)
    assert asked == sorted(asked) and max(asked, default=1) == count


def test_a_machine_has_rates_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = Machine.measured(torch.device("cpu"), dtype)
        assert found.products > 0 and found.reads > 0 and found.libraries == 0
