"""Programs are judged by what they give, with EvalPlus's tolerances and special tasks, and cannot declare themselves right."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest

from unbind_core.errors import UnbindError
from unbind_lab.evalplus.judge import Part, judge, solution, solves
from unbind_lab.evalplus.problems import HUMAN_EVAL, MBPP, Problem
from unbind_lab.tasks.harness import Passed
from unbind_lab.tasks.values import LARGE

GIB = 1 << 30


def problem(solution: str, inputs: Sequence[Any], entry: str = "f", kind: str = MBPP, atol: float = 0) -> Problem:
    return Problem(kind, "Mbpp/900", "", solution, entry, [[one] for one in inputs], [], atol)


def right(one: Problem, program: str, **how: Any) -> bool:
    return solves(Part(one, one.base), program, **{"memory": GIB, **how})


def returns(value: str, entry: str = "f") -> str:
    return f"def {entry}(x):\n    return {value}\n"


def test_base_and_extended_inputs_are_told_apart() -> None:
    one = Problem(HUMAN_EVAL, "HumanEval/900", "def f(x):\n", "    return x * x\n", "f", [[2]], [[3], [-1]], 0)
    programs = [
        "def f(x):\n    return x * x\n",
        "def f(x):\n    return x + x\n",
        "def f(x):\n    return 9\n",
        "",
        "def f(:",
    ]
    assert judge([one] * 5, programs, memory=GIB) == [
        Passed(True, True),
        Passed(True, False),
        *[Passed(False, False)] * 3,
    ]


def test_floats_have_a_tolerance_from_the_first_on() -> None:
    one = problem(returns("x / 3"), [1, 2, 7.5])
    assert right(one, returns("x / 3 * (1 + 1e-9)")) and not right(one, returns("x / 3 * (1 + 1e-5)"))
    assert right(problem(returns("x / 3"), [1], atol=1e-4), returns("x / 3 + 5e-5"))
    assert not right(problem(returns("x + 1"), [1e9]), returns("str(x + 1)"))
    exact = problem(returns("10**9"), [1])
    assert not right(exact, returns("10**9 + 1"))  # as no float is near, there is no tolerance
    mixed = problem(returns("[0.5, 10**9][x]"), [0, 1])
    assert right(mixed, returns("[0.5, 10**9 + 1][x]"))  # a relative one of 1e-7 behind a float
    assert not right(mixed, returns("[0.5, 1e9 + 1][x]"))  # and for the same type alone
    assert right(mixed, returns("[0.5, 1e9][x]"))  # what is equal need not be of it
    listed = problem(returns("[x / 3, 1.0]"), [1])
    assert right(listed, returns("[x / 3 + 1e-9, 1]")) and not right(listed, returns("(x / 3 + 1e-9, 1.0)"))
    assert not right(listed, returns("[x / 3 + 1e-9]")) and not right(listed, returns("[float('nan'), 1.0]"))


@pytest.mark.parametrize(
    ("value", "same", "other"),
    [
        ("{1, 2}", "frozenset({2, 1})", "[1, 2]"),
        ("(1, (2, 'a'))", "(1.0, (True + 1, 'a'))", "[1, (2, 'a')]"),
        ("{'a': [1], 2: None}", "__import__('collections').OrderedDict([(2, None), ('a', [1])])", "{'a': [1]}"),
        ("2 ** 5000", "1 << 5000", "2.0"),
        ("2 + 1j", "complex(2, 1)", "2"),
        ("b'ab'", "bytearray(b'ab')[:] and b'ab'", "'ab'"),
        ("float('inf')", "1e999", "-1e999"),
        ("[1, 2]", "type('L', (list,), {})([1, 2])", "type('L', (list,), {'__eq__': lambda *_: True})([1])"),
        ("0.5", "__import__('fractions').Fraction(1, 2)", "__import__('decimal').Decimal('0.51')"),
        ("{1, 2}", "{1: 0, 2: 0}.keys()", "{1: 0}.keys()"),
        ("'\\ud800é'", "chr(0xd800) + 'é'", "'é'"),
    ],
)
def test_values_are_compared_in_full(value: str, same: str, other: str) -> None:
    one = problem(returns(value), [1])
    assert right(one, returns(same)) and not right(one, returns(other))


def test_large_values_are_too() -> None:
    size = LARGE + 5
    one = problem(returns(f"[n / 2 for n in range({size})]"), [1])
    assert '["digest"' in solution(Part(one, one.base), GIB).rights[0].value
    assert right(one, returns(f"[n / 2 for n in range({size})]"))
    assert right(one, returns(f"[n // 2 if n % 2 == 0 else n / 2 for n in range({size})]"))  # equal, of other types
    assert right(one, returns(f"[n / 2 + 1e-9 for n in range({size})]"))
    assert not right(one, returns(f"[n / 2 for n in range({size - 1})] + [0.0]"))
    text = problem(returns(f"'a' * {size}"), [1])
    assert right(text, returns(f"'a' * {size}")) and not right(text, returns(f"'a' * {size - 1} + 'b'"))


def test_special_tasks_have_their_own_rules() -> None:
    shared = problem("def Diff(x):\n    return [1, 2]\n", [1], "Diff")
    assert right(shared, "def Diff(x):\n    return iter((2, 1, 1))\n") and not right(
        shared, "def Diff(x):\n    return [1]\n"
    )
    assert not right(shared, "def Diff(x):\n    return [[1]]\n")
    elsewhere = problem("def Diff(x):\n    return [1, 2]\n", [1], "Diff", HUMAN_EVAL)
    assert not right(elsewhere, "def Diff(x):\n    return [2, 1]\n")
    there = problem("import re\ndef check_str(x):\n    return re.search('a', x)\n", ["a", "b"], "check_str")
    assert right(there, "def check_str(x):\n    return 'a' in x\n")
    assert right(there, "def check_str(x):\n    return 1 if x == 'a' else None\n")
    assert not right(there, "def check_str(x):\n    return 0\n")
    always = problem("def are_equivalent(x):\n    return True\n", [1], "are_equivalent")
    assert right(always, "def are_equivalent(x):\n    return 5\n")
    assert not right(always, "def are_equivalent(x):\n    return 1 / 0\n")
    summed = problem("def sum_div(x):\n    return x\n", [6], "sum_div")
    assert right(summed, "def sum_div(x):\n    return 0\n") and not right(summed, "def sum_div(x):\n    return 1\n")
    surface = Problem(MBPP, "Mbpp/581", "", "def surface_Area(a, b):\n    return 33\n", "surface_Area", [[3, 4]], [], 0)
    for value, wanted in (("33", True), ("35", True), ("34", False), ("'35'", False)):
        assert (
            solves(Part(surface, surface.base), f"def surface_Area(a, b):\n    return {value}\n", memory=GIB) is wanted
        )
    digits = Problem(
        MBPP,
        "Mbpp/558",
        "",
        "def digit_distance_nums(a, b):\n    return 0\n",
        "digit_distance_nums",
        [[23, 156]],
        [],
        0,
    )
    for value, wanted in (("0", True), ("7", True), ("6", False)):
        program = f"def digit_distance_nums(a, b):\n    return {value}\n"
        assert solves(Part(digits, digits.base), program, memory=GIB) is wanted
    root = problem("def find_zero(x):\n    return -x[0] / x[1]\n", [[1, 2]], "find_zero", HUMAN_EVAL)
    assert not right(root, root.solution)  # EvalPlus 0.3.1 counts none of its inputs


def test_what_does_not_end_or_takes_too_much_fails() -> None:
    one = problem(returns("x"), [1, 2])
    begun = time.monotonic()
    assert not right(one, "def f(x):\n    while True:\n        pass\n")
    assert not right(one, "import time\ndef f(x):\n    time.sleep(30)\n    return x\n")
    assert time.monotonic() - begun < 20  # a second each, the limit of an input, and the start of two children
    stubborn = """
def f(x):
    while True:
        try:
            while True:
                pass
        except Exception:
            pass
"""
    assert not right(one, stubborn, seconds=0.5)
    assert not right(one, "def f(x):\n    y = bytearray(1 << 33)\n    return x\n")
    assert not right(one, "x = []\nwhile True:\n    x.append('a' * (1 << 20))\n", memory=GIB >> 1)
    assert not right(one, "def f(x):\n    return f(x)\n") and not right(
        one, "def f(x):\n    y = []\n    y.append(y)\n    return y\n"
    )


def test_what_is_printed_asked_or_ended_changes_nothing() -> None:
    one = problem(returns("x"), [1, 2])
    assert right(
        one, "import sys\nprint('[]' * 100000)\ndef f(x):\n    print(x)\n    sys.stderr.write('no')\n    return x\n"
    )
    assert right(
        one, "import math, re, json, typing, collections\nimport numpy as np\ndef f(x):\n    return np.int64(x)\n"
    )
    for last in (
        "exit()",
        "quit(0)",
        "raise SystemExit",
        "__import__('sys').exit(0)",
        "__import__('os')._exit(0)",
        "input()",
    ):
        assert not right(one, f"def f(x):\n    {last}\n    return x\n")
        assert not right(one, f"def f(x):\n    return x\n{last}\n")
    assert right(one, "def f(x):\n    return x\nif __name__ == '__main__':\n    raise ValueError\n")


def test_nothing_reaches_the_network_or_a_file(tmp_path: Any) -> None:
    (tmp_path / "secret").write_text("5")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        port = server.getsockname()[1]
        one = problem(returns("5"), [1])
        for harm in (
            f"__import__('socket').create_connection(('127.0.0.1', {port})) and 5",
            f"int(open({str(tmp_path / 'secret')!r}).read())",
            f"open({str(tmp_path / 'made')!r}, 'w').write('12345')",
            "__import__('os').fork() or 5",
            "__import__('subprocess').run(['true']) and 5",
        ):
            assert right(
                one, f"def f(x):\n    try:\n        return {harm}\n    except PermissionError:\n        return 5\n"
            )
            assert not right(one, f"def f(x):\n    return {harm}\n")
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not (tmp_path / "made").exists()


TAMPERING = {
    "equality": """
class Any:
    def __eq__(self, other):
        return True
    __hash__ = None
def f(x):
    return Any()
""",
    "builtins": """
import builtins
builtins.all = builtins.any = builtins.isinstance = lambda *a: True
def f(x):
    return 0
""",
    "what tells values": """
import sys
for module in list(sys.modules.values()):
    if hasattr(module, 'told'):
        module.told = lambda *a, **k: True
def f(x):
    return 0
""",
    "what is said": """
import os
def f(x):
    for fd in range(3, 9):
        try:
            os.write(fd, b'[[0, true]]')
        except OSError:
            pass
    os._exit(0)
""",
    "the caller's frame": """
import sys
def f(x):
    sys._getframe(1).f_locals['found'].append([0, 1])
    return 0
""",
    "the clock": """
import signal, time
signal.signal(signal.SIGALRM, signal.SIG_IGN)
def f(x):
    time.sleep(60)
    return x * 7
""",
    "exceptions": """
class E(BaseException):
    def __eq__(self, other):
        return True
def f(x):
    raise E
""",
}


@pytest.mark.parametrize("name", TAMPERING)
def test_a_program_cannot_declare_itself_right(name: str) -> None:
    one = problem(returns("x * 7"), [6])
    assert right(one, returns("x * 7")) and not right(one, TAMPERING[name], seconds=1.0)


def test_the_hook_stays_where_what_it_is_made_of_is_replaced() -> None:
    one = problem(returns("5"), [1])
    program = (
        "import builtins, sys\nbuiltins.isinstance = lambda *a: False\nbuiltins.PermissionError = KeyError\n"
        "m = sys.modules['unbind_lab.tasks.sandboxed']\nm.BARRED = ()\nm.WRITES = 0\nm.hook = None\n"
        "def f(x):\n    open('made', 'w')\n    return 5\n"
    )
    assert not right(one, program) and right(one, program.replace("    open('made', 'w')\n", ""))


def test_a_solution_that_fails_is_said() -> None:
    with pytest.raises(UnbindError, match="the solution of Mbpp/900 fails here; it may take 1 GiB and 600 s"):
        right(problem(returns("1 / 0"), [1]), returns("1"))
