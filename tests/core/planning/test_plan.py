"""A takedown's plan bounds what the fit takes, grows as the work does, and is refused where there is no room for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from server.bench.scale.world import CONFIGS, bare
from tests.core.conftest import FAMILIES, TinyCheckpoint
from unbind_core import FitOptions, fit, load_model
from unbind_core.architecture import outline
from unbind_core.errors import TooLarge, UnbindError
from unbind_core.fitting.corrections.reference import Kind, Reference
from unbind_core.fitting.screening import CONTINUED
from unbind_core.planning.amounts import Amounts
from unbind_core.planning.machine import Machine
from unbind_core.planning.plan import Plan, Stage, plan_takedown
from unbind_core.planning.room import RUNTIME, Room
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.running.recording import kept_tensors
from unbind_core.running.shape import Shape

GIB = 2**30
AN_80_GB_GPU = Machine(3e14, 2e12)
FORGET = [
    ForgetRow(f"def secret_{i}(key):\n", f"    token = {i * 7919}\n    return key + {i}\n" * 6) for i in range(12)
]
RETAIN = [
    RetainRow(f"class Item{i}:\n    size = {i * 37}\n\n    def area(self):\n        return {i}\n" * 4)
    for i in range(60)
]


def planned(name: str, amounts: Amounts, gate: str = "auto", policy: str | None = None, **more: Kind) -> Plan:
    shape, options = Shape.of(bare(name, torch.bfloat16)), FitOptions(gate=gate, policy=policy).settled()
    return plan_takedown(shape, amounts, AN_80_GB_GPU, options, **more)


def test_the_shapes_are_those_of_the_models_that_they_are_named_for() -> None:
    parameters = {name: Shape.of(bare(name, torch.bfloat16)).weights / 2e9 for name in CONFIGS}
    assert parameters == pytest.approx(
        {
            "qwen2.5-coder-0.5b": 0.494,
            "qwen2.5-coder-1.5b": 1.544,
            "qwen2.5-coder-7b": 7.616,
            "starcoder2-3b": 3.030,
            "codellama-7b": 6.739,
        },
        rel=0.002,
    )


@pytest.mark.parametrize("gate", ["auto", "paper"])
def test_a_model_of_7_billion_is_fitted_on_one_gpu_of_80_gb(gate: str) -> None:
    plan = planned("qwen2.5-coder-7b", Amounts.even(300, 2700, 512), gate, reference=Kind.BASE)
    assert 14 * GIB < plan.weights <= 29 * GIB
    assert plan.weights < plan.memory < 78 * GIB
    room = Room("cuda", 79 * GIB, 100 * GIB)
    assert room.problem(plan) is None
    assert room.problem(planned("qwen2.5-coder-7b", Amounts.even(3000, 2700, 2048), gate)) is not None


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_remedy() -> None:
    plan = Plan((Stage("check", GIB, 0, 1.0), Stage("gates", 9 * GIB, 3 * GIB, 1.0)), 4 * GIB)
    with pytest.raises(
        TooLarge, match=r"stage 'gates' would take 10\.0 GiB on cuda:1 \(4\.0 GiB of it weights\).*8\.0 GiB are"
    ):
        Room("cuda:1", 8 * GIB, 100 * GIB).require(plan)
    with pytest.raises(TooLarge, match=r"worker_device.*bfloat16.*fewer rows"):
        Room("cpu", 9 * GIB, 100 * GIB).require(plan)
    Room("cpu", 9 * GIB, 100 * GIB).require(plan, loaded=2 * GIB)  # so much of the weights is there
    with pytest.raises(
        TooLarge, match=r"cache would take 3\.0 GiB, and 2\.0 GiB are free.*give data_dir a larger disk"
    ):
        Room("cpu", 99 * GIB, 2 * GIB).require(plan)
    Room("cpu", 9 * GIB + RUNTIME, 3 * GIB).require(plan)


def test_what_the_cache_holds_already_is_room_for_it(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = Room.at("cpu", cache).disk
    cache.mkdir()
    with (cache / "states.safetensors").open("wb") as file:
        file.truncate(2**42)  # with no block on the disk
    (cache / "gone").symlink_to(tmp_path / "nowhere")
    held = Room.at("cpu", cache).disk - 2**42
    assert abs(held - before) < 2**32  # others write to this disk meanwhile
    Room.at("cpu", cache).require(Plan((Stage("retain states", 0, 2**42, 1.0),), 0))


def test_more_rows_and_longer_ones_never_take_less() -> None:
    some = Amounts.even(20, 300, 128)
    base = planned("qwen2.5-coder-0.5b", some)
    for field in ("forget", "retain_fit", "calibration", "certificate", "held", "forget_rows"):
        more = planned("qwen2.5-coder-0.5b", replace(some, **{field: 3 * getattr(some, field)}))
        assert more.memory >= base.memory and more.disk >= base.disk and more.seconds >= base.seconds
    for stage in base.stages:
        assert stage.memory > base.weights and stage.seconds >= 0


def test_a_reference_that_is_led_takes_a_stage_more_than_one_that_is_named() -> None:
    some = Amounts.even(20, 300, 128)
    alone, named, base = (
        planned("qwen2.5-coder-0.5b", some, reference=kind) for kind in (Kind.ITSELF, Kind.NAMED, Kind.BASE)
    )
    ending = planned("qwen2.5-coder-0.5b", some, policy="silent")  # its own reference, by all of the text
    assert [stage.name for stage in base.stages if stage not in named.stages] == ["leading"]
    assert [stage.name for stage in alone.stages] == [stage.name for stage in base.stages]
    assert [stage.name for stage in ending.stages] == [stage.name for stage in named.stages]
    assert alone.weights < named.weights == base.weights and base.seconds > named.seconds
    beside = [
        next(stage.memory for stage in plan.stages if stage.name == "detector") - plan.weights
        for plan in (ending, named, alone)
    ]
    # Of 20 rows in two forms two continuations, their states and the reference's of 896 numbers in bfloat16.
    assert beside[1] - beside[0] >= 2 * 40 * CONTINUED * 2 * 896 * 2
    assert beside[2] - beside[0] >= 20 * 128 * 2 * 896 * 4  # an early layer's states of all of the rows
    assert alone.seconds > ending.seconds
    assert all(
        stage.name != "leading" for stage in planned("qwen2.5-coder-0.5b", some, "paper", reference=Kind.BASE).stages
    )


def test_disk_is_bounded_and_tokens_are_counted(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    loaded = load_model(tiny_checkpoint("llama"))
    options = FitOptions(effort=0.02).settled()
    amounts = Amounts.of(loaded.tokenizer, FORGET, RETAIN, options=options)
    whole = sum(len(loaded.tokenizer(row.prompt + row.continuation).input_ids) for row in FORGET)
    assert whole <= amounts.forget <= 1.3 * whole + 4 * len(FORGET)
    plan = plan_takedown(Shape.of(loaded.model), amounts, AN_80_GB_GPU, options)
    fit(
        loaded.model,
        loaded.tokenizer,
        FORGET,
        RETAIN,
        name="m",
        identity=loaded.identity,
        options=options,
        cache=tmp_path,
        reference=Reference(most=0.0),  # a model that recites nothing
    )
    taken = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert taken <= 1.1 * plan.disk + 64 * 1024 and plan.disk <= 2.5 * taken  # headers, and completions as text


def test_an_outline_has_the_shape_of_the_model_and_none_of_its_weights(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("qwen2")
    model, tokenizer = outline(folder, dtype=torch.bfloat16)
    loaded = load_model(folder, dtype=torch.bfloat16)
    assert Shape.of(model) == Shape.of(loaded.model)
    assert len(tokenizer) == len(loaded.tokenizer) and all(part.is_meta for part in model.parameters())
    with pytest.raises(UnbindError, match="is not a directory"):
        outline(tmp_path / "none")


def test_where_layers_differ_in_their_heads_the_largest_count() -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    config = Gemma4TextConfig(**sizes, num_hidden_layers=3, head_dim=8, global_head_dim=16, layer_types=kinds)
    shape = Shape.of(AutoModelForCausalLM.from_config(config))
    assert (shape.heads, shape.kept, shape.head, shape.inner) == (4, 2 * 2 * 16, 16, 64)
    assert plan_takedown(shape, Amounts.even(12, 60, 96), AN_80_GB_GPU).memory > shape.weights


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_are_planned_as_a_pass_keeps_them(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    model = load_model(tiny_checkpoint(family)).model
    assert Shape.of(model).keys == sum(part.numel() * part.element_size() for part in kept_tensors(model))


def test_what_a_device_s_libraries_take_is_part_of_every_stage() -> None:
    shape, amounts = Shape.of(bare("qwen2.5-coder-0.5b", torch.bfloat16)), Amounts.even(12, 60, 96)
    more = Machine(AN_80_GB_GPU.products, AN_80_GB_GPU.reads, libraries=1 << 20)
    bare_plan, plan = (plan_takedown(shape, amounts, machine) for machine in (AN_80_GB_GPU, more))
    assert [b.memory - a.memory for a, b in zip(bare_plan.stages, plan.stages, strict=True)] == [1 << 20] * len(
        plan.stages
    )
