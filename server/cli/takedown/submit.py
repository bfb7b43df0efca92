"""``unbind takedown submit``: a forget set to a running server, as one takedown or in parts."""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from server.cli.client import LOCAL, Client, Key, Url
from server.cli.console import AsJson, clear_errors, screen, write_json
from server.cli.takedown.shown import Watch, follow, show_answer, show_ended, warn
from server.registry.lifecycle import SCOPE
from unbind_core import UnbindError
from unbind_core.rows import json_lines

NO_SCOPE = "none"
NONE_GIVEN = "options.scope: none was given"  # how the warning begins that is for those who said nothing


def submit(
    file: Annotated[
        Path, typer.Argument(help="JSONL of rows, or .zip or .tar.gz of source files.", exists=True, dir_okay=False)
    ],
    name: Annotated[str, typer.Option(help="Name of the module.")],
    claimant: Annotated[str | None, typer.Option(help="Who asks for it; the evidence says so.")] = None,
    work: Annotated[str | None, typer.Option(help="What it is about: a title or a link.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="Number or name of the claimant's notice; no checkpoint, as of `unbind fit`.")
    ] = None,
    received_at: Annotated[str | None, typer.Option(help="When the notice came, in any words.")] = None,
    include: Annotated[str | None, typer.Option(help="Glob of files in an archive; * matches / too.")] = None,
    exclude: Annotated[str | None, typer.Option(help="Glob of files to leave out.")] = None,
    activation: Annotated[str, typer.Option(help="auto, manual or shadow.")] = "auto",
    scope: Annotated[
        str | None,
        typer.Option(help="Enforced for: global, profile:NAME or key:ID; none: for no request that does not name it."),
    ] = None,
    effective_at: Annotated[str | None, typer.Option(help="ISO 8601 with a zone.")] = None,
    expires_at: Annotated[str | None, typer.Option(help="ISO 8601 with a zone.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partitions.")] = 0,
    gate: Annotated[
        str, typer.Option(help="auto; paper for the paper's gate; paper-strict for exactly the published fit.")
    ] = "auto",
    policy: Annotated[
        str | None,
        typer.Option(help="rewrite: other code is written; silent: the answer ends. rewrite with gate auto."),
    ] = None,
    effort: Annotated[
        float, typer.Option(help="Share of the training steps; below 1 for a quick look. Of gate auto.")
    ] = 1.0,
    protect: Annotated[
        str | None, typer.Option(help="both, guard or module; both where a row is long enough for a guard.")
    ] = None,
    guard_action: Annotated[str | None, typer.Option(help="steer, stop or report; steer where none is given.")] = None,
    guard_run: Annotated[
        int | None, typer.Option(help="Lexemes of a run that no answer holds; 50, and 12 characters of secrets.")
    ] = None,
    guard_bars: Annotated[int | None, typer.Option(help="Tokens that steering bars before it stops; 3.")] = None,
    guard_fold: Annotated[bool, typer.Option(help="Runs with other names are the same run.")] = False,
    guard_secrets: Annotated[
        bool, typer.Option(help="Rows are secrets, as keys: the continuation of each is guarded, letter by letter.")
    ] = False,
    split: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Post takedowns NAME-1, NAME-2 and so on of at most so many rows each: without a guard many rows hold less.",
        ),
    ] = None,
    replace: Annotated[bool, typer.Option(help="Make the next version of a name that is in use.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only tell rows, positions, memory, disk and time.")] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="A word of your own: the same command with it again posts nothing twice.")
    ] = None,
    watch: Watch = False,
    url: Url = LOCAL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Post a forget set, whose guard holds from then on; prints the job that makes its module."""
    if scope is None and not as_json and at_terminal():
        scope = _ask_scope()
    notice = {"claimant": claimant, "work": work, "reference": reference, "received_at": received_at}
    asked = {
        "action": guard_action,
        "run": guard_run,
        "bars": guard_bars,
        "fold": guard_fold or None,
        "secrets": guard_secrets or None,
    }
    guard = {name: value for name, value in asked.items() if value is not None} or None
    options = {
        "protect": protect,
        "guard": guard,
        "activation": activation,
        "scope": None if scope == NO_SCOPE else scope,
        "effective_at": effective_at,
        "expires_at": expires_at,
        "seed": seed,
        "gate": gate,
        "policy": policy,
        "effort": effort if effort != 1 else None,
        "replace": replace,
        "dry_run": dry_run,
    }
    fields = {
        "notice": _given(notice),
        "options": _given(options),
        **({"include": include} if include else {}),
        **({"exclude": exclude} if exclude else {}),
    }
    answers: list[dict[str, Any]] = []
    with clear_errors(), ExitStack() as stack:
        client = Client(url, key)
        parts = [(name, file)] if split is None else stack.enter_context(_parts(file, name, split))
        several = len(parts) > 1
        if several and not dry_run:  # a row that is refused in the last must not leave the first in force
            idempotency_key = idempotency_key or secrets.token_hex(8)  # to go on with, where a post fails all the same
            tried = {**fields, "options": _given({**options, "dry_run": True})}
            for called, rows in parts:
                _tried(client, {"name": called, **tried}, rows)
        for number, (called, rows) in enumerate(parts, 1):
            own = "" if split is None else f"-{number}"
            headers = {"Idempotency-Key": f"{idempotency_key}{own}"} if idempotency_key else {}
            given = {"name": called, **fields}
            if several and dry_run:
                answer = _tried(client, given, rows)
            elif several:
                try:
                    answer = client.upload("/takedowns", given, rows, headers)
                except UnbindError as error:
                    if as_json and answers:
                        write_json(answers)
                    raise _stopped(called, error, answers, idempotency_key) from None
            else:
                answer = client.upload("/takedowns", given, rows, headers)
            if scope == NO_SCOPE:  # as was said; that a version which binds is superseded is still told
                answer["warnings"] = [said for said in answer["warnings"] if not said.startswith(NONE_GIVEN)]
            if not as_json:
                show_answer(answer)  # before it is watched, too: the jobs' table has neither takedown nor guard
                warn(answer)
            answers.append(answer)
        jobs = [follow(client, one["job_id"], as_json) for one in answers] if watch and not dry_run else []
    if jobs:
        show_ended(jobs, as_json, split is None)
    elif as_json:
        write_json(answers[0] if split is None else answers)


@contextmanager
def _parts(file: Path, name: str, most: int) -> Iterator[list[tuple[str, Path]]]:
    """Names and files of the rows of ``file`` in parts of one size, but for a row; under its own name where one part is enough.
    A row keeps its line number, behind blank lines, so that what is said of it holds in ``file``. Raises UnbindError for what is
    no JSONL.
    """
    if file.name.endswith((".zip", ".gz", ".tgz", ".tar")):
        raise UnbindError(f"--split: '{file.name}' is an archive; give the rows as JSONL, or post it as one takedown")
    lines = json_lines(file.read_bytes(), file.name)
    rows = [place for place, line in enumerate(lines) if line.strip()]
    count = max(1, math.ceil(len(rows) / most))
    if count == 1:
        yield [(name, file)]
        return
    with TemporaryDirectory(prefix="unbind-") as folder:
        parts = []
        for number in range(count):
            part = Path(folder) / f"{name}-{number + 1}.jsonl"
            own = rows[len(rows) * number // count : len(rows) * (number + 1) // count]
            text = "\n" * own[0] + "".join(f"{line}\n" for line in lines[own[0] : own[-1] + 1])
            part.write_text(text, encoding="utf-8")
            parts.append((part.stem, part))
        yield parts


def _tried(client: Client, given: dict[str, str], rows: Path) -> dict[str, Any]:
    """The answer to a dry run of one part. Raises UnbindError that names the part."""
    try:
        answer: dict[str, Any] = client.upload("/takedowns", given, rows, {})
    except UnbindError as error:
        raise UnbindError(f"{given['name']}: {error}; nothing was posted") from None
    return answer


def _stopped(called: str, error: UnbindError, answers: Sequence[dict[str, Any]], key: str | None) -> UnbindError:
    """What is said where a post fails after the parts were checked: what is there by now, and how the rest follows."""
    posted = ", ".join(f"{one['module']} ({one['takedown_id']})" for one in answers) or "nothing"
    return UnbindError(
        f"{called}: {error}; posted before it, and kept: {posted}. To post the rest, mend that and give the same command and rows "
        f"with --idempotency-key {key}"
    )


def at_terminal() -> bool:
    """Whether somebody sits there to be asked: never in a pipe, a cron job or a service."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask_scope() -> str:
    """The scope, asked for on a terminal; ``none`` for none."""
    screen.print(
        "Which requests must it bind?\n"
        "  none           only those that name it: it is available, not enforced\n"
        "  global         every request\n"
        "  profile:NAME   every request under a profile\n"
        "  key:ID         every request with a key",
        highlight=False,
    )
    while True:
        scope = str(typer.prompt("scope", default=NO_SCOPE)).strip()
        if scope == NO_SCOPE or re.fullmatch(SCOPE, scope):
            return scope
        screen.print(f"'{scope}' is none of these", highlight=False)


def _given(values: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in values.items() if value is not None})
