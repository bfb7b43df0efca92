"""A model that is its own reference: asked with the last tokens alone, as many as do not give a memorised row away."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax

from tests.core.conftest import TinyCheckpoint
from tests.support import memorising
from unbind_core import FitOptions, FitReport, LoadedModel, fit, load_model
from unbind_core.encoding import beginning, encode, marks
from unbind_core.evaluation.replay import Replay
from unbind_core.fitting.context import Context
from unbind_core.fitting.corrections.examples import examples
from unbind_core.fitting.corrections.leading import leading
from unbind_core.fitting.corrections.nearsighted import TOKENS, near_by, nearsighted
from unbind_core.fitting.corrections.reference import Kind, Reference, last_logits
from unbind_core.fitting.corrections.states import TOGETHER, Met, Near, last_states, states_at
from unbind_core.fitting.fit import context_of, prepare_retained
from unbind_core.fitting.options import Target
from unbind_core.fitting.screening import Screening
from unbind_core.fitting.separation import FIRST
from unbind_core.progress import silent
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.windows import Window

FORGET = [ForgetRow(row["prompt"], row["continuation"]) for row in memorising.forget_rows()]
RETAIN = [RetainRow(row["text"]) for row in memorising.retain_rows()]
QUICK = FitOptions(effort=0.1)


@pytest.fixture(scope="module")
def loaded(memorised: Path) -> LoadedModel:
    return load_model(memorised)


def begun(loaded: LoadedModel) -> Context:
    return context_of(loaded.model, loaded.tokenizer, FORGET, RETAIN, (), "m", loaded.identity, QUICK, silent, None)


def replayed(context: Context, windows: Sequence[Window]) -> Replay:
    return Replay(context.model, windows, context.layers, pad=context.pad)


def met(context: Context) -> list[Met]:
    return Screening(context, near_by(context).early).met


@pytest.mark.parametrize("family", ["qwen2", "llama"])  # the second begins every text with a token
def test_a_position_sees_its_last_tokens_and_at_most_three_more(tiny_checkpoint: TinyCheckpoint, family: str) -> None:
    loaded = load_model(tiny_checkpoint(family))
    front, tokens = beginning(loaded.tokenizer), 6
    ids = (*front, *encode(loaded.tokenizer, "def area(width, height):\n    return width * height\n"))
    window = Window(ids, 1, 0)
    at = torch.arange(FIRST, len(ids) - 1)
    (found,) = Near(tokens, tuple(front)).short(loaded.model, [window], [at], 0, silent)
    assert found.shape == (len(at), 32)
    for state, position in zip(found, at.tolist(), strict=True):
        seen = tokens + (position - FIRST) % TOGETHER
        begin = max(0, position - seen + 1)
        cut = Window(((*front, *ids[begin : position + 1]) if begin else ids[: position + 1]), 1, 0)
        place = torch.tensor([len(cut.ids) - 1])
        (expected,) = last_states(loaded.model, [cut], [place], 0, silent)
        torch.testing.assert_close(state, expected[0], atol=0.03, rtol=0.03)  # bfloat16


def test_states_come_in_the_order_of_the_windows_whatever_their_lengths(loaded: LoadedModel) -> None:
    rng = random.Random(0)
    windows = [Window(tuple(rng.randrange(5, 300) for _ in range(length)), 1, 0) for length in (30, 7, 90, 12)]
    at = [torch.arange(3, 29), torch.tensor([5]), torch.arange(0, 88, 5), torch.zeros(0, dtype=torch.int64)]
    together = Near(8).short(loaded.model, windows, at, 0, silent)
    assert [len(states) for states in together] == [26, 1, 18, 0]
    for window, places, states in zip(windows[:3], at[:3], together, strict=False):
        (alone,) = Near(8).short(loaded.model, [window], [places], 0, silent)
        torch.testing.assert_close(states, alone, atol=0.03, rtol=0.03)


def test_a_model_is_asked_by_its_last_tokens_where_they_do_not_give_rows_away(loaded: LoadedModel) -> None:
    context, rng = begun(loaded), random.Random(0)
    having = Reference(), near_by(context), met(context)
    recited = replayed(context, context.forget_windows(range(len(FORGET))))
    noise = replayed(context, [Window(tuple(rng.randrange(5, 300) for _ in range(60)), 1, i) for i in range(8)])
    asked = nearsighted(context, *having, recited)  # ordinary code that is as likely as the rows
    assert asked is not None and asked.near is not None and asked.near.parts is not None
    assert asked.led is not None and asked.led[1] < asked.led[0]
    assert nearsighted(context, *having, noise) is None  # the rows are likelier by any


def test_the_row_is_recited_with_all_of_the_text_and_not_by_the_last_tokens(loaded: LoadedModel) -> None:
    context = begun(loaded)
    windows = context.forget_windows(range(len(FORGET)))
    at = [torch.arange(FIRST, len(window.ids) - 1) for window in windows]
    whole = last_states(loaded.model, windows, at, context.pad, silent)
    found = [Met(*each) for each in zip(windows, at, whole, strict=True)]
    likelihoods = []
    for reference in (Reference(most=1.0), Reference(near=Near(4))):
        drawn = examples(
            loaded.model, found, reference, pad=context.pad, own=len(found), generator=torch.Generator().manual_seed(0)
        )
        assert drawn.states.shape == drawn.theirs.shape
        said = reference.log_probabilities(loaded.model)(drawn.theirs.float(), drawn.following)
        likelihoods.append(float(said.gather(1, drawn.following[:, None]).exp().mean()))
    assert likelihoods[0] > 0.8
    assert likelihoods[1] < 0.6


def test_a_reference_tells_of_its_last_tokens_and_takes_nothing_out(loaded: LoadedModel) -> None:
    near = Reference(near=Near(8), unsaid=marks(loaded.tokenizer))
    assert near.to_json() == {"kind": "itself", "fingerprint": None, "last_tokens": 8}
    assert "last_tokens" not in Reference().to_json()
    states = torch.randn(5, loaded.model.config.hidden_size)  # type: ignore[union-attr, operator]
    own = replace(near, near=None, most=2.0).log_probabilities(loaded.model)  # more than there is: nothing is out
    following = torch.arange(5)
    torch.testing.assert_close(near.log_probabilities(loaded.model)(states, following), own(states, following))


def test_what_the_last_tokens_say_is_led_nearer_on_retained_code_and_kept(loaded: LoadedModel, tmp_path: Path) -> None:
    context = replace(begun(loaded), cache=tmp_path)
    asked: dict[str, Any] = {"cache": tmp_path, "identity": loaded.identity, "options": QUICK}
    prepare_retained(loaded.model, loaded.tokenizer, RETAIN, reference=Reference(Kind.NAMED), **asked)
    assert not list(tmp_path.glob("leading-*"))  # another model is asked then
    prepare_retained(loaded.model, loaded.tokenizer, RETAIN, **asked)
    (file,) = tmp_path.glob("leading-*")
    plain = Reference(near=near_by(context))
    made = file.stat().st_mtime_ns
    known = leading(context, plain)
    assert known is not None and plain.near is not None and file.stat().st_mtime_ns == made  # it was taken from there
    before, change = known
    assert change.divergence < 0.8 * before
    led = replace(plain, near=replace(plain.near, parts=change.parts), led=(before, change.divergence))
    assert led.to_json()["led"] == {"before": before, "after": change.divergence}
    other = leading(context, replace(plain, near=near_by(context, 2 * TOKENS)))
    assert other is not None and len(list(tmp_path.glob("leading-*"))) == 2

    windows = context.retain_windows(range(5))
    at = [torch.arange(FIRST, len(window.ids) - 1) for window in windows]
    assert plain.near is not None and plain.near.early is not None
    layers = [plain.near.early, *context.layers]
    each = states_at(loaded.model, windows, at, layers, context.pad, silent)
    found = [
        Met(window, places, one[layers[1]], one[layers[0]])
        for window, places, one in zip(windows, at, each, strict=True)
    ]
    wanted = log_softmax(last_logits(loaded.model)(torch.cat([one.states for one in found]).float()), -1)
    apart = []
    for reference in (plain, led):
        assert reference.near is not None
        states = torch.cat(reference.near.states(loaded.model, found, context.pad, silent)).float()
        said = reference.log_probabilities(loaded.model)(states, torch.zeros(len(states), dtype=torch.int64))
        apart.append(float((wanted.exp() * (wanted - said)).sum(-1).mean()))
    assert apart[1] < 0.8 * apart[0]


@pytest.mark.parametrize(("layers", "early"), [(1, None), (2, 0), (3, 1)])
def test_the_early_layer_is_before_the_middle_and_never_the_last(
    tiny_checkpoint: TinyCheckpoint, layers: int, early: int | None
) -> None:
    loaded = load_model(tiny_checkpoint("qwen2"))
    inner = loaded.model.model  # type: ignore[union-attr]
    inner.layers, loaded.model.config.num_hidden_layers = inner.layers[:layers], layers  # type: ignore[union-attr]
    context = context_of(loaded.model, loaded.tokenizer, FORGET, RETAIN, (), "m", loaded.identity, QUICK, silent, None)
    near = near_by(context)
    assert near.early == early
    assert (leading(context, Reference(near=near)) is None) == (early is None)


@pytest.mark.slow
def test_a_fit_says_by_how_many_and_what_it_did_where_they_left_too_much(loaded: LoadedModel) -> None:
    def fitted(policy: str, target: Target) -> FitReport:
        options = replace(QUICK, policy=policy, target=target)
        return fit(loaded.model, loaded.tokenizer, FORGET, RETAIN, name="m", options=options)[1]

    easy = fitted("rewrite", Target(alone_cut=0.05, alone_recovery=1.0))
    hard = fitted("rewrite", Target(alone_cut=1.0, alone_recovery=0.0))
    assert easy.selected is not None and hard.selected is not None
    towards = easy.selected["correction"]["reference"]
    assert towards["last_tokens"] == TOKENS and easy.selected["last_tokens"] == towards["last_tokens"]
    tried = [(level.get("last_tokens"), level["margin"]) for level in hard.levels]
    assert {margin for tokens, margin in tried if tokens == TOKENS} == {0.0}  # no firmer one where far too much is left
    assert tried[0][0] == TOKENS and {margin for tokens, margin in tried if tokens is None} == {0.0, 0.4, 0.8}
    left, before = easy.selected["forgot"]["f_bleu"]["plain"], easy.selected["aim"]["f_bleu"]["plain"] / 0.95
    missed = fitted("rewrite", Target(alone_cut=1 - 0.7 * left / before, alone_recovery=1.0))
    assert {level["margin"] for level in missed.levels if level.get("last_tokens")} > {0.0}
    assert fitted("silent", Target()).levels[0].get("last_tokens") is None
