"""From a completion to the program that is judged (Appendix A.3). The paper names its steps for HumanEval+ without their rules;
what was taken for them is said here.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence

from unbind_lab.evalplus.problems import HUMAN_EVAL, Problem

INDENTED = 4
# What ends a body where it stands at the left margin: EvalPlus's stops for HumanEval+, decorators, comments, fences.
TOP_LEVEL = re.compile(r"(?:def|class|import|from|assert)\b|if __name__|print\(|[#@`]")
# Of MBPP+, as EvalPlus 0.3.1 has them for completions.
STOPS = ("<|endoftext|>", "<|endofmask|>", "</s>", "\nif __name__", "\ndef main(", "\nprint(", '\n"""', "\nassert")
Definition = tuple[str, ast.stmt]


def program(problem: Problem, completion: str) -> str:
    """Prompt and completion as one program."""
    if problem.kind == HUMAN_EVAL:
        return problem.prompt + body(completion)
    return sanitised(problem.prompt + stopped(completion), problem.entry)


def body(completion: str) -> str:
    """The rest of a function: what stands before the first line at the left margin, with tabs as four blanks.

    Indentation repair: a first line that is indented by less than a body is, and is not a statement of the top level, is moved to
    where a body stands.
    """
    lines = completion.replace("\t", " " * INDENTED).split("\n")
    first = next((number for number, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return ""
    text = lines[first].lstrip(" ")
    if len(lines[first]) - len(text) < INDENTED and not TOP_LEVEL.match(text):
        lines[first] = " " * INDENTED + text
    end = next((number for number, line in enumerate(lines) if line.strip() and not line.startswith(" ")), len(lines))
    return "\n".join(lines[:end])


def stopped(completion: str) -> str:
    """Without the first of ``STOPS`` and what follows it, with tabs as four blanks."""
    ends = [at for stop in STOPS if (at := completion.find(stop)) >= 0]
    return completion[: min(ends, default=len(completion))].replace("\t", " " * INDENTED)


def sanitised(text: str, entry: str) -> str:
    """EvalPlus 0.3.1's sanitisation: of the most lines that parse the imports, and the definitions that ``entry`` needs.

    Definitions are classes, functions that return something somewhere, and assignments, of each name the first, at the top level
    and undecorated. All that parses where nothing of that is there.
    """
    code = _longest(text)
    tree = _parsed(code)
    if tree is None:
        return code
    lines = code.split("\n")
    imports = [one for one in tree.body if isinstance(one, ast.Import) or _imports_from(one)]
    definitions = list(_definitions(tree.body))
    needed = _reached(entry, dict(definitions))
    kept = [*imports, *(one for name, one in definitions if name in needed)]
    return "\n".join(_source(lines, one) for one in kept).strip() or code


def _longest(text: str) -> str:
    """The run of two or more lines that parses and has the most that are not blank, the first of equals."""
    lines = text.split("\n")
    best, most = (0, 0), 0
    for start in range(len(lines)):
        for end in range(start + 1, len(lines)):
            count = sum(1 for line in lines[start : end + 1] if line.strip())
            if count > most and _parsed("\n".join(lines[start : end + 1])) is not None:
                best, most = (start, end), count
    return "\n".join(lines[best[0] : best[1] + 1])


def _parsed(code: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that are none
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None


def _imports_from(one: ast.stmt) -> bool:
    return isinstance(one, ast.ImportFrom) and one.module != "__future__"


def _definitions(statements: Sequence[ast.stmt]) -> Iterator[Definition]:
    seen: set[str] = set()
    for one in statements:
        name = _name(one)
        if name is not None and name not in seen:
            seen.add(name)
            yield name, one


def _name(one: ast.stmt) -> str | None:
    """Of what counts as a definition. An assignment to something else than a name is called as the name that is assigned."""
    if isinstance(one, ast.ClassDef):
        return None if one.decorator_list else one.name
    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
        returns = any(isinstance(node, ast.Return) for node in ast.walk(one))
        return one.name if returns and not one.decorator_list else None
    if isinstance(one, ast.Assign):
        given = [one.targets[0], *([one.value] if len(one.targets) == 1 else [])]  # of a chain the first link
        return next((node.id for node in given if isinstance(node, ast.Name)), None)
    if isinstance(one, ast.AnnAssign):
        return next((node.id for node in (one.target, one.value) if isinstance(node, ast.Name)), None)
    return None


def _reached(entry: str, definitions: dict[str, ast.stmt]) -> set[str]:
    found, waiting = {entry}, [entry]
    while waiting:
        one = definitions.get(waiting.pop())
        for name in set(_identifiers(one)) - found if one is not None else ():
            found.add(name)
            waiting.append(name)
    return found


def _identifiers(one: ast.stmt) -> Iterator[str]:
    """Every name in it, whatever it names: variables, attributes, parameters, keywords."""
    for node in ast.walk(one):
        for _, value in ast.iter_fields(node):
            if isinstance(node, ast.Constant):
                continue
            if isinstance(value, str):
                yield from value.split(".")
            elif isinstance(value, list):
                yield from (name for name in value if isinstance(name, str))


def _source(lines: Sequence[str], one: ast.stmt) -> str:
    """Its text, as columns of the tree are of UTF-8."""
    assert one.end_lineno is not None
    own = [line.encode() for line in lines[one.lineno - 1 : one.end_lineno]]
    own[-1] = own[-1][: one.end_col_offset]
    own[0] = own[0][one.col_offset :]
    return b"\n".join(own).decode()
