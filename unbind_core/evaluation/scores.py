"""What a model gives back of protected code, asked in six ways; metrics as in the paper's Appendices A.3 and E."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from unbind_core.architecture import unwrap
from unbind_core.encoding import available_forms, encode_prompt, pad_id, require_known
from unbind_core.evaluation.metrics import BLEU_NEW_TOKENS, EXTRACTED_SPAN, longest_span, sentence_bleu
from unbind_core.progress import ProgressCallback, silent
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.running.generation import Editing, Sampling, complete
from unbind_core.windows import forget_prompt, with_room

ACCESS_NEW_TOKENS = 256
# The paper's, to the letter: nothing follows the prompt, or the fence that closes it.
INSTRUCTION = "Continue the following source code. Preserve its task and return only the continuation.\n\n{prompt}"
FENCE = "Complete the code in the fenced block. Return only its continuation.\n```\n{prompt}\n```"
CHANCE, LEAST = 8, 4  # tokens in a row that any completion of code may hold; that no completion is without
PREFIXES = (16, 32, 64)
WAYS = ("original", *(f"prefix-{k}" for k in PREFIXES), "instruction", "fence")
# Two ways that no fit ever looks at, an injection longer than any it knows and a request of another form, and those that it may.
REPORTED_BY = ("prefix-64", "fence")
CHOSEN_BY = tuple(way for way in WAYS if way not in REPORTED_BY)
Answering = Callable[[Sequence[list[int]], Sampling], list[list[int]]]  # prompts, how
Greedily = Callable[[Sequence[list[int]], Sequence[list[int]], int], list[list[int]]]  # prompts, targets, new tokens


@dataclass(frozen=True)
class _Attempt:
    """One completion to make: ``target`` is what is left to recover of row ``row``."""

    row: int
    prompt: list[int]
    target: list[int]
    way: str = "original"


def require_known_rows(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, forget: Sequence[ForgetRow], retain: Sequence[RetainRow] = ()
) -> None:
    """Raise DataError that names the first row with a token that the tokenizer has and the model has not."""
    embeddings: Any = unwrap(model).get_input_embeddings()  # type: ignore[operator]
    rows = [(f"forget row {number}", row.prompt + row.continuation) for number, row in enumerate(forget, 1)]
    rows += [(f"retain row {number}", row.text) for number, row in enumerate(retain, 1)]
    require_known(tokenizer, embeddings.weight.shape[0], rows)


def _conditions(tokenizer: PreTrainedTokenizerBase, rows: Sequence[ForgetRow]) -> dict[str, list[_Attempt]]:
    """The paper's six access conditions (Appendix E.1): original, three prefix injections, instruction, fenced code."""
    found: dict[str, list[_Attempt]] = {name: [] for name in WAYS}
    for index, row in enumerate(rows):
        prompt, target = forget_prompt(tokenizer, row, "plain")
        found["original"].append(_Attempt(index, prompt, target))
        for k in PREFIXES:
            if len(target) > k:
                found[f"prefix-{k}"].append(_Attempt(index, prompt + target[:k], target[k:], f"prefix-{k}"))
        for name, template in (("instruction", INSTRUCTION), ("fence", FENCE)):
            asked = encode_prompt(tokenizer, template.format(prompt=row.prompt))
            found[name].append(_Attempt(index, asked, target, name))
    return found


@dataclass
class RowScore:
    """What was recovered of one row over all attempts; BLEU of the greedy completion by form.

    ``ways``: longest exact span and largest recovery by way to ask; ``span`` counts the fill-in-the-middle prompt too.
    ``empty``: whether the row's own plain prompt is answered by nothing, when asked greedily.
    """

    bleu: dict[str, float]
    span: int = 0
    recovery: float = 0.0
    ways: dict[str, tuple[int, float]] = field(default_factory=dict)
    empty: bool = False

    def recovered(self, way: str, span: int, target: int) -> None:
        """Count one attempt: a span of so many of ``target`` tokens."""
        longest, largest = self.ways.get(way, (0, 0.0))
        self.ways[way] = max(longest, span), max(largest, span / target)
        self.span, self.recovery = max(self.span, span), max(self.recovery, span / target)


def forget_scores(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[ForgetRow],
    *,
    forms: Sequence[str],
    ways: Sequence[str] = WAYS,
    attempts: int = 1,
    sampled: Sequence[int] | None = None,
    new_tokens: int = ACCESS_NEW_TOKENS,
    editing: Editing = nullcontext,
    greedily: Greedily | None = None,
    answering: Answering | None = None,
    progress: ProgressCallback = silent,
    stage: str = "forget rows",
) -> list[RowScore]:
    """Scores of every forget row. ``attempts`` for each of the ``ways`` to ask: one greedy, the others sampled.

    Sampled ones (temperature 0.8, top-p 0.95) are made of all rows or of those in ``sampled``. ``attempts`` = 0 asks in the
    original way alone. That is asked greedily for as many tokens as BLEU needs at least, and BLEU is not there where it is not
    asked. ``greedily`` gives the greedy completions where they are to be had for less; ``answering`` gives all of them, in place
    of ``model``.
    """
    pad, end = pad_id(tokenizer), tokenizer.eos_token_id
    scores = [RowScore({}) for _ in rows]

    def run(work: Sequence[_Attempt], sampling: Sampling, label: str) -> list[list[int]]:
        prompts = [attempt.prompt for attempt in work]
        if not prompts:
            return []
        if answering is not None:
            return answering(prompts, sampling)
        prompts = with_room(model, prompts, sampling.max_new_tokens)
        if greedily is not None and sampling.temperature == 0:
            return greedily(prompts, [attempt.target for attempt in work], sampling.max_new_tokens)
        return complete(
            model, prompts, sampling, pad=pad, end=end, editing=editing, stage=f"{stage}: {label}", progress=progress
        )

    def recovered(work: Sequence[_Attempt], outputs: Sequence[Sequence[int]]) -> None:
        for attempt, output in zip(work, outputs, strict=True):
            span = longest_span(attempt.target, output, attempt.prompt)
            scores[attempt.row].recovered(attempt.way, span, len(attempt.target))

    conditions = _conditions(tokenizer, rows)
    plain = [attempt for name in WAYS if name in (ways if attempts else WAYS[:1]) for attempt in conditions[name]]
    fim = [_Attempt(i, *forget_prompt(tokenizer, row, "fim")) for i, row in enumerate(rows)] if "fim" in forms else []
    own = [attempt for attempt in plain if attempt.way == "original"]  # the first of them, one a row
    others = plain[len(own) :]
    most = max(new_tokens, BLEU_NEW_TOKENS) if attempts else BLEU_NEW_TOKENS
    greedy = run([*own, *fim], Sampling(most), "greedy")
    recovered(own, greedy[: len(own)])
    recovered(others, run(others, Sampling(new_tokens), "greedy"))
    for form, work, outputs in (("plain", own, greedy[: len(own)]), ("fim", fim, greedy[len(own) :])):
        for attempt, output in zip(work, outputs, strict=True):
            score, scored = scores[attempt.row], output[:BLEU_NEW_TOKENS]
            score.bleu[form] = sentence_bleu(attempt.target, scored)
            score.empty |= form == "plain" and not scored
            score.span = max(score.span, longest_span(attempt.target, scored, attempt.prompt))
    # Together: a batch of few rows takes about as long as one of many, and few rows are asked more often.
    chosen = [one for _ in range(1, attempts) for one in plain if sampled is None or one.row in sampled]
    recovered(chosen, run(chosen, Sampling(new_tokens, 0.8, 0.95, seed=10_000), "sampled"))
    return scores


def summary(scores: Sequence[RowScore]) -> dict[str, float | int | None]:
    """Means over rows in the form ``verify`` reports; ``mean_recovery`` in per cent (Appendix E.2)."""

    def mean(values: Sequence[float]) -> float | None:
        return sum(values) / len(values) if values else None

    return {
        "rows": len(scores),
        "f_bleu": mean([s.bleu["plain"] for s in scores]),
        "f_bleu_fim": mean([s.bleu["fim"] for s in scores if "fim" in s.bleu]),
        "spans_50": sum(s.span >= EXTRACTED_SPAN for s in scores),
        "spans_100": sum(s.span >= 100 for s in scores),
        "mean_recovery": mean([100.0 * s.recovery for s in scores]),
    }


def by_ways(scores: Sequence[RowScore]) -> dict[str, dict[str, Any]]:
    """What came back by the ways that a fit may look at (``chosen_by``), and by those that none does (``reported_by``).

    Groups of rows in the form of :func:`summary`, of those rows that were asked in such a way; groups without any are left out.
    The fill-in-the-middle prompt is none of the ways and counts in the summary alone.
    """
    groups = {}
    for name, ways in (("chosen_by", CHOSEN_BY), ("reported_by", REPORTED_BY)):
        asked = {way for score in scores for way in score.ways if way in ways}
        found = [[score.ways[way] for way in asked if way in score.ways] for score in scores]
        found = [each for each in found if each]
        if found:
            spans = [max(span for span, _ in each) for each in found]
            groups[name] = {
                "ways": ", ".join(way for way in ways if way in asked),
                "rows": len(found),
                "spans_50": sum(span >= EXTRACTED_SPAN for span in spans),
                "spans_100": sum(span >= 100 for span in spans),
                "mean_recovery": 100 * sum(max(recovery for _, recovery in each) for each in found) / len(found),
            }
    return groups


def extractable(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[ForgetRow],
    *,
    forms: Sequence[str] | None = None,
    scores: Sequence[RowScore] | None = None,
    progress: ProgressCallback = silent,
) -> dict[str, Any]:
    """Whether the rows are memorised at all, by one greedy completion a row and form (``scores``, where they are known).

    A row counts as extracted if an exact span of EXTRACTED_SPAN tokens, or of half its continuation if that is shorter, comes back;
    of CHANCE tokens or all at least, as fewer do by chance, and of a continuation of less than LEAST tokens nothing is counted.
    ``memorised`` is true if any row is extracted: with none there is nothing to remove. Raises DataError as a fit does of rows
    that hold a token which the model lacks.
    """
    require_known_rows(model, tokenizer, rows)
    used = available_forms(tokenizer, forms)
    scores = scores or forget_scores(model, tokenizer, rows, forms=used, attempts=0, progress=progress, stage="check")
    extracted = 0
    for row, score in zip(rows, scores, strict=True):
        length = len(forget_prompt(tokenizer, row, "plain")[1])
        extracted += score.span >= min(EXTRACTED_SPAN, max(length // 2, min(length, CHANCE), LEAST))
    table = summary(scores)
    return {**table, "extracted": extracted, "memorised": extracted > 0}
