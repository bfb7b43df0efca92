"""What a system can still do: two sets of executable tasks, run as HumanEval+ is, with base and extended tests.

Micro models solve next to nothing of HumanEval+ and MBPP+, so these sets are of small everyday Python (``unbind_lab/tasks``).
Greedy; of a setting in another language there are no tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from unbind_core.encoding import decode_behind, encode_prompt
from unbind_core.progress import ProgressCallback
from unbind_lab import tasks as code
from unbind_lab.protocols.main import Material, Record, Summary
from unbind_lab.protocols.protocol import Column, Protocol
from unbind_lab.served import Served
from unbind_lab.tasks.harness import check
from unbind_lab.tasks.sets import LAST_LINE, SETS, WITHIN, answer

LANGUAGE = "python"
NEW_TOKENS = 24
KEYS = {LAST_LINE: "last_line", WITHIN: "line_within"}


def records(served: Served, material: Material, progress: ProgressCallback) -> list[Record]:
    """One a task: its ``set`` and ``task``, what was ``written``, whether ``base`` and all tests (``extended``) are passed."""
    if all(row.language not in ("", LANGUAGE) for row in material.retain):
        return []
    found: list[Record] = []
    for kind, tasks in SETS.items():
        prompts = [encode_prompt(served.tokenizer, task.prompt) for task in tasks]
        outputs = served.complete(prompts, NEW_TOKENS, progress)
        pairs = zip(prompts, outputs, strict=True)
        written = [answer(decode_behind(served.tokenizer, *pair)) for pair in pairs]
        for task, text, passed in zip(tasks, written, check(tasks, written), strict=True):
            one = {"set": kind, "task": task.name, "written": text}
            found.append({**one, "base": passed.base, "extended": passed.extended})
    return found


def summary(found: Sequence[Record]) -> Summary:
    """``SET_base`` and ``SET_extended``: tasks passed, in per cent."""
    told: Summary = {}
    for kind, key in KEYS.items():
        own = [one for one in found if one["set"] == kind]
        for tests in ("base", "extended") if own else ():
            told[f"{key}_{tests}"] = 100 * sum(one[tests] for one in own) / len(own)
    return told


def beside(own: Mapping[str, float], full: Mapping[str, float]) -> Summary:
    """``kept``: the geometric mean over the sets of what is passed against M_full, each at most 1, in per cent."""
    names = [f"{key}_extended" for key in KEYS.values() if full.get(f"{key}_extended")]
    if not names:
        return {}
    ratios = [min(1.0, own[name] / full[name]) for name in names]
    return {"kept": 100 * math.prod(ratios) ** (1 / len(ratios))}


def _columns() -> Iterable[Column]:
    for kind, key in KEYS.items():
        yield f"{kind}: base %", f"{key}_base", ".1f"
        yield "extended % ↑", f"{key}_extended", ".1f"
    yield "kept of M_full's % ↑", "kept", ".1f"


PROTOCOL = Protocol("tasks", records, summary, tuple(_columns()), beside, further=(code,))
