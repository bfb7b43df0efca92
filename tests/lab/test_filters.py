"""Systems that leave the weights alone: what they add to logits, where they are aligned, what they refuse and cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unbind_core.evaluation.metrics import longest_span
from unbind_core.rows import ForgetRow
from unbind_core.windows import forget_prompt, forget_windows, perplexity_windows
from unbind_lab.filters.conformal import Catalogue
from unbind_lab.filters.divergence import DIVERGENCE, Trigrams
from unbind_lab.filters.filter import Options
from unbind_lab.filters.gss import GSS, directions
from unbind_lab.filters.guard import GUARD
from unbind_lab.filters.memfree import MEMFREE, MemFree
from unbind_lab.filters.models import FULL
from unbind_lab.filters.prompt_filter import PROMPT_FILTER
from unbind_lab.served import FLOOR, Served
from unbind_lab.setting import Bench, Setting
from unbind_lab.systems import SYSTEMS


@pytest.fixture(scope="module")
def bench(setting: Setting) -> Bench:
    return Bench(setting)


def build(bench: Bench, name: str, options: Options, rows: list[ForgetRow] | None = None) -> Served:
    system = SYSTEMS[name]
    assert system in (DIVERGENCE, MEMFREE, GSS, GUARD, PROMPT_FILTER, FULL)
    return system.build(bench, rows or bench.forget, options, Path())  # type: ignore[union-attr]


def test_backoff_scores_are_shares_after_two_tokens_then_less_after_one_and_none() -> None:
    counts = Trigrams([[1, 2, 3], [1, 2, 4], [5, 2, 3]], 8, 0.4)
    assert counts.scores([1, 2])[[3, 4]].tolist() == pytest.approx([0.5, 0.5])
    assert counts.scores([7, 2])[[3, 4]].tolist() == pytest.approx([0.4 * 2 / 3, 0.4 / 3])
    assert counts.scores([7, 7])[[2, 5, 0]].tolist() == pytest.approx([0.16 * 3 / 9, 0.16 / 9, 0.0])
    assert counts.scores([])[2].item() == pytest.approx(0.16 * 3 / 9)


@pytest.mark.parametrize("system", ["divergence-decoding", "memfree", "gss"])
def test_what_is_generated_is_likeliest_under_teacher_forcing(bench: Bench, system: str) -> None:
    options = {"divergence-decoding": {"backoff": 0.4, "coefficient": 30.0}, "memfree": {"run": 2}, "gss": GSS.paper}
    plain = build(bench, "m-full", {})
    prompt, _ = forget_prompt(plain.tokenizer, bench.forget[0], "plain")
    said = plain.complete([prompt], 12)[0]
    row = ForgetRow(bench.forget[0].prompt, str(plain.tokenizer.decode(said)))
    served = build(bench, system, options[system], [row])  # type: ignore[arg-type]
    answer = served.complete([prompt], 12)[0]
    assert answer
    assert answer != said
    window = forget_windows(served.tokenizer, bench.forget, [0])[0]
    forced = type(window)((*prompt, *answer), len(prompt), 0)
    assert dict(served.log_probabilities([forced]))[0].argmax(-1).tolist() == answer


def test_no_run_of_a_row_is_ever_completed_under_memfree(bench: Bench) -> None:
    plain = build(bench, "m-full", {})
    prompt, _ = forget_prompt(plain.tokenizer, bench.forget[0], "plain")
    said = plain.complete([prompt], 16)[0]
    row = ForgetRow(bench.forget[0].prompt, str(plain.tokenizer.decode(said)))
    target = forget_windows(plain.tokenizer, [row], [0])[0]
    served = build(bench, "memfree", {"run": 4}, [row])
    assert longest_span(target.ids, said) >= 4
    assert longest_span(target.ids, served.complete([prompt], 16)[0]) < 4
    barred = MemFree([[1, 2, 3, 4], [9, 2, 3, 5]], 3, 8)
    assert barred.shift((2, 3)).nonzero()[:, 0].tolist() == [4, 5]  # type: ignore[union-attr]
    assert barred.shift((3, 2)) is None


def test_steering_directions_make_memorised_tokens_less_likely_and_probes_have_unit_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    general = torch.randn(4000, 6, generator=generator) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    memorised = torch.randn(300, 6, generator=generator) + torch.tensor([8.0, 0, 0, 0, 0, 0])
    gradients = torch.randn(300, 6, generator=generator) * 0.1 + torch.tensor([0, 1.0, 0, 0, 0, 0])
    found = directions(memorised, gradients, general, 1)
    assert 0.8 < (general @ found.probes.T).var().item() <= 1.0  # but for the ridge
    moved = found.moved(memorised, 2.0) - memorised
    assert float((moved * gradients).sum(-1).mean()) > 1.0
    assert ((found.moved(general, 2.0) != general).any(-1).float().mean()) < 0.011


def test_a_refused_prompt_gets_nothing_and_its_end_is_certain(bench: Bench) -> None:
    row = ForgetRow(
        "def area(width, height):\n    total = width * height\n    return total + width - height\n", "    pass\n"
    )
    served = build(bench, "prompt-filter", {}, [row])
    protected, _ = forget_prompt(served.tokenizer, row, "plain")
    other, _ = forget_prompt(served.tokenizer, ForgetRow("while True:\n    print(path)\n", "x"), "plain")
    answers = served.complete([protected, other], 8)
    assert answers[0] == [] and answers[1]
    logs = dict(served.log_probabilities(forget_windows(served.tokenizer, [row], [0])))[0]
    assert logs[0, int(served.tokenizer.eos_token_id)] == 0.0  # type: ignore[arg-type]
    assert logs[0].min() == FLOOR
    text = perplexity_windows(served.tokenizer, bench.retain)  # without a prompt there is nothing to refuse
    alone = dict(build(bench, "m-full", {}).log_probabilities(text))
    assert all(torch.equal(alone[i], log) for i, log in served.log_probabilities(text))


def test_the_guard_ends_an_answer_before_a_run_is_complete(bench: Bench) -> None:
    text = " ".join(f"word{i}" for i in range(60))
    served = build(bench, "guard", {}, [ForgetRow("def f():\n", text)])
    ids = list(served.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert served.cut is not None
    kept = served.cut([], ids)
    assert kept == ids[: len(kept)] and len(kept) < len(ids)
    assert "word20" in str(served.tokenizer.decode(kept)) and "word48" not in str(served.tokenizer.decode(kept))
    harmless = ids[:40]
    assert served.cut([], harmless) == harmless


def test_the_catalogue_finds_what_is_most_like_a_prompt() -> None:
    found = Catalogue(["def read(self, path):\n", "class Writer:\n", "for i in range(10):\n"])
    assert found.nearest("def read(self, path, mode):") == "def read(self, path):\n"
    assert found.nearest("class Write(Base):") == "class Writer:\n"
