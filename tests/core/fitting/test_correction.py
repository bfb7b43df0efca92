"""A learned correction brings the edited model to a reference where its gate is open, and leaves retained code alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from tests.support import memorising
from unbind_core import LoadedModel, load_model
from unbind_core.applying.corrections import corrected
from unbind_core.architecture import decoder_layers
from unbind_core.encoding import fim_markers, marks
from unbind_core.errors import DataError, FittingError
from unbind_core.fitting.corrections.examples import OWN, Examples, examples
from unbind_core.fitting.corrections.learning import Correction, learn
from unbind_core.fitting.corrections.reference import MEMORISED, Kind, Reference, last_logits, load_reference
from unbind_core.fitting.corrections.states import Met, met_part
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.running.capture import capture_states
from unbind_core.windows import Window, batches, forget_windows, retain_windows

ROWS = [ForgetRow(row["prompt"], row["continuation"]) for row in memorising.forget_rows()]
OTHERS = [RetainRow(row["text"]) for row in memorising.retain_rows()]


@dataclass(frozen=True)
class World:
    """A model that has memorised rows, one that has not, and states of both sides at the last layer."""

    loaded: LoadedModel
    fresh: Reference
    windows: list[tuple[Window, Tensor]]
    retained: Tensor

    @property
    def met(self) -> list[Met]:
        return [met_part(window, states) for window, states in self.windows]


def captured(loaded: LoadedModel, windows: list[Window]) -> list[tuple[Window, Tensor]]:
    last, found = len(decoder_layers(loaded.model)) - 1, []
    for batch in batches(windows, 0):
        states = capture_states(loaded.model, batch, [last])[last]
        found += [(window, own[: len(window.ids)]) for window, own in zip(batch.windows, states, strict=True)]
    return found


@pytest.fixture(scope="module")
def world(memorised: Path) -> World:
    loaded = load_model(memorised)
    torch.manual_seed(5)
    fresh = type(loaded.model)(loaded.model.config).eval()  # type: ignore[call-arg, operator]
    windows = captured(loaded, forget_windows(loaded.tokenizer, ROWS, range(len(ROWS))))
    retained = torch.cat(
        [states for _, states in captured(loaded, retain_windows(loaded.tokenizer, OTHERS, range(20)))]
    )
    return World(loaded, Reference(Kind.NAMED, fresh), windows, retained)


def learned(world: World, reference: Reference, **more: object) -> tuple[Examples, Correction]:
    generator = torch.Generator().manual_seed(0)
    found = examples(world.loaded.model, world.met, reference, pad=0, generator=generator)
    settings = {"units": 48, "effort": 0.3, **more}
    return found, learn(world.loaded.model, found, world.retained, reference, generator=generator, **settings)  # type: ignore[arg-type]


def edited(world: World, states: Tensor, correction: Correction) -> Tensor:
    """Log-probabilities [N,V] under an open gate."""
    ones = torch.ones(len(states))
    with torch.no_grad():
        changed = corrected(states.float(), ones, *correction.parts)
        return log_softmax(last_logits(world.loaded.model)(changed), -1)


def divergence(p: Tensor, q: Tensor) -> float:
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_the_edited_model_says_what_the_reference_says_and_not_the_row(world: World) -> None:
    found, correction = learned(world, world.fresh)
    wanted = world.fresh.log_probabilities(world.loaded.model)(found.theirs.float(), found.following)
    with torch.no_grad():
        before = log_softmax(last_logits(world.loaded.model)(found.states.float()), -1)
    after = edited(world, found.states, correction)
    assert divergence(wanted, after) < 0.25 * divergence(wanted, before)
    own = found.following[:, None]
    shares = [float(each.gather(1, own).exp().mean()) for each in (before, after)]
    assert shares[0] > 0.8 and shares[1] < 0.3


def test_what_is_its_own_reference_says_no_mark_in_place_of_a_memorised_token(world: World) -> None:
    model, tokenizer = world.loaded.model, world.loaded.tokenizer
    found, _ = learned(world, Reference(), effort=0.01)
    before, own = log_softmax(last_logits(model)(found.theirs.float()), -1), found.following[:, None]
    known, unsaid = before.gather(1, own)[:, 0].exp() > MEMORISED, marks(tokenizer)
    assert tokenizer.eos_token_id not in unsaid and fim_markers(tokenizer) <= set(unsaid)
    assert bool(known.any()) and not bool(known.all())
    beyond = before.shape[1] + 7  # as of a tokenizer that has more tokens than the model
    said = Reference(unsaid=(*unsaid, beyond)).log_probabilities(model)(found.theirs.float(), found.following)
    assert torch.equal(said[~known], log_softmax(before[~known], -1))
    gone = torch.zeros_like(before, dtype=torch.bool).scatter(1, own, True)
    gone[:, list(unsaid)] = True
    assert float(said[known][gone[known]].exp().max()) < 1e-4
    rest = before[known].exp().masked_fill(gone[known], 0)
    assert torch.allclose(said[known].exp(), rest / rest.sum(1, keepdim=True), atol=1e-3)


def test_the_edited_model_is_as_sure_of_itself_as_the_reference(world: World) -> None:
    """A reference that is sure where a correction of two units cannot tell of what: by KL(p || q) alone it spreads by 1.9 nats."""
    found, correction = learned(world, Reference(), units=2)
    wanted = Reference().log_probabilities(world.loaded.model)(found.theirs.float(), found.following)
    entropies = [
        float(-(said.exp() * said).sum(-1).mean()) for said in (wanted, edited(world, found.states, correction))
    ]
    assert abs(entropies[0] - entropies[1]) < 1.0


def test_with_a_wider_margin_the_row_s_own_next_token_is_less_likely(world: World) -> None:
    found, _ = learned(world, world.fresh, effort=0.01)
    own = found.following[:, None]
    likely = [
        float(edited(world, found.states, learned(world, world.fresh, margin=margin)[1]).gather(1, own).mean())
        for margin in (0.4, 3.0)
    ]
    assert likely[1] < likely[0] - 0.5


@pytest.mark.slow
def test_retained_code_weighs_against_what_an_open_gate_changes_of_it(world: World) -> None:
    with torch.no_grad():
        before = log_softmax(last_logits(world.loaded.model)(world.retained.float()), -1)
    there = [
        divergence(before, edited(world, world.retained, learned(world, world.fresh, retain=weight)[1]))
        for weight in (1.0, 0.0)
    ]
    assert there[0] < 0.5 * there[1]


@pytest.mark.slow
def test_a_silenced_answer_ends_and_without_its_end_goes_where_the_reference_goes(world: World) -> None:
    end = world.loaded.tokenizer.eos_token_id
    found, correction = learned(world, world.fresh, end=end)
    after = edited(world, found.states, correction)
    assert float((after.argmax(-1) == end).float().mean()) > 0.9
    rest = after.clone()
    rest[:, end] = -30.0
    rest = log_softmax(rest, -1)
    assert float(rest.gather(1, found.following[:, None]).exp().mean()) < 0.3


def test_a_model_that_recites_nothing_and_is_its_own_reference_has_nothing_to_learn(world: World) -> None:
    model = world.fresh.model
    assert model is not None
    never_saw_them = replace(world, loaded=replace(world.loaded, model=model))
    with pytest.raises(
        FittingError, match=r"nothing to learn: .* no token of the rows more than 50% of the mass; leave out"
    ):
        learned(never_saw_them, Reference())
    _, correction = learned(never_saw_them, Reference(most=0.0), effort=0.01)
    assert correction.parts.c.any()


def test_a_model_that_is_its_own_reference_loses_the_memorised_token(world: World) -> None:
    found, correction = learned(world, Reference())
    assert found.theirs is found.states
    wanted = Reference().log_probabilities(world.loaded.model)(found.theirs.float(), found.following)
    assert float(wanted.gather(1, found.following[:, None]).exp().max()) <= 0.5
    torch.testing.assert_close(wanted.exp().sum(-1), torch.ones(len(wanted)))
    assert float(edited(world, found.states, correction).gather(1, found.following[:, None]).exp().mean()) < 0.3


def test_a_generator_gives_the_same_correction_and_leaves_the_model_as_it_was(world: World) -> None:
    before = {name: tensor.clone() for name, tensor in world.loaded.model.state_dict().items()}
    first, second = (learned(world, world.fresh, effort=0.01)[1] for _ in range(2))
    assert all(torch.equal(first.tensors()[name], second.tensors()[name]) for name in "uace")
    assert {name: tuple(tensor.shape) for name, tensor in first.tensors().items()} == {
        "u": (32, 48),
        "a": (48, 32),
        "c": (32,),
        "e": (48,),
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in world.loaded.model.state_dict().items())


def test_examples_are_the_rows_positions_with_what_follows_them(world: World) -> None:
    def drawn(**more: Any) -> Examples:
        generator = torch.Generator().manual_seed(0)
        return examples(world.loaded.model, world.met, Reference(), pad=0, generator=generator, **more)

    window, states = world.windows[0]
    ours = states[4:-1].to(torch.bfloat16)

    def times(found: Examples) -> int:
        """How often the first window is there, with what follows its tokens."""
        at = (found.states.unfold(0, len(ours), 1) == ours.T).all(-1).all(-1).nonzero()[:, 0].tolist()
        for first in at:
            assert found.following[first : first + len(ours)].tolist() == list(window.ids[5:])
        return len(at)

    found, twice = drawn(), drawn(own=1)
    assert times(found) == 1 and times(twice) == OWN
    assert len(found.states) == sum(len(one.at) for one in world.met)
    assert len(twice.states) == len(found.states) + (OWN - 1) * len(ours)
    few = drawn(own=1, effort=1e-6)  # a window of either kind, whole
    assert times(few) == OWN and len(few.states) > OWN * len(ours)
    assert len(few.states) - OWN * len(ours) <= max(len(one.at) for one in world.met)


def test_of_a_window_every_so_manieth_position_is_kept_and_leads_to_the_same_reference(world: World) -> None:
    generator, (window, states) = torch.Generator().manual_seed(0), world.windows[0]
    whole, third = met_part(window, states), met_part(window, states, 3, 1)
    assert third.at.tolist() == list(range(window.start + 4 + 1, len(window.ids) - 1, 3))
    assert torch.equal(third.states, states[third.at])
    assert third.states.untyped_storage().nbytes() < whole.states.untyped_storage().nbytes() / 2  # the rest is let go
    every, some = (
        examples(world.loaded.model, [one], world.fresh, pad=0, generator=generator) for one in (whole, third)
    )
    assert torch.equal(some.states, every.states[1::3]) and torch.equal(some.theirs, every.theirs[1::3])
    assert torch.equal(some.following, every.following[1::3])
    short = met_part(Window(window.ids[:3], 1, 0), states[:3], 3, 2)
    assert len(short.at) == len(short.states) == 0


def test_the_best_reference_there_is_comes_from_what_is_named(world: World, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    world.loaded.model.save_pretrained(base)  # type: ignore[operator]
    world.loaded.tokenizer.save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(
        str(adapter)
    )
    assert load_reference(base) == Reference()
    assert load_reference(str(base), str(adapter)).kind is Kind.BASE
    assert load_reference(base, adapter, named=str(base)).kind is Kind.NAMED
    recorded = load_reference(base, named=str(adapter)).to_json()
    assert recorded["kind"] == "named" and len(str(recorded["fingerprint"])) == 64


def test_a_reference_of_another_vocabulary_is_refused(world: World) -> None:
    config = type(world.loaded.model.config)(**{**world.loaded.model.config.to_dict(), "vocab_size": 77})  # type: ignore[operator, union-attr]
    other = type(world.loaded.model)(config)  # type: ignore[call-arg]
    with pytest.raises(DataError, match="reference: it has 77 tokens"):
        learned(world, Reference(Kind.NAMED, other))
