"""Functional correctness (Appendix A.3): HumanEval+ and MBPP+, of which the files are the user's.

The stored prompt of a task, one greedy completion of at most 128 new tokens, and the program that it makes. A task is solved where
all base and all extended tests pass. UR of the main table then has four utilities, as eq. (12) has.
"""

from __future__ import annotations

from collections.abc import Sequence

from unbind_core.encoding import decode_behind, encode_prompt
from unbind_core.progress import ProgressCallback
from unbind_lab import evalplus as code
from unbind_lab import tasks as sandbox
from unbind_lab.evalplus.answers import program
from unbind_lab.evalplus.judge import judge
from unbind_lab.evalplus.problems import HUMAN_EVAL, MBPP, digests, read
from unbind_lab.protocols.main import COUNTED, Material, Record, Summary
from unbind_lab.protocols.protocol import Column, Protocol
from unbind_lab.served import Served
from unbind_lab.setting import Setting

NEW_TOKENS = 128
NAMES = {HUMAN_EVAL: "HE+", MBPP: "MBPP+"}


def records(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    """One a task: its ``role`` (the set), ``row`` and ``task``, what was ``written``, whether the ``base`` inputs and the ``plus``
    ones give what is right.
    """
    assert material.evalplus is not None, "files_of has been asked"
    found: list[Record] = []
    for kind, problems in read(material.evalplus).items():
        prompts = [encode_prompt(served.tokenizer, problem.prompt) for problem in problems]
        outputs = served.complete(prompts, NEW_TOKENS, progress)
        pairs = zip(prompts, outputs, strict=True)
        written = [decode_behind(served.tokenizer, *pair) for pair in pairs]
        programs = [program(problem, text) for problem, text in zip(problems, written, strict=True)]
        judged = judge(problems, programs, progress)
        for row, (problem, text, passed) in enumerate(zip(problems, written, judged, strict=True)):
            one = {"role": kind, "row": row, "task": problem.name, "written": text}
            found.append({**one, "base": passed.base, "plus": passed.extended})
    return found


def summary(found: Sequence[Record]) -> Summary:
    """Tasks: how many pass the base tests (``SET_base``), how many all (``SET``), how many there are (``SET_tasks``)."""
    told: Summary = {}
    for kind in COUNTED:
        own = [one for one in found if one["role"] == kind]
        told[f"{kind}_base"] = sum(one["base"] for one in own)
        told[kind] = sum(one["base"] and one["plus"] for one in own)
        told[f"{kind}_tasks"] = len(own)
    return told


def files_of(setting: Setting) -> list[str]:
    """SHA-256 of the user's files. Raises UnbindError where they are not named, not there or not the released ones."""
    return digests(setting.evalplus)


COLUMNS: tuple[Column, ...] = tuple(
    column
    for kind, name in NAMES.items()
    for column in (
        (f"{name} base", f"{kind}_base", ".0f"),
        (f"{name} ↑", kind, ".0f"),
        (f"{name} tasks", f"{kind}_tasks", ".0f"),
    )
)

PROTOCOL = Protocol("evalplus", records, summary, COLUMNS, further=(code, sandbox), files_of=files_of)
