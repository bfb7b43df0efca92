"""What all commands share: how progress and errors are shown, and what is written. It loads no model, nor what models need."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from server.registry.refusals import AWAY, unanswered
from unbind_core.errors import UnbindError
from unbind_core.files import require_writable
from unbind_core.progress import Progress, silent

N = TypeVar("N", int, float)
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
LINE_SECONDS = 20.0
# What tells a terminal to do something in place of showing it, and what turns the order of what is shown around. Line ends and tabs
# are left, and what the library itself leaves out.
_CONTROLS = re.compile(r"[\x00-\x06\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Plain(Console):
    """Prints text as it is, brackets included, and its control characters as escapes: a module file, a notice or an answer of a
    server may come from anybody. What has a style is a ``Text``, of words of ours alone.
    """

    def render_str(self, text: str, **how: Any) -> Text:
        """A text as it will be shown; all that is printed and no ``Text`` goes through here."""
        return super().render_str(visible(text), **how)


def visible(text: str) -> str:
    """The text with control characters as Python would write them."""
    return _CONTROLS.sub(lambda control: ascii(control[0])[1:-1], text)


screen = Plain(markup=False, emoji=False)
notes = Plain(stderr=True, markup=False, emoji=False)  # progress and remarks, so that --json output can be piped


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what a user can mend into one line and exit code 1; everything else keeps its traceback."""
    try:
        yield
    except (UnbindError, OSError) as error:
        show_error(error)
        raise typer.Exit(1) from error
    except AWAY as error:
        show_error(unanswered(error))
        raise typer.Exit(1) from error
    except UnicodeEncodeError as error:
        if not "\udc80" <= error.object[error.start] <= "\udcff":  # as Python keeps what is no text in an argument
            raise
        show_error(UnbindError("an argument holds bytes that are no UTF-8; give it as UTF-8, in such a locale"))
        raise typer.Exit(1) from error


def show_error(error: Exception) -> None:
    """One line on stderr that says what is wrong, as it is written."""
    notes.print(Text("error:", style="bold red"), str(error), soft_wrap=True, highlight=False)


@contextmanager
def progress_bars(quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """A callback that draws one bar a stage on stderr, where that is no terminal a line now and then; nothing if ``quiet``."""
    if quiet or not notes.is_terminal:
        yield silent if quiet else Lines(time.monotonic)
        return
    columns = (
        TextColumn("{task.description:32}", markup=False),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.fields[note]}", markup=False),
    )
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, TimeElapsedColumn(), console=notes, transient=True) as bars:

        def show(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(progress.stage, total=progress.total, note="")
            bars.update(tasks[progress.stage], completed=progress.done, total=progress.total, note=progress.message)

        yield show


class Lines:
    """Says on stderr which stages are under way, LINE_SECONDS after it began or said so last: for logs of long runs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._spoke = clock, clock()
        self._under_way: dict[str, Progress] = {}  # the outermost first

    def __call__(self, progress: Progress) -> None:
        """Take a step in."""
        self._under_way[progress.stage] = progress
        if self._clock() - self._spoke >= LINE_SECONDS:
            self._spoke = self._clock()
            told = (f"{one.stage} {one.done}/{one.total} {one.message}".rstrip() for one in self._under_way.values())
            notes.print("; ".join(told), highlight=False, soft_wrap=True)
        if progress.done >= progress.total:
            del self._under_way[progress.stage]


def numbers(text: str | None, kind: Callable[[str], N], option: str, example: str) -> tuple[N, ...] | None:
    """The numbers of a comma-separated option, None where it is not given. Raises UnbindError naming the option."""
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise UnbindError(f"{option}: '{text}' is not a list of numbers such as {example}") from None


def require_target(option: str, path: Path, *, folder: bool = False) -> None:
    """Make sure that an option's file, or files in its folder, can be written, before the work that goes into it.

    Raises UnbindError.
    """
    try:
        require_writable(path / ".probe" if folder else path)  # which is never there
    except OSError as error:
        other = f"name another {'folder' if folder else 'file'}"
        raise UnbindError(f"{option}: {path} cannot be written ({error.strerror}); {other}") from error


def shown_field(field: str, value: Any) -> Any:
    """A field's value for people: what the API tells in seconds since 1970 as a day and a time."""
    if field.endswith("_at") and isinstance(value, float):
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return value


def show_lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A line a row, cut and folded nowhere: names and ids are copied, and in a pipe a line is what is read."""
    lines = [headings, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        screen.print(text.rstrip(), highlight=False, soft_wrap=True)


def show_fields(fields: Iterable[tuple[str, Any]]) -> None:
    """A line a field, cut nowhere: digests are copied."""
    for name, value in fields:
        screen.print(f"{name:18} {value}", highlight=False, soft_wrap=True)


def write_json(value: Any) -> None:
    """Plain JSON on stdout, for scripts."""
    typer.echo(json.dumps(value, indent=2))
