"""The benchmark of gates tells retain rows that repeat protected code from those that do not."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from server import demo
from server.bench.gate.neighbours import apart_figures
from server.bench.gate.together import many_figures
from server.bench.gate.world import Retained, World
from server.bench.gate.written import _parses_lines, divergence, outputs
from tests.server.conftest import MakeModule
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.errors import ModelMismatch, UnbindError
from unbind_core.fitting.corrections.reference import Kind
from unbind_core.progress import silent
from unbind_core.rows import ForgetRow, RetainRow, forget_digest

BODY = "".join(f"    total = total + values[{i}] * weights[{i}]\n" for i in range(12))
FORGET = ForgetRow("def weigh(values, weights):\n    total = 0\n", BODY)
REPEATS = RetainRow("def weigh_again(values, weights):\n    total = 0\n" + BODY)
OTHERS = [RetainRow(f"def read_{name}(path):\n    return open(path, '{name}').read()\n") for name in ("rb", "rt", "r")]


@pytest.fixture
def world(loaded: LoadedModel) -> World:
    """One row to forget; of four held-out rows one holds it."""
    return World(loaded, {"a": [FORGET], "b": [], "c": []}, OTHERS, OTHERS, [*OTHERS, REPEATS])


def test_held_out_rows_that_repeat_a_forget_row_are_counted_and_left_out(world: World, make_module: MakeModule) -> None:
    retained = Retained(world, silent)
    module = make_module("one")
    found = apart_figures(world, retained, [FORGET], module)
    before, after = retained.perplexities((module,), OTHERS)
    assert found == {"repeating_rows": 1, "ppl_increase": after / before - 1}
    every = retained.perplexities((module,), world.test)
    assert every[1] / every[0] - 1 != pytest.approx(found["ppl_increase"], abs=1e-6)
    assert retained.measure((module,))["ppl_increase"] == pytest.approx(every[1] / every[0] - 1, abs=1e-9)


def test_without_modules_nothing_rises(world: World) -> None:
    retained = Retained(world, silent)
    assert retained.rise((), OTHERS) == 0.0
    assert retained.measure(())["unchanged"] == 1.0


def test_two_open_modules_are_as_far_from_another_model_as_one_of_both_strengths(
    world: World, make_module: MakeModule
) -> None:
    halves = [make_module(name, kappa=15.0) for name in ("one", "two")]
    alone, both, whole = (
        divergence(world, world.loaded.model, [FORGET], modules)
        for modules in (halves[:1], halves, [make_module("one", kappa=30.0)])
    )
    assert 0 < alone != pytest.approx(both, rel=1e-3)
    assert both == pytest.approx(whole, rel=1e-4)
    assert divergence(world, world.loaded.model, [FORGET], ()) == pytest.approx(0, abs=1e-6)


def test_a_line_that_was_cut_off_says_nothing_of_what_parses() -> None:
    whole, cut, wrong = (
        "def f():\n    return 1",
        "def f():\n    return 1\n    return (1",
        "def f(:\n    return 1\n    re",
    )
    assert [_parses_lines(text, ended=False) for text in (whole, cut, wrong)] == [True, True, False]
    assert [_parses_lines(text, ended=True) for text in (whole, cut, wrong)] == [True, False, False]


def test_what_another_model_writes_is_measured_as_what_modules_make_of_this_one(world: World) -> None:
    other = copy.deepcopy(world.loaded.model)
    with torch.no_grad():
        for parameter in other.get_output_embeddings().parameters():  # type: ignore[operator]
            parameter.neg_()
    own, same, its = (outputs(world, world.loaded, [FORGET], (), model) for model in (None, world.loaded.model, other))
    assert own == same and own["samples"] != its["samples"]
    assert its["perplexity"] > own["perplexity"] and all(
        0 <= one["parsed"] <= one["parsed_lines"] <= 1 for one in (own, its)
    )


def test_what_was_kept_is_measured_and_what_is_of_other_rows_or_policies_refused(
    world: World, make_module: MakeModule, tmp_path: Path
) -> None:
    world = replace(world, forget={"a": [], "b": [], "c": [FORGET]})
    retained, path = Retained(world, silent), tmp_path / "many-0-beside.safetensors"

    def figures(policy: str | None = None) -> dict[str, object]:
        return many_figures(world, world.loaded, retained, [1], None, tmp_path, silent, policy)

    kept = replace(make_module("many-0-beside", kappa=30.0), forget_digest=forget_digest([FORGET]))
    kept.save(path)
    found = figures()
    assert found == figures(kept.policy)
    one = found["1"]
    assert isinstance(one, dict)
    assert one["retained"] == retained.measure((kept,))
    assert one["none"]["kl_to_retrained"] == pytest.approx(0, abs=1e-6) and one["all"]["kl_to_retrained"] > 0.01
    with pytest.raises(UnbindError, match=r"--keep: .*many-0-beside\.safetensors was fitted on other rows"):
        figures("rewrite" if kept.policy == "silent" else "silent")
    replace(kept, measured={"correction": {"reference": {"kind": "named"}}}).save(path)
    with pytest.raises(UnbindError, match="towards another reference"):
        figures()
    replace(kept, forget_digest=forget_digest([FORGET, FORGET])).save(path)
    with pytest.raises(UnbindError, match="name another folder"):
        figures()
    replace(kept, model=replace(kept.model, fingerprint="another")).save(path)
    with pytest.raises(ModelMismatch):
        figures()


def test_fits_are_led_towards_the_reference_that_is_asked_for() -> None:
    demo_model = load_model(demo.BASE, demo.ADAPTER)
    sources = {kind: World.load(demo_model, kind=kind).reference for kind in Kind}
    assert {kind: source.kind for kind, source in sources.items()} == {kind: kind for kind in Kind}
    assert World.load(demo_model).reference.kind is Kind.NAMED
    fingerprints = {source.identity.fingerprint if source.identity else None for source in sources.values()}
    assert len(fingerprints) == 3 and sources[Kind.ITSELF].model is None
