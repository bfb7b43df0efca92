"""What counts of a completion."""

from __future__ import annotations

import ast

import pytest

from tests.lab.evalplus.conftest import HUMAN_EVALS, MBPPS
from unbind_lab.evalplus.answers import body, program, sanitised, stopped
from unbind_lab.evalplus.problems import HUMAN_EVAL, MBPP, Problem


@pytest.mark.parametrize(
    ("completion", "kept"),
    [
        ("    return 1\n", "    return 1\n"),
        ("return 1\n", "    return 1\n"),
        ("   x = 1\n    return x\n", "    x = 1\n    return x\n"),
        ("\n\n  return 1\n\ndef other():\n    pass\n", "\n\n    return 1\n"),
        ("\tif x:\n\t\treturn 1\n\nprint(f(1))\n", "    if x:\n        return 1\n"),
        ("    return 1\n# Test\n    x\n", "    return 1"),
        ("def f(x):\n    return 1\n", ""),
        ("import os\n    return 1\n", ""),
        ("if x:\n        return 1\n", "    if x:\n        return 1\n"),
        ("", ""),
        ("\n  \n", ""),
    ],
)
def test_a_body_is_repaired_and_ends_at_the_top_level(completion: str, kept: str) -> None:
    assert body(completion) == kept


def test_a_completion_of_mbpp_ends_at_its_stops() -> None:
    assert stopped("def f():\n\treturn 1\n\nassert f() == 1\nprint(2)") == "def f():\n    return 1\n"
    assert stopped("x = 1\n</s>\n" + 'y\n"""') == "x = 1\n" and stopped("def f(): pass") == "def f(): pass"
    assert stopped("a\nif __name__ == '__main__':") == "a"


SANITISED = {
    "what the function needs is kept": (
        "import re\nfrom math import pi\nfrom __future__ import annotations\nLIMIT = 3\nunused = 4\n"
        "def helper(x):\n    return x + LIMIT\ndef other(x):\n    return x\ndef f(x):\n    return helper(x)\n",
        "import re\nfrom math import pi\nLIMIT = 3\ndef helper(x):\n    return x + LIMIT\ndef f(x):\n    return helper(x)",
    ),
    "what does not parse is cut off": (
        '"""\nWrite f.\n"""\ndef f(x):\n    return 1\n\ndef g(:\n',
        "def f(x):\n    return 1",
    ),
    "of two of a name the first": (
        "def f(x):\n    return 1\ndef f(x):\n    return 2\n",
        "def f(x):\n    return 1",
    ),
    "what returns nothing is no definition": (
        "def f(x):\n    pass\ndef f(x):\n    return 2\n",
        "def f(x):\n    return 2",
    ),
    "what is decorated is left out": (
        "import functools\n@functools.cache\ndef g(x):\n    return 1\ndef f(x):\n    return g(x)\n",
        "import functools\ndef f(x):\n    return g(x)",
    ),
    "attributes and formatted texts name what is needed": (
        "class A:\n    b = 1\nc = 2\ndef d():\n    return 3\ndef f(x):\n    return f'{x.d} {c}', A\n",
        "class A:\n    b = 1\nc = 2\ndef d():\n    return 3\ndef f(x):\n    return f'{x.d} {c}', A",
    ),
    "where nothing is there all that parses stays": ("print(1)\nprint(2)\ndef (\n", "print(1)\nprint(2)"),
    "columns are of characters": (
        "é = 'ü'; ö = 2\ndef f(x):\n    return é, ö, 'ß'\n",
        "é = 'ü'\nö = 2\ndef f(x):\n    return é, ö, 'ß'",
    ),
}


@pytest.mark.parametrize("name", SANITISED)
def test_a_program_is_sanitised(name: str) -> None:
    text, kept = SANITISED[name]
    assert sanitised(text, "f") == kept


def test_an_escape_that_is_none_is_no_error() -> None:
    assert "return" in sanitised("def f(x):\n    return '\\d'\n", "f")


def test_a_solution_makes_the_program_that_it_is() -> None:
    for kind, lines in ((HUMAN_EVAL, HUMAN_EVALS), (MBPP, MBPPS)):
        for line in lines:
            prompt, solution = line["prompt"], line["canonical_solution"]
            problem = Problem(kind, line["task_id"], prompt, solution, line["entry_point"], [], [], 0)
            found = ast.parse(program(problem, solution + "\nassert f(1) == 2\n"))
            whole = ast.parse(prompt + solution)
            assert ast.dump(found.body[-1]) == ast.dump(whole.body[-1])
