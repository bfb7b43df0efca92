"""The same verdicts as EvalPlus's own, and the same programs of completions: where EvalPlus 0.3.1 is importable, and
EVALPLUS_FILES names the folder of its files.

By default on every sixteenth task; EVALPLUS_STEP=1 takes all, which takes half an hour of a core.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unbind_lab.evalplus.answers import sanitised
from unbind_lab.evalplus.judge import Part, solves
from unbind_lab.evalplus.oracles import PRESENT
from unbind_lab.evalplus.problems import HUMAN_EVAL, MBPP, Problem, read

FOLDER = os.environ.get("EVALPLUS_FILES", "")
STEP = int(os.environ.get("EVALPLUS_STEP", "16"))
AVAILABLE = bool(FOLDER) and importlib.util.find_spec("evalplus") is not None
OUTER = 60.0  # EvalPlus's own, where the paper has 10 s
COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.In: ast.NotIn}
COUNTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv}
WRAPPED = ("tuple", "list", "set", "str", "float", "sorted", "bool", "iter", "print")
BODIES = ("return None", "raise ValueError", "return []", "exit()", "import sys; sys.exit(0)", "while True: pass", "")


def mutants(program: str, entry: str, draw: random.Random) -> Iterator[str]:
    """Programs that go wrong in one place each."""
    for kind in ("constant", "comparison", "operator", "wrapped", "body"):
        tree = ast.parse(program)
        function = next(one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == entry)
        if _changed(kind, function, draw):
            yield ast.unparse(ast.fix_missing_locations(tree))


def _changed(kind: str, function: ast.FunctionDef, draw: random.Random) -> bool:
    places = [one for one in ast.walk(function) if _is(kind, one)]
    if kind == "body":
        function.body = ast.parse(draw.choice(BODIES) or "pass").body
    if not places:
        return kind == "body"
    place: Any = draw.choice(places)
    if kind == "constant":
        place.value += draw.choice((-1, 1))
    elif kind == "comparison":
        place.ops[0] = COMPARED[type(place.ops[0])]()
    elif kind == "operator":
        place.op = COUNTED[type(place.op)]()
    else:
        place.value = ast.Call(ast.Name(draw.choice(WRAPPED), ast.Load()), [place.value], [])
    return True


def _is(kind: str, one: ast.AST) -> bool:
    return (
        (kind == "constant" and isinstance(one, ast.Constant) and type(one.value) in (int, float))
        or (kind == "comparison" and isinstance(one, ast.Compare) and type(one.ops[0]) in COMPARED)
        or (kind == "operator" and isinstance(one, ast.BinOp) and type(one.op) in COUNTED)
        or (kind == "wrapped" and isinstance(one, ast.Return) and one.value is not None)
    )


@pytest.mark.parametrize("entry", ["f", "g"])
def test_mutants_are_programs_of_their_own(entry: str) -> None:
    program = "def f(x):\n    return x + 1 if x < 3 else 2\ndef g(x):\n    return f(x) * 2\n"
    found = list(mutants(program, entry, random.Random(0)))
    assert len(found) == len(set(found)) == {"f": 5, "g": 4}[entry]
    assert all(ast.dump(ast.parse(one)) != ast.dump(ast.parse(program)) for one in found)


def completions(problem: Problem) -> Iterator[str]:
    """Prompt and solution, cut at several places, with what models write behind."""
    whole = problem.prompt + problem.solution
    for end in (len(whole), *range(len(problem.prompt) + 1, len(whole), max(1, len(problem.solution) // 7))):
        for behind in (
            "",
            "\n\ndef test():\n    pass\ntest()\n",
            "\nx = 1\ny, z = x\n@x\ndef u():\n    return x\n# end\n",
            "\n```\nThis is",
        ):
            yield whole[:end] + behind
    helper = problem.solution.replace(problem.entry, "helper_of_it")
    yield f"import os\n{problem.prompt}LIMIT: int = 3\n{helper}\ndef {problem.entry}(*a):\n    return helper_of_it(*a) or LIMIT\n"


if AVAILABLE:
    PROBLEMS = {kind: problems[::STEP] for kind, problems in read(Path(FOLDER)).items()}

    def _theirs(problem: Problem, program: str, inputs: Any, expected: Any, seconds: Any) -> bool:
        check = importlib.import_module("evalplus.eval").untrusted_check
        kind = {HUMAN_EVAL: "humaneval", MBPP: "mbpp"}[problem.kind]
        told, _ = check(kind, program, inputs, problem.entry, expected, problem.atol, seconds, fast_check=True)
        return bool(told == "pass")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "problem", [one for problems in PROBLEMS.values() for one in problems], ids=lambda one: one.name
    )
    def test_verdicts_are_evalplus_s(problem: Problem) -> None:
        trusted = importlib.import_module("evalplus.gen.util").trusted_exec
        whole = problem.prompt + problem.solution
        programs = [whole, *mutants(whole, problem.entry, random.Random(problem.name))]
        for inputs in (problem.base, problem.plus):
            expected, seconds = trusted(
                whole, inputs, problem.entry, record_time=True, output_not_none=problem.entry in PRESENT
            )
            for program in programs:
                own = solves(Part(problem, inputs), program, seconds=OUTER)
                assert own == _theirs(problem, program, inputs, expected, seconds), program

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")  # of the solutions' escapes
    @pytest.mark.parametrize("problem", PROBLEMS[MBPP], ids=lambda one: one.name)
    def test_programs_are_evalplus_s(problem: Problem) -> None:
        sanitize = importlib.import_module("evalplus.sanitize").sanitize
        for text in completions(problem):
            own, theirs = sanitised(text, problem.entry), sanitize(text, entrypoint=problem.entry)
            assert own == theirs or ast.dump(ast.parse(own)) == ast.dump(ast.parse(theirs)), text
