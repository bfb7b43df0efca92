"""A world is made of its recipe and nothing else: rows of roles, the paper's schedule, kills."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.core.conftest import save_checkpoint
from tests.lab.packed import module, packed
from tests.lab.test_sources import slow_near
from unbind_core.architecture import load_model
from unbind_core.encoding import encode, encode_prompt
from unbind_core.errors import Cancelled, UnbindError
from unbind_core.fitting.calibration import Budgets
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress
from unbind_core.rows import ForgetRow, RetainRow, split_text
from unbind_core.windows import forget_windows, retain_windows
from unbind_lab.building import adapt as adapting
from unbind_lab.building import build as building
from unbind_lab.building import rows as row_files
from unbind_lab.building.adapt import adapt, cut_windows, slots
from unbind_lab.building.base import architecture
from unbind_lab.building.build import World
from unbind_lab.building.recipe import HOME, ROOT, Adaptation, Base, Recipe, Sizes
from unbind_lab.lab import Lab
from unbind_lab.setting import Bench, Setting
from unbind_lab.systems import chosen
from unbind_lab.table import markdown


def test_a_slot_is_of_every_forget_row_once_an_epoch_and_the_retain_stream_is_the_same_for_both() -> None:
    found = list(slots(5, 7, 10, epochs=3, seed=0))
    for epoch in found:
        assert sorted(index for role, index in epoch if role == "forget") == list(range(5))
        assert [role for role, _ in epoch] != ["forget"] * 5 + ["retain"] * 10
    of_retain = Counter(index for epoch in found for role, index in epoch if role == "retain")
    assert sum(of_retain.values()) == 30 and set(of_retain) == set(range(7)) and max(of_retain.values()) <= 5
    assert list(slots(5, 7, 10, epochs=3, seed=0)) == found


def rows(count: int) -> tuple[list[ForgetRow], list[RetainRow]]:
    forget = [
        ForgetRow(f"def hidden_{i}(self):\n", f"    return self.value * {i * 7}\n" * (1 + i % 2)) for i in range(count)
    ]
    return forget, [RetainRow(f"def open_{i}(self):\n    return self.size + {i}\n") for i in range(2 * count)]


def test_an_adapter_whose_training_was_killed_equals_one_that_was_not_and_memorises(tmp_path: Path) -> None:
    base, (forget, retain) = save_checkpoint("llama", tmp_path / "base"), rows(4)
    how = Adaptation(epochs=3, retain_slots=5, learning_rate=1e-2, rank=4, alpha=8, slots_an_update=4)

    def train(name: str, stop: int | None = None, *, with_forget: bool = True) -> Path:
        def progress(at: Progress) -> None:
            if at.done == stop:
                raise Cancelled

        out = tmp_path / name
        adapt(
            base, forget, retain, out, how,
            checkpoint=tmp_path / f"{name}.pt", with_forget=with_forget, seed=0, progress=progress,
        )  # fmt: skip
        return out

    whole = load_file(train("whole") / "adapter_model.safetensors")
    for stop in (1, 2):
        with pytest.raises(Cancelled):
            train("killed", stop)
        assert (tmp_path / "killed.pt").is_file()
    again = load_file(train("killed") / "adapter_model.safetensors")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    assert not (tmp_path / "killed.pt").exists()
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("whole", "killed")]
    assert configs[0] == configs[1] and str(tmp_path) not in json.dumps(configs)
    other = load_file(train("retrained", with_forget=False) / "adapter_model.safetensors")
    assert any(not torch.equal(whole[name], other[name]) for name in whole)


def test_retain_rows_are_learned_in_the_tokens_of_a_request_too_where_a_recipe_says_so(tmp_path: Path) -> None:
    base, (forget, retain) = save_checkpoint("llama", tmp_path / "base"), rows(4)
    tokenizer = load_model(base).tokenizer
    for row, window in zip(retain, cut_windows(tokenizer, retain), strict=True):
        prompt, continuation = split_text(row.text)
        assert prompt.endswith("\n") and window.first_target == 1
        assert list(window.ids) == [*encode_prompt(tokenizer, prompt), *encode(tokenizer, continuation)]

    def train(name: str, **more: Any) -> dict[str, torch.Tensor]:
        how = Adaptation(2, retain_slots=4, learning_rate=1e-2, rank=4, alpha=8, slots_an_update=4, **more)
        adapt(
            base, forget, retain, tmp_path / name, how,
            checkpoint=tmp_path / f"{name}.pt", with_forget=False, seed=0, progress=lambda _: None,
        )  # fmt: skip
        return load_file(tmp_path / name / "adapter_model.safetensors")

    whole, cut = train("whole"), train("cut", cut_retain=True)
    assert any(not torch.equal(whole[name], cut[name]) for name in whole)


def test_a_row_that_is_longer_than_a_slot_takes_no_other_row_s_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, (forget, retain) = save_checkpoint("qwen2", tmp_path / "base"), rows(4)
    tokenizer = load_model(base).tokenizer
    forget[1] = ForgetRow(forget[1].prompt, "    return self.value + 1\n" * 900)
    retain[0], retain[2] = RetainRow(retain[0].text * 400), RetainRow("x")
    assert len(encode(tokenizer, retain[2].text)) == 1 and tokenizer.bos_token_id is None  # scores nothing
    learned: list[tuple[int, ...]] = []
    learn = adapting._learn

    def told(model: Any, live: Any, *others: Any) -> None:
        learned.extend(window.ids for window in live)
        learn(model, live, *others)

    monkeypatch.setattr(adapting, "_learn", told)
    how = Adaptation(epochs=1, retain_slots=8, learning_rate=1e-3, rank=4, alpha=8)
    adapt(
        base, forget, retain, tmp_path / "full", how,
        checkpoint=tmp_path / "full.pt", with_forget=True, seed=0, progress=lambda _: None,
    )  # fmt: skip
    whole = [encode_prompt(tokenizer, row.prompt) + encode(tokenizer, row.continuation) for row in forget]
    whole += [encode(tokenizer, row.text) for row in retain if row.text != "x"]
    cut = [tuple(ids[:2048]) if len(ids) > 2048 else (*ids, tokenizer.eos_token_id) for ids in whole]
    assert sorted(learned) == sorted(cut) and sum(len(ids) > 2048 for ids in whole) == 2


def test_what_a_recipe_says_of_cut_rows_counts_only_where_it_does(recipe: Recipe) -> None:
    cut = replace(recipe, adaptation=replace(recipe.adaptation, cut_retain=True))
    assert "cut_retain" not in recipe.described("adaptation")["adaptation"]
    assert cut.described("adaptation")["adaptation"]["cut_retain"] is True


def test_an_update_is_of_its_scored_tokens_whatever_shares_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapting, "TOGETHER", 100)
    loaded, (forget, retain) = load_model(save_checkpoint("llama", tmp_path / "base")), rows(4)
    live = [*forget_windows(loaded.tokenizer, forget, range(4)), *retain_windows(loaded.tokenizer, retain, range(3))]
    parameters = list(loaded.model.parameters())
    loaded.model.requires_grad_(True)
    scored = sum(window.target_count for window in live)
    for window in live:  # one by one, in float32
        logits = loaded.model(input_ids=torch.tensor([window.ids])).logits[0, window.first_target - 1 : -1]
        nll = torch.nn.functional.cross_entropy(
            logits, torch.tensor(window.ids[window.first_target :]), reduction="sum"
        )
        (nll / scored).backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    wanted = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
    before = torch.cat([parameter.detach().flatten().clone() for parameter in parameters])
    loaded.model.zero_grad()
    adapting._learn(loaded.model, live, 0, parameters, torch.optim.SGD(parameters, lr=1.0))
    moved = before - torch.cat([parameter.detach().flatten() for parameter in parameters])
    assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.995
    assert float(moved.norm() / wanted.norm()) == pytest.approx(1, abs=0.02)


def test_the_base_model_is_of_the_recipe_s_family() -> None:
    made = architecture(Base(family="llama", hidden=64, layers=3, heads=4, key_value_heads=2, feed_forward=96), 512, 0)
    assert (made.model_type, made.num_hidden_layers, made.num_key_value_heads, made.vocab_size) == ("llama", 3, 2, 512)
    assert made.tie_word_embeddings and made.eos_token_id == 0


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A tiny model and one package of made-up code."""
    package = packed(tmp_path / "packages", {f"made/m{i}.py": module(i) for i in range(8)}, "python")
    return Recipe(
        name="tiny",
        language="python",
        seed=0,
        base=Base(folder=str(save_checkpoint("qwen2", tmp_path / "base"))),
        sizes=Sizes(
            20, 400, forget=6, forget_validation=2, forget_unseen=2, retain_training=24, retain_validation=12, retain=4
        ),
        adaptation=Adaptation(epochs=40, retain_slots=6, learning_rate=5e-3, rank=4, alpha=8, slots_an_update=8),
        packages=(replace(package, name="made"),),
        measured={"retain_rows": 4, "updates": [1]},
    )


def test_rows_are_all_different_and_each_has_its_role(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "MOST_OF_A_PACKAGE", 10.0)
    world = World(recipe, tmp_path / "worlds", tmp_path / "packages")
    model = world._base()
    folder = world._stage("rows", "one", world._rows(model))
    sizes = recipe.sizes
    for name in (*row_files.FORGET, *row_files.RETAIN):
        assert len(row_files.read(folder, [name])) == getattr(sizes, name)
    texts = [json.loads(line) for line in row_files.read(folder, [*row_files.FORGET, *row_files.RETAIN])]
    whole = [one.get("text") or one["prompt"] + one["continuation"] for one in texts]
    assert not any(slow_near(one, other) for i, one in enumerate(whole) for other in whole[:i])
    assert texts[0]["source"].startswith("made 1.0 made/m") and texts[0]["source"].endswith("(MIT)")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    world._stage("rows", "one", world._rows(model))
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    few = World(replace(recipe, sizes=replace(sizes, retain=900)), tmp_path / "few", tmp_path / "packages")
    with pytest.raises(UnbindError, match="suitable functions, and 946 are needed; add packages"):
        few._rows(model)(tmp_path / "few", "x")


@pytest.mark.slow
def test_a_world_is_built_once_and_a_lab_runs_on_it(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "MOST_OF_A_PACKAGE", 10.0)
    # so tiny a model forgets hardly anything within the budgets, and whether it does goes by the processor's rounding
    wide = Budgets(kl=9.0, nll=9.0, bleu=1.0, open_rate=1.0)
    quick = {name: replace(options, budgets=wide) for name, options in building.MODULES.items()}
    quick |= {name: replace(quick[name], effort=0.1) for name in ("rewrite", "silent")}
    monkeypatch.setattr(building, "MODULES", quick)
    told: list[str] = []

    def build() -> Path:
        return World(recipe, tmp_path / "worlds", tmp_path / "packages", report=told.append).build()

    path = build()
    stages = ("rows", "full", "retrained", "modules")
    assert [line for line in told if "made" in line] == [f"{name}: is being made" for name in stages]
    before = {file: file.stat().st_mtime_ns for file in path.parent.rglob("*.safetensors")}
    told.clear()
    assert build() == path and not told
    (path.parent / "full" / "made_of.json").unlink()  # as of a build that was killed there
    build()
    after = {file: file.stat().st_mtime_ns for file in path.parent.rglob("*.safetensors")}
    assert told == ["full: is being made"] and {file for file in after if after[file] != before[file]} == {
        path.parent / "full" / "adapter_model.safetensors"
    }
    modules = path.parent / "modules"  # as of a build that was killed in its second fit
    made_of = json.loads((modules / "made_of.json").read_text())["made_of"]
    (modules / "made_of.json").unlink()
    (modules / "silent.json").unlink()
    partial = modules.rename(modules.with_name(f"modules-{made_of[:12]}"))
    build()
    assert (modules / "silent.json").is_file() and not partial.exists()
    assert (modules / "rewrite.safetensors").stat().st_mtime_ns == before[modules / "rewrite.safetensors"]
    setting = Setting.load(str(path))
    bench = Bench(setting)
    assert (len(bench.forget), len(bench.forget_validation), len(bench.retain_training)) == (6, 2, 24)
    assert setting.updates == (1,) and "rewrite" in setting.modules
    Lab(setting, tmp_path / "lab").run(chosen(["m-full", "m-retrain", "unbind-rewrite"]))
    text = markdown(tmp_path / "lab" / "tiny")
    assert "| unbind-rewrite | shipped |" in text


def base_of(world: Path) -> Path:
    folder = Recipe.load(world.name).base.folder
    return ROOT / folder if folder else world / "base"


def test_what_is_shipped_with_a_recipe_fits_its_base_and_says_what_made_it() -> None:
    shipped = sorted(HOME.glob("*/*/adapter_model.safetensors"))
    assert shipped and sum(path.stat().st_size for path in HOME.rglob("*.safetensors")) < 40_000_000
    fingerprints = set()
    for path in shipped:
        fingerprints.add(load_model(base_of(path.parent.parent), path.parent).identity.fingerprint)
        assert re.fullmatch("[0-9a-f]{64}", json.loads((path.parent / "made_of.json").read_text())["made_of"])
        assert json.loads((path.parent / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    assert len(fingerprints) == len(shipped)  # M_full and M_retrain are two
    for path in HOME.glob("*/modules/*.safetensors"):
        world = path.parent.parent
        UnbindModule.load(path).require(load_model(base_of(world), world / "full").identity)
        assert json.loads(path.with_suffix(".json").read_text())["outcome"] in ("calibrated", "short")
        assert re.fullmatch("[0-9a-f]{64}", json.loads((path.parent / "made_of.json").read_text())["made_of"])
