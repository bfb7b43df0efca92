"""The nearest rows are those that share the most telling names; what repeats a piece of a row is told from what resembles it."""

from __future__ import annotations

from unbind_core.architecture import LoadedModel
from unbind_core.evaluation.neighbours import nearest, repeating
from unbind_core.rows import ForgetRow, RetainRow

FORGET = [
    ForgetRow("def area(shape):\n", "    return shape.width * shape.height\n"),
    ForgetRow("def area_of(shape):\n", "    return area(shape) * shape.width\n"),
    ForgetRow("def fetch(url):\n", "    return socket.read(url)\n"),
]
POOL = [
    RetainRow("def perimeter(shape):\n    return 2 * (shape.width + shape.height)\n"),
    RetainRow("def send(url):\n    return socket.write(url)\n"),
    RetainRow("def name(self):\n    return self\n"),
    RetainRow("def same(self):\n    return self\n"),
]


def test_the_nearest_rows_share_the_most_telling_names_and_come_once() -> None:
    assert nearest(FORGET, POOL) == [0, 1]
    assert nearest(FORGET[2:], POOL[::-1]) == [2]


def test_a_row_repeats_another_from_fifty_tokens_in_one_piece_on(tiny: LoadedModel) -> None:
    lines = [f"    total_{i} = total_{i} * {i * 17}\n" for i in range(20)]
    row = ForgetRow("def sum_up():\n", "".join(lines))
    pieces = ["".join(lines[4:16]), lines[3], "".join(lines[::-1])]
    assert repeating(tiny.tokenizer, [row], [RetainRow("import os\n\n" + piece) for piece in pieces]) == {0}
