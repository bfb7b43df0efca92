"""The functions in a source file of any language whose grammar is here; tree-sitter parses it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import tree_sitter
import tree_sitter_javascript
import tree_sitter_python


@dataclass(frozen=True)
class Language:
    """``functions``: nodes that are one; ``around``: what a function may stand in and is then taken with, as its decorators."""

    grammar: Callable[[], object]
    suffixes: tuple[str, ...]
    functions: frozenset[str]
    around: frozenset[str]


LANGUAGES = {
    "python": Language(
        tree_sitter_python.language, (".py",), frozenset({"function_definition"}), frozenset({"decorated_definition"})
    ),
    "javascript": Language(
        tree_sitter_javascript.language,
        (".js", ".mjs"),
        frozenset(
            {
                "function_declaration",
                "generator_function_declaration",
                "method_definition",
                "function_expression",
                "arrow_function",
            }
        ),
        # A function that is a value is a row with what it becomes: `Parser.prototype.next = function () { ... }`.
        frozenset(
            {"assignment_expression", "expression_statement", "lexical_declaration", "variable_declaration", "pair"}
            | {"variable_declarator", "export_statement"}
        ),
    ),
}
NAMELESS = frozenset({"function_expression", "arrow_function"})


@dataclass(frozen=True)
class Function:
    """``text`` as it stands in the file, dedented, with its line end; ``line`` from 1."""

    line: int
    text: str


@cache
def _parser(language: str) -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(LANGUAGES[language].grammar()))


def functions(language: str, text: str) -> Iterator[Function]:
    """Outermost first, in the order of the file; none of a file that does not parse, and no function without a name."""
    known, data = LANGUAGES[language], text.encode()
    tree = _parser(language).parse(data)
    if tree.root_node.has_error:
        return
    waiting = [tree.root_node]
    while waiting:
        node = waiting.pop()
        waiting += reversed(node.children)
        if node.type not in known.functions:
            continue
        whole = node
        while whole.parent is not None and whole.parent.type in known.around:
            whole = whole.parent
        if node.type in NAMELESS and whole is node:
            continue  # an argument of a call
        start = data.rfind(b"\n", 0, whole.start_byte) + 1
        if data[start : whole.start_byte].strip():
            continue  # something else stands in front of it
        yield Function(whole.start_point[0] + 1, textwrap.dedent(data[start : whole.end_byte].decode()).rstrip() + "\n")
