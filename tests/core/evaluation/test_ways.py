"""The ways to ask: as the paper prints them, and kept apart by whether a fit may look at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.core.conftest import ROWS, make_module
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import encode, encode_prompt, pad_id
from unbind_core.evaluation.completions import retain_completions
from unbind_core.evaluation.metrics import BLEU_NEW_TOKENS, sentence_bleu
from unbind_core.evaluation.replay import Replay
from unbind_core.evaluation.scores import CHOSEN_BY, REPORTED_BY, WAYS, RowScore, by_ways, forget_scores
from unbind_core.fitting import judge
from unbind_core.fitting.corrections.reference import Reference
from unbind_core.fitting.fit import context_of
from unbind_core.fitting.options import FitOptions, Target
from unbind_core.progress import silent
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.running.generation import Sampling
from unbind_core.windows import forget_prompt, perplexity_windows, retain_windows

ROW = ForgetRow("def weigh(values):\n", "".join(f"    total_{i} = values[{i * 7}]\n" for i in range(20)))


class Recorder:
    """Greedy completions that are all empty, and every prompt they were asked for."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def __call__(self, prompts: Sequence[list[int]], targets: Sequence[list[int]], count: int) -> list[list[int]]:
        self.prompts += prompts
        return [[] for _ in prompts]


def asked(loaded: LoadedModel, **more: Any) -> list[list[int]]:
    recorder = Recorder()
    forget_scores(loaded.model, loaded.tokenizer, [ROW], forms=(), greedily=recorder, **more)
    return recorder.prompts


def test_the_six_ways_are_the_papers_to_the_letter(tiny: LoadedModel) -> None:
    prompt = encode_prompt(tiny.tokenizer, ROW.prompt)
    target = encode(tiny.tokenizer, ROW.continuation)
    instruction = (
        "Continue the following source code. Preserve its task and return only the continuation.\n\n" + ROW.prompt
    )
    fence = f"Complete the code in the fenced block. Return only its continuation.\n```\n{ROW.prompt}\n```"
    assert asked(tiny) == [
        prompt,
        *(prompt + target[:k] for k in (16, 32, 64)),
        encode_prompt(tiny.tokenizer, instruction),
        encode_prompt(tiny.tokenizer, fence),
    ]


def test_the_ways_of_fits_and_of_reports_are_the_six_and_have_none_in_common() -> None:
    assert sorted((*CHOSEN_BY, *REPORTED_BY)) == sorted(WAYS) and len(REPORTED_BY) == 2


def test_only_the_ways_that_are_named_are_asked(tiny: LoadedModel) -> None:
    chosen, reported = asked(tiny, ways=CHOSEN_BY), asked(tiny, ways=REPORTED_BY)
    assert (len(chosen), len(reported)) == (4, 2)
    assert sorted((*chosen, *reported)) == sorted(asked(tiny))
    assert asked(tiny, ways=CHOSEN_BY, attempts=0) == chosen[:1]


def test_bleu_is_of_as_many_tokens_however_few_the_other_ways_are_asked_for(tiny: LoadedModel) -> None:
    most: dict[str, set[int]] = {}

    def answering(prompts: Sequence[list[int]], sampling: Sampling) -> list[list[int]]:
        own = [encode_prompt(tiny.tokenizer, ROW.prompt), forget_prompt(tiny.tokenizer, ROW, "fim")[0]]
        targets = [forget_prompt(tiny.tokenizer, ROW, form)[1] for form in ("plain", "fim")]
        for prompt in prompts:
            most.setdefault("own" if prompt in own else "other", set()).add(sampling.max_new_tokens)
        return [(targets[own.index(p)] if p in own else targets[0])[: sampling.max_new_tokens] for p in prompts]

    found = forget_scores(
        tiny.model, tiny.tokenizer, [ROW], forms=("plain", "fim"), ways=CHOSEN_BY, new_tokens=8, answering=answering
    )
    assert most == {"own": {BLEU_NEW_TOKENS}, "other": {8}}
    for form in ("plain", "fim"):
        target = forget_prompt(tiny.tokenizer, ROW, form)[1]
        assert found[0].bleu[form] == pytest.approx(sentence_bleu(target, target[:BLEU_NEW_TOKENS]))
        assert found[0].bleu[form] > sentence_bleu(target, target[:8])
    assert set(found[0].ways) == set(CHOSEN_BY)


def test_sampled_answers_are_asked_for_together_and_each_of_them_counts(tiny: LoadedModel) -> None:
    asked_for: list[tuple[float, list[list[int]]]] = []
    target = forget_prompt(tiny.tokenizer, ROW, "plain")[1]

    def answering(prompts: Sequence[list[int]], sampling: Sampling) -> list[list[int]]:
        asked_for.append((sampling.temperature, list(prompts)))
        return [[] for _ in prompts[1:]] + [target if sampling.temperature else []]

    given = {"forms": (), "ways": ("original", "fence"), "attempts": 4, "answering": answering}
    found = forget_scores(tiny.model, tiny.tokenizer, [ROW, ROW], sampled=[1], **given)
    (temperature, prompts), *greedy = reversed(asked_for)
    assert temperature > 0 and not any(warm for warm, _ in greedy)
    assert prompts == 3 * asked(tiny, ways=("original", "fence"))
    assert [score.recovery for score in found] == [0.0, 1.0]


def test_a_fit_never_looks_at_the_ways_of_reports(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def recorded(prompts: Sequence[list[int]]) -> None:
        seen.extend(list(prompt) for prompt in prompts)

    class Drafts(judge.Drafts):
        def complete(self, module: Any, prompts: Any, *rest: Any, **more: Any) -> list[list[int]]:
            recorded(prompts)
            return super().complete(module, prompts, *rest, **more)

    monkeypatch.setattr(judge, "Drafts", Drafts)
    options = FitOptions(target=Target(alone_cut=-9.0, alone_recovery=9.0))
    given = context_of(tiny.model, tiny.tokenizer, [ROW], ROWS, (), "m", tiny.identity, options, silent, None)
    retain, forget = (
        Replay(tiny.model, windows, given.layers, pad=pad_id(tiny.tokenizer))
        for windows in (retain_windows(tiny.tokenizer, ROWS, [0]), given.forget_windows([0]))
    )
    completions = retain_completions(tiny.model, tiny.tokenizer, ROWS, [0], given.layers, None, "", silent)
    one = judge.Judge(given, retain, completions, forget, Reference())
    monkeypatch.setattr(judge, "MOST_ATTEMPTS", 1)
    one.remainder(make_module(tiny.identity, layer=given.layers[0]), [0], thorough=True)
    for prompt in asked(tiny, ways=REPORTED_BY):
        assert prompt not in seen
    for prompt in asked(tiny, ways=CHOSEN_BY):
        assert prompt in seen


def test_figures_of_both_kinds_stand_apart(tiny: LoadedModel) -> None:
    scores = [RowScore({}), RowScore({}), RowScore({})]
    scores[0].recovered("original", 60, 120)
    scores[0].recovered("prefix-64", 30, 40)
    scores[1].recovered("fence", 10, 100)
    found = by_ways(scores)
    assert found["chosen_by"] == {"ways": "original", "rows": 1, "spans_50": 1, "spans_100": 0, "mean_recovery": 50.0}
    assert found["reported_by"] == {
        "ways": "prefix-64, fence",
        "rows": 2,
        "spans_50": 0,
        "spans_100": 0,
        "mean_recovery": pytest.approx((75 + 10) / 2),
    }
    assert (scores[0].span, scores[0].recovery) == (60, 0.75)
    assert by_ways([RowScore({})]) == {}


def test_perplexity_is_of_whole_rows_cut_off_with_the_first_token_scored(tiny: LoadedModel) -> None:
    tokenizer = tiny.tokenizer
    long, short = RetainRow("size = 1\n" * 2000), RetainRow("x = 2\n")
    windows = perplexity_windows(tokenizer, [long, short])
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = encode(tokenizer, long.text)
    assert len(ids) > 2047
    assert [(window.ids, window.first_target) for window in windows] == [
        ((first, *ids[:2047]), 1),
        ((first, *encode(tokenizer, short.text)), 1),
    ]
