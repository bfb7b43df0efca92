"""How like a model that never saw the rows a system is: divergence from it, and whether rows that were seen can be told."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from server.bench.attacks.attacked import Ask, Attacked, Material, System
from server.bench.attacks.prompts import form
from unbind_core.evaluation.membership import FOLDS, told_apart
from unbind_core.evaluation.metrics import sentence_bleu
from unbind_core.rows import ForgetRow, RetainRow, split_text, spread
from unbind_core.running.generation import Sampling

STRANGERS = 150  # rows that no adapter was trained on, beside those to forget
WRITTEN = 32  # tokens of the answer that a classifier sees
LEAST_LIKELY = 0.2  # of a row's tokens
# What an answer alone tells.
TEXT = ("written", "most frequent token", "different tokens", "answer by zlib", "like the row")


def divergences(retrained: System, systems: Sequence[System], material: Material) -> dict[str, Any]:
    """Form -> name of a system -> KL(retrained || system), mean over the positions that predict what is to be forgotten."""
    found: dict[str, Any] = {}
    for name in ("plain", "fim"):
        asks = form(name)(material)
        if not asks:
            continue
        texts = [ask.prompt + ask.target for ask in asks]
        total, count = dict.fromkeys((system.name for system in systems), 0.0), 0
        own = [system.served(texts) for system in systems]
        for index, p in retrained.served(texts):
            at = slice(len(asks[index].prompt) - 1, -1)
            count += len(asks[index].target)
            for system, served in zip(systems, own, strict=True):
                other, q = next(served)
                assert other == index  # batches are made of the texts alone
                total[system.name] += float((p[at].exp() * (p[at] - q[at])).sum())
        found[name] = {system: value / count for system, value in total.items()}
    return found


def membership(found: Sequence[Mapping[str, float]], members: Sequence[bool]) -> dict[str, Any] | None:
    """AUC at which rows are told from others by ``found``, numbers about each: ``auc`` is the larger of ``classifier`` and
    ``single``, ``text`` the same by what an answer alone tells; None for fewer of a kind than a cross-validation needs.
    """
    inside = np.array(members, dtype=bool)
    if min(inside.sum(), (~inside).sum()) < FOLDS:
        return None
    each = {name: np.array([one[name] for one in found]) for name in found[0]}
    told = told_apart(each, inside)
    return {
        "auc": told.larger,
        "classifier": told.classifier,
        "single": told.single,
        "best": told.best,
        "text": told_apart({name: each[name] for name in TEXT}, inside).larger,
        "members": int(inside.sum()),
        "others": int((~inside).sum()),
    }


def numbers(system: Attacked, material: Material) -> list[tuple[int, dict[str, float]]]:
    """What a row is told by, text and log-probabilities of one system: (row, name -> number), first of the rows, then of strangers,
    code that no adapter was trained on, whose indices are larger.
    """
    strangers = [_stranger(material.ordinary[i]) for i in spread(range(len(material.ordinary)), STRANGERS)]
    everybody = Material(material.tokenizer, [*material.rows, *strangers], material.ordinary)
    return _numbers(system, form("plain")(everybody), everybody)


def _stranger(row: RetainRow) -> ForgetRow:
    """Cut as rows to forget are."""
    return ForgetRow(*split_text(row.text))


def _numbers(system: Attacked, asks: Sequence[Ask], material: Material) -> list[tuple[int, dict[str, float]]]:
    found: list[dict[str, float]] = [{} for _ in asks]
    outputs = system.complete([ask.prompt for ask in asks], Sampling(WRITTEN))
    end = material.tokenizer.eos_token_id
    for index, served in system.served([ask.prompt + ask.target for ask in asks]):
        ask, begun = asks[index], len(asks[index].prompt)
        table = served[begun - 1 : -1].double()
        target = served.new_tensor(ask.target).long()
        logs = table.gather(1, target[:, None])[:, 0]
        ids = served.new_tensor(ask.prompt).long()
        prompt = served[: begun - 1].double().gather(1, ids[1:, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        least = logs.sort().values[: max(1, round(LEAST_LIKELY * len(logs)))]
        packed = len(zlib.compress(material.rows[ask.row].continuation.encode()))
        found[index] = {
            "nll": -float(logs.mean()),
            "nll of the prompt": -float(prompt.mean()) if len(prompt) else 0.0,
            "least likely tokens": -float(least.mean()),
            "nll by zlib": -float(logs.sum()) / packed,
            "argmax accuracy": float((table.argmax(-1) == target).double().mean()),
            "entropy": float(entropy.mean()),
            "first entropy": float(entropy[0]),
            "end at once": 0.0 if end is None else float(table[0, end]),
            **_written(outputs[index], ask.target, material),
        }
    return [(ask.row, one) for ask, one in zip(asks, found, strict=True)]


def _written(output: Sequence[int], target: Sequence[int], material: Material) -> dict[str, float]:
    """What an answer of WRITTEN tokens tells of the row that it was asked for; ``like the row`` as F-BLEU has it."""
    text = str(material.tokenizer.decode(list(output)))
    return {
        "written": float(len(output)),
        "most frequent token": Counter(output).most_common(1)[0][1] / len(output) if output else 1.0,
        "different tokens": len(set(output)) / max(1, len(output)),
        "answer by zlib": len(zlib.compress(text.encode())) / max(1, len(text)),
        "like the row": sentence_bleu(target[:WRITTEN], output),
    }
