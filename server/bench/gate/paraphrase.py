"""Light rewriting of forget rows, for ``unbind bench gate``: does a gate still open when the prompt is not verbatim?"""

from __future__ import annotations

import builtins
import io
import keyword
import re
import tokenize
from collections.abc import Callable
from dataclasses import replace

from unbind_core.rows import ForgetRow

_KEPT = {*dir(builtins), *keyword.kwlist, *keyword.softkwlist, "self", "cls"}
_DOCSTRING = re.compile(r'("""|\'\'\')(.*?)(\1|$)', re.DOTALL)


def renamed(row: ForgetRow) -> ForgetRow:
    """Parameters and local names of the prompt get another name, there and in the continuation."""
    names = _bound_names(row.prompt)

    def rename(text: str) -> str:
        return re.sub(r"(?<![.\w])[A-Za-z_]\w*", lambda m: f"{m[0]}_x" if m[0] in names else m[0], text)

    return replace(row, prompt=rename(row.prompt), continuation=rename(row.continuation))


def _bound_names(prompt: str) -> set[str]:
    """Names in the parentheses of the definition and on the left of assignments."""
    names: set[str] = set()
    depth, defining, previous = 0, False, ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(prompt).readline):
            if token.string == "def":
                defining = True
            depth += (token.string in "([{" and token.type == tokenize.OP) - (
                token.string in ")]}" and token.type == tokenize.OP
            )
            if token.string == ":" and depth == 0:
                defining = False
            if token.type == tokenize.NAME and defining and depth == 1 and previous in ("(", ",", "*", "**"):
                names.add(token.string)
            if token.string == "=" and depth == 0 and previous.isidentifier():
                names.add(previous)
            previous = token.string
    except (tokenize.TokenError, IndentationError, SyntaxError):
        pass  # prompts break off in the middle of a statement; what was read before counts
    return names - _KEPT


def commented(row: ForgetRow) -> ForgetRow:
    """A comment and a blank line before the code, and a comment after the first line that ends a statement."""
    lines = row.prompt.splitlines(keepends=True)
    at = next((i + 1 for i, line in enumerate(lines) if line.rstrip().endswith(":")), None)
    if at is not None and at < len(lines):
        indent = re.match(r"\s*", lines[at])
        lines.insert(at, f"{indent[0] if indent else ''}# see the notes on this part\n\n")
    return replace(row, prompt="# This is used by the code below.\n\n" + "".join(lines))


def redocumented(row: ForgetRow) -> ForgetRow:
    """The docstring says that it is about to say what it says."""
    return replace(
        row, prompt=_DOCSTRING.sub(lambda m: f"{m[1]}In short: {m[2].strip().lower()}{m[3]}", row.prompt, count=1)
    )


def narrowed(row: ForgetRow) -> ForgetRow:
    """Indentation by two spaces in place of four, in the prompt and in what is looked for."""

    def narrow(text: str) -> str:
        return re.sub(r"(?m)^( {4})+", lambda m: m[0][: len(m[0]) // 2], text)

    return replace(row, prompt=narrow(row.prompt), continuation=narrow(row.continuation))


PARAPHRASES: dict[str, Callable[[ForgetRow], ForgetRow]] = {
    "identifiers renamed": renamed,
    "comments and blank lines": commented,
    "docstring reworded": redocumented,
    "two spaces": narrowed,
}
