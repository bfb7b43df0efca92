"""The guard alone, without a module: an answer ends before it completes a run of 50 lexemes of a protected row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unbind_core import guard as code
from unbind_core.errors import RowsTooShort
from unbind_core.guard.book import GuardBook
from unbind_core.guard.index import RUN, Secret, build_index
from unbind_core.guard.textguard import TextGuard
from unbind_core.rows import ForgetRow
from unbind_lab.filters.filter import Absent, Filter, Options
from unbind_lab.served import Served
from unbind_lab.setting import Bench

NAME = "lab"


def build(bench: Bench, rows: Sequence[ForgetRow], options: Options, folder: Path) -> Served:
    """As in front of another server (action ``stop``). It judges texts, so under teacher forcing it changes nothing. Raises Absent
    where no row holds a run.
    """
    tokenizer = bench.full.tokenizer
    secret = Secret(b"of no secret rows")
    try:
        index = build_index((row.prompt + row.continuation for row in rows), name=NAME, secret=secret, action="stop")
    except RowsTooShort:
        raise Absent(
            f"setting: no row to forget holds {RUN} lexemes, the run that is barred; leave guard out"
        ) from None
    guards = GuardBook.of(secret, [index]).select([NAME])
    assert guards is not None

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    def cut(prompt: Sequence[int], answer: list[int]) -> list[int]:
        guard = TextGuard(guards, lambda: text(prompt))
        sent = guard.push(text(answer)) + guard.flush()
        return (
            answer
            if not guard.blocked
            else answer[: sum(len(text(answer[:i])) <= len(sent) for i in range(1, len(answer) + 1))]
        )

    return Served(bench.full.model, tokenizer, cut=cut)


GUARD = Filter("guard", build, further=(code,))
