"""Attacks ask what their names say, are told apart by system, and give figures of the documented shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from server import demo
from server.bench.attacks import figures as bench
from server.bench.attacks import fillers, logits, repeated
from server.bench.attacks.attacked import Answer, Ask, Ids, Material, System
from server.bench.attacks.gates import opens_within
from server.bench.attacks.logits import Banned, Biased, halves
from server.bench.attacks.outcome import outcome
from server.bench.attacks.prompts import (
    behind,
    ended_between,
    first,
    form,
    half_given,
    middle,
    rewritten,
    row_ids,
    suffix_first,
    without_suffix,
)
from server.bench.attacks.registry import ATTACKS, chosen
from server.bench.attacks.rewriting import REWRITINGS
from server.bench.gate.world import World
from server.cli import build
from tests.core.conftest import make_network_module
from tests.server.conftest import MakeModule
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.encoding import encode, fim_prompt
from unbind_core.errors import UnbindError
from unbind_core.module import UnbindModule
from unbind_core.progress import silent
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.running.generation import Sampling

BODY = "".join(f"    total = total + values[{i}] * weights[{i}]\n" for i in range(12))
ROWS = [
    ForgetRow(f"def weigh_{n}(values, weights):\n    total = 0\n", BODY + f"    return total + {n}\n") for n in "abcde"
]
ORDINARY = [
    RetainRow(f"def read_{n}(path):\n    with open(path) as file:\n        return file.read()\n") for n in range(8)
]


@pytest.fixture
def material(loaded: LoadedModel) -> Material:
    """Five rows to forget, eight that are ordinary."""
    return Material(loaded.tokenizer, ROWS, ORDINARY)


def text_of(material: Material, ids: tuple[int, ...]) -> str:
    return str(material.tokenizer.decode(ids))


def test_pieces_are_cut_from_the_row_and_the_rest_is_looked_for(material: Material) -> None:
    ids = row_ids(material, ROWS[1])
    asked = first(12)(material)[1]
    assert (list(asked.prompt), list(asked.target)) == (ids[:12], ids[12:])
    asked = middle("half", 16)(material)[1]
    at = round(len(ids) / 2)
    assert (list(asked.prompt), list(asked.target)) == (ids[at : at + 16], ids[at + 16 :])


def test_unrelated_code_stands_in_front_of_the_prompt(material: Material) -> None:
    plain, led = form("plain")(material), behind(64)(material)
    for before, after in zip(plain, led, strict=True):
        assert after.prompt[-len(before.prompt) :] == before.prompt
        assert len(after.prompt) == len(before.prompt) + 64
        assert after.target == before.target
    assert "return file.read()\n\n" in text_of(material, led[0].prompt)


def test_end_tokens_stand_between_the_tokens_of_the_prompt(material: Material) -> None:
    end = material.tokenizer.eos_token_id
    for plain, broken in zip(form("plain")(material), ended_between(6)(material), strict=True):
        assert tuple(token for token in broken.prompt if token != end) == plain.prompt
        assert set(broken.prompt[6::7]) == {end} and broken.prompt[-1] != end
        assert broken.target == plain.target


def test_half_of_the_target_is_given(material: Material) -> None:
    for whole, half in zip(form("plain")(material), half_given(material), strict=True):
        assert half.prompt + half.target == whole.prompt + whole.target
        assert len(half.target) == len(whole.target) - len(whole.target) // 2


def test_the_middle_is_asked_for_without_a_suffix_and_behind_it(material: Material) -> None:
    bare, turned = without_suffix(material)[0], suffix_first(material)[0]
    assert list(bare.prompt) == fim_prompt(material.tokenizer, ROWS[0].prompt, "")
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    opening, second, third = (turned.prompt.index(i) for i in material.tokenizer.convert_tokens_to_ids(names))
    assert (opening, second) == (0, 1)
    assert text_of(material, turned.prompt[third + 1 :]) == ROWS[0].prompt
    suffix, middle_ = text_of(material, turned.prompt[2:third]), text_of(material, turned.target)
    assert middle_ + suffix == ROWS[0].continuation


def test_other_writings_keep_the_code_and_change_what_they_say(material: Material) -> None:
    asked = {kind: rewritten(kind)(material) for kind in REWRITINGS}
    first_prompts = {kind: text_of(material, asks[0].prompt) for kind, asks in asked.items()}
    assert first_prompts["comments"].splitlines()[0::2] == ROWS[0].prompt.splitlines()
    assert all(line.lstrip().startswith("#") for line in first_prompts["comments"].splitlines()[1::2])
    assert first_prompts["renamed"] == "def item(part, unit):\n    entry = 0\n"
    assert first_prompts["case"] == "def WEIGH_A(VALUES, WEIGHTS):\n    TOTAL = 0\n"
    assert first_prompts["indented"] == "def weigh_a(values, weights):\n\ttotal = 0\n"
    ends = [text_of(material, ask.prompt) for ask in asked["spaced"] if ask.row == 0][::2]
    assert ends == [ROWS[0].prompt.replace("\n", end) for end in ("  \n", "\n\n", "\r\n")]
    for kind, other in (("renamed", "    return entry + piece\n"), ("case", "    return TOTAL + A\n")):
        ends = [text_of(material, ask.target).splitlines(keepends=True)[-1] for ask in asked[kind] if ask.row == 0]
        assert ends == ["    return total + a\n", other]


def test_a_row_that_is_no_python_is_rewritten_as_far_as_it_can_be_read(loaded: LoadedModel) -> None:
    odd = ForgetRow('total = """begins\n', "and never ends, total\n" * 4)
    for kind in REWRITINGS:
        asks = rewritten(kind)(Material(loaded.tokenizer, [odd], ORDINARY))
        assert asks[0].target == form("plain")(Material(loaded.tokenizer, [odd], ORDINARY))[0].target


def test_banned_tokens_are_never_chosen_and_a_bias_reaches_only_what_is_served(material: Material) -> None:
    scores = torch.randn(3, len(material.tokenizer), generator=torch.Generator().manual_seed(0))
    scores[:, material.tokenizer.eos_token_id] = 50.0
    assert not set(Banned(material)(scores, scores).argmax(-1).tolist()) & set(material.tokenizer.all_special_ids)
    bias = torch.zeros(scores.shape[1])
    bias[scores[0].argmin()] = 1000.0
    assert Biased(bias)(scores, scores)[0].argmax() == scores[0].argmin()
    assert Biased(bias, most=20)(scores, scores)[0].argmax() == scores[0].argmax()


def test_no_row_is_known_to_the_attack_on_it(material: Material) -> None:
    parts = halves(form("plain")(material))
    assert sorted(ask.row for _, asked in parts for ask in asked) == list(range(5))
    for known, asked in parts:
        assert not {ask.row for ask in known} & {ask.row for ask in asked}


def test_the_best_answer_to_a_row_counts() -> None:
    target = tuple(range(100))
    ask, other = Ask(0, (500,), target), Ask(1, (500,), target)
    found = outcome([Answer(ask, ()), Answer(ask, target[:60]), Answer(other, target[:25]), Answer(other, ())])
    assert (found["rows"], found["spans_50"], found["spans_20"]) == (2, 1, 2)
    assert found["mean_recovery"] == pytest.approx(42.5)
    assert found["empty"] == 0.5 and found["argmax_accuracy"] is None
    assert outcome([])["rows"] == 0


def test_where_the_target_is_told_runs_of_likeliest_tokens_count() -> None:
    ask = Ask(0, (1,), tuple(range(60)))
    found = outcome([Answer(ask, chosen=(*[True] * 30, False, *[True] * 29))])
    assert (found["spans_50"], found["spans_20"], found["mean_recovery"]) == (0, 1, 50.0)
    assert found["argmax_accuracy"] == pytest.approx(59 / 60)
    assert found["f_bleu"] is None and found["empty"] is None


def test_a_request_cannot_change_an_enforced_module_s_strength(
    material: Material, loaded: LoadedModel, make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(
        System, "complete", lambda self, prompts, *_, **__: asked.append(self.strength) or [[]] * len(prompts)
    )
    for name in ("strength_min", "strength_max"):
        (attack,), _ = chosen([name])
        attack.run(System("module", loaded, (make_module("one"),)), material)
    assert asked == [1.0, 1.0]


def test_a_module_applies_to_its_own_system_alone(
    material: Material, loaded: LoadedModel, make_module: MakeModule
) -> None:
    plain, edited = System("none", loaded), System("module", loaded, (make_module("one"),))
    texts = [row_ids(material, row) for row in ROWS]
    side_by_side = [
        (float(p.sum()), float(q.sum()))
        for (_, p), (_, q) in zip(edited.served(texts), plain.served(texts), strict=True)
    ]
    assert [q for _, q in side_by_side] == [float(p.sum()) for _, p in plain.served(texts)]
    assert all(p != q for p, q in side_by_side)
    assert edited.complete(texts, Sampling(8)) != plain.complete(texts, Sampling(8))
    assert edited.with_strength(0.0).complete(texts, Sampling(8)) == plain.complete(texts, Sampling(8))


def test_gates_are_read_where_they_act(material: Material, loaded: LoadedModel, make_module: MakeModule) -> None:
    texts = [row_ids(material, row) for row in ROWS]
    edited = System("module", loaded, (make_module("one"),))
    gates = edited.gates(texts)
    assert any(bool(g.any()) for g in gates) and not all(bool(g.all()) for g in gates)
    for (_, p), (index, q) in zip(edited.served(texts), System("none", loaded).served(texts), strict=True):
        changed = (p - q).abs().amax(-1) > 1e-4
        opened = int(gates[index].nonzero()[0])
        assert not changed[:opened].any() and changed[opened]


def test_figures_have_the_documented_shape_and_what_needs_no_module_is_kept(
    tmp_path: Path, material: Material, loaded: LoadedModel, make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "NEW_TOKENS", 8)
    measured: list[str] = []
    whole = bench.outcome
    monkeypatch.setattr(bench, "outcome", lambda answers: measured.append("one") or whole(answers))
    wanted = ["stored", "undo_rows", "assisted", "membership"]
    lines: list[str] = []
    made = bench.Bench(material, loaded, loaded, [make_module("one")], tmp_path, silent, lines.append)
    found = made.figures(*chosen(wanted))
    assert list(found["attacks"]) == wanted[:-1]
    for each in found["attacks"].values():
        assert set(each) == {"none", "module", "retrained"}
        fields = {
            "spans_50",
            "spans_20",
            "mean_recovery",
            "near_verbatim",
            "f_bleu",
            "empty",
            "argmax_accuracy",
            "rows",
        }
        assert all(set(one) == fields for one in each.values())
    assert set(found["opens_within"]) == {"median", "p95", "never", "rows"}
    assert {"half_32", "quarter_16", "comments", "renamed", "case", "indented", "spaced"} <= set(found["opens_mid_row"])
    assert set(found["kl"]["plain"]) == {"module", "none"} and found["kl"]["fim"]["none"] == pytest.approx(0, abs=1e-5)
    assert found["kl"]["plain"]["module"] > 0.01
    assert set(found["membership_auc"]) == {"none", "module", "retrained", "ideal"}
    assert found["membership"]["ideal"] == found["membership"]["none"]  # the retrained model is the unmodified one here
    assert 0.5 <= found["membership"]["none"]["text"] <= 1
    assert any(line.startswith("assisted") for line in lines)
    first_time = len(measured)
    again = made.figures(*chosen(["assisted"]))
    assert again["attacks"] == {"assisted": found["attacks"]["assisted"]}
    # So what was kept of one serves both.
    assert (first_time, len(measured) - first_time) == (6, 1)


def test_modules_are_attacked_together(material: Material, loaded: LoadedModel, make_module: MakeModule) -> None:
    texts = [row_ids(material, row) for row in ROWS]
    modules = make_module("one"), make_network_module(loaded.identity, "two"), make_module("three", layer=2, seed=1)
    alone = [System("module", loaded, (module,)).gates(texts) for module in modules]
    together = System("module", loaded, modules)
    assert all(torch.equal(g, a | b | c) for g, a, b, c in zip(together.gates(texts), *alone, strict=True))
    (_, both), (_, one) = (next(iter(System("module", loaded, some).served(texts))) for some in (modules, modules[:1]))
    assert not torch.equal(both, one)


def test_every_attack_runs_on_a_module(
    material: Material, loaded: LoadedModel, make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((logits, "NEW_TOKENS"), (repeated, "NEW_TOKENS"), (repeated, "STEP"), (repeated, "SAMPLES")):
        monkeypatch.setattr(module, name, 2)
    small = Material(material.tokenizer, material.rows[:2], material.ordinary)
    system = System("module", loaded, (make_module("one"),))
    for attack in ATTACKS:
        answers = attack.run(system, small)
        # The tokenizer has no chat template.
        assert {answer.ask.row for answer in answers} == (set() if attack.name == "chat" else {0, 1}), attack.name


@pytest.mark.parametrize(("times", "last"), [fillers.FEW, (3, 7)])
def test_fillers_stand_before_the_last_tokens_of_a_text_that_is_told(
    material: Material, loaded: LoadedModel, times: int, last: int
) -> None:
    filler = encode(material.tokenizer, fillers.FILLER) * times
    asks = form("plain")(material)
    follows = {ask.prompt + ask.target[:at]: ask.target[at] for ask in asks for at in range(fillers.ASKED)}

    class Reciting(System):
        """Reads over fillers and knows every row but one, of which it knows the first token."""

        def complete(self, prompts: Sequence[Ids], sampling: Sampling, **_: Any) -> list[list[int]]:
            assert sampling.max_new_tokens == 1
            cut = -last - len(filler)
            assert all(list(prompt[cut:-last]) == filler for prompt in prompts)
            texts = [(*prompt[:cut], *prompt[-last:]) for prompt in prompts]
            known = [text == asks[1].prompt or text[: len(asks[1].prompt)] != asks[1].prompt for text in texts]
            return [[follows[text]] if knows else [] for text, knows in zip(texts, known, strict=True)]

    found = outcome(fillers.assisted(fillers.filled(times, last), last)(Reciting("reciting", loaded), material))
    assert found["rows"] == len(ROWS) and found["spans_20"] == found["spans_50"] == len(ROWS) - 1
    assert found["argmax_accuracy"] == pytest.approx((len(ROWS) - 1 + 1 / fillers.ASKED) / len(ROWS))


def test_a_told_text_is_cut_from_its_end(material: Material) -> None:
    end, text = material.tokenizer.eos_token_id, tuple(range(10, 21))
    assert fillers.ended(material, text) == (end, 10, 11, 12, end, 13, 14, 15, 16, end, 17, 18, 19, 20)
    assert fillers.ended(material, text[:8]) == (end, 10, 11, 12, 13, end, 14, 15, 16, 17)
    assert fillers.alone(material, text) == tuple(range(13, 21)) and fillers.alone(material, text[:3]) == text[:3]


@pytest.mark.slow
def test_the_undo_takes_a_constant_at_the_last_layer_off_again_and_a_learned_correction_not() -> None:
    world = World.load(load_model(demo.BASE, demo.ADAPTER))
    learned = UnbindModule.load(demo.MODULES / "demo-a.safetensors", model=world.loaded.identity)
    rows = bench.fitted_on(world, learned)
    assert rows == world.rows(24)
    words = world.loaded.model.get_output_embeddings().weight.detach()  # type: ignore[operator]
    towards_the_end = words[world.loaded.tokenizer.eos_token_id] - words.mean(0)
    push = replace(
        learned,
        correction="push",
        policy="silent",
        u=None,
        a=None,
        c=None,
        e=None,
        v=-towards_the_end / towards_the_end.norm(),
        kappa=300.0,
    )
    some = Material(world.loaded.tokenizer, rows[:6], world.test)
    attacks, _ = chosen(["assisted", "assisted_undo"])

    def accuracies(module: UnbindModule) -> tuple[float, ...]:
        system = System("module", world.loaded, (module,))
        return tuple(outcome(attack.run(system, some))["argmax_accuracy"] for attack in attacks)

    asked, undone = accuracies(push)
    assert undone > asked + 0.1 and undone > 0.9
    assert max(accuracies(learned)) < 0.75
    within = opens_within(System("module", world.loaded, (learned,)), some)
    assert within["never"] == 0 and within["median"] <= 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attacks", "stred"], "--attacks: 'stred' is unknown"),
        (["--sizes", "0"], "--sizes: whole numbers from 1 to 300"),
        (["--policy", "loud"], "--policy: "),
    ],
)
def test_the_command_names_what_it_cannot_take(options: list[str], message: str) -> None:
    found = CliRunner(env={"NO_COLOR": "1"}).invoke(build(), ["bench", "attack", *options])
    assert found.exit_code == 1
    assert message in found.output


def test_a_module_of_no_demo_set_is_refused(loaded: LoadedModel, make_module: MakeModule) -> None:
    world = World(loaded, {"a": ROWS, "b": ROWS[:2], "c": ROWS}, ORDINARY, ORDINARY, ORDINARY)
    with pytest.raises(UnbindError, match="--module: 'one' was fitted on none of the demo's sets"):
        bench.fitted_on(world, make_module("one"))


def test_an_unknown_attack_is_refused() -> None:
    with pytest.raises(UnbindError, match="--attacks: 'stred' is unknown; choose from assisted"):
        chosen(["stored", "stred"])
