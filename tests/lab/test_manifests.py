"""The paper's settings: rows that the user has in manifests, a checkpoint that is not ours, its own schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from server.cli import build
from tests.core.conftest import save_checkpoint
from tests.lab.test_building import rows
from unbind_core.errors import DataError, UnbindError
from unbind_lab.building.base import build as base_of
from unbind_lab.building.build import World
from unbind_lab.building.recipe import Recipe, Sizes, names
from unbind_lab.building.rows import ROLES, read
from unbind_lab.lab import Lab
from unbind_lab.setting import Bench, Setting
from unbind_lab.systems import chosen
from unbind_lab.table import markdown

SIZES = Sizes(forget=6, forget_validation=2, forget_unseen=2, retain_training=16, retain_validation=12, retain=4)
PAPER = [name for name in names() if not name.startswith("micro-")]


def manifests(recipe: Recipe, folder: Path) -> Path:
    """Made-up rows of the small sizes under the names that the recipe gives."""
    forget, retain = rows(40)
    for role in ROLES:
        path = folder / recipe.manifests[role]
        path.parent.mkdir(parents=True, exist_ok=True)
        count = getattr(SIZES, role)
        some = [{"text": row.text} for row in retain[:count]]
        if role.startswith("forget"):
            some = [{"prompt": row.prompt, "continuation": row.continuation} for row in forget[:count]]
            forget = forget[count:]
        else:
            retain = retain[count:]
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


def small(name: str, base: Path) -> Recipe:
    """The recipe as it is shipped, but for its sizes and its checkpoint."""
    recipe = Recipe.load(name)
    return replace(
        recipe,
        base=replace(recipe.base, folder=str(base)),
        sizes=SIZES,
        adaptation=replace(recipe.adaptation, epochs=1, retain_slots=6),
        measured={**recipe.measured, "retain_rows": 4, "completed_rows": 4},
    )


def test_the_paper_s_settings_are_its_appendix() -> None:
    told = {"qwen-csn": 752, "qwen-stack": 846, "codellama-csn": 940, "codellama-stack": 940}
    assert set(told) <= set(PAPER) and len(PAPER) == 8
    for name in PAPER:
        recipe = Recipe.load(name)
        how, sizes = recipe.adaptation, recipe.sizes
        updates = how.epochs * -(-(sizes.forget + how.retain_slots) // how.slots_an_update)
        assert updates == told.get(name, updates) and (how.rank, how.alpha, how.learning_rate) == (32, 64, 5e-5)
        assert (sizes.forget, sizes.retain_training, sizes.retain_validation, sizes.retain) == (300, 8280, 460, 460)
        assert recipe.base.dtype == "bfloat16" and recipe.base.hub.split("/")[0] in ("Qwen", "codellama")
        assert set(recipe.manifests) == set(ROLES) and not recipe.packages and not how.validation
    forgotten = {name: Recipe.load(name).manifests["forget"] for name in PAPER}
    assert forgotten["qwen-csn-java"] == forgotten["codellama-csn-java"] == "csn/forget-java.jsonl"
    assert Recipe.load("qwen-csn-java").manifests["retain"] == Recipe.load("qwen-csn").manifests["retain"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), [("qwen-csn", "qwen2"), ("codellama-csn-java", "llama")])
def test_a_setting_of_the_paper_is_built_and_measured_on_a_checkpoint_of_its_architecture(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "unbind_lab.building.build.MODULES", {}
    )  # the run fits the paper's gate, which is one fit enough
    recipe = small(name, save_checkpoint(family, tmp_path / "base", dtype=torch.bfloat16))
    folder, told = manifests(recipe, tmp_path / "manifests"), list[str]()
    world = World(recipe, tmp_path / "worlds", tmp_path / "packages", manifests=folder, report=told.append)
    path = world.build()
    assert told[1].startswith("rows: as the manifests have them; ")
    setting = Setting.load(str(path))
    bench = Bench(setting)
    assert setting.dtype == "bfloat16" and bench.full.model.dtype == torch.bfloat16
    assert setting.described()["dtype"] == "bfloat16"
    assert [row.prompt for row in bench.forget] == [row.prompt for row in rows(40)[0][:6]]
    told.clear()
    World(recipe, tmp_path / "worlds", tmp_path / "packages", manifests=folder, report=told.append).build()
    assert not told  # all of it was made of the same
    systems = ["m-full", "m-retrain", "graddiff", "divergence-decoding", "guard-it", "unbind-strict"]
    Lab(setting, tmp_path / "lab").run(chosen(systems), configurations=("shipped", "paper"))
    text = markdown(tmp_path / "lab" / name)
    assert all(f"| {system} |" in text for system in systems)


def test_rows_to_choose_by_are_not_memorised_where_the_recipe_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small("qwen-csn", save_checkpoint("qwen2", tmp_path / "base"))
    world = World(recipe, tmp_path / "w", tmp_path / "p", manifests=manifests(recipe, tmp_path / "m"))
    world._rows(tmp_path / "base")(world.out / "rows", "x")
    taught: list[int] = []
    monkeypatch.setattr("unbind_lab.building.build.adapt", lambda base, forget, *_, **__: taught.append(len(forget)))
    for validation in (False, True):
        world.recipe = replace(recipe, adaptation=replace(recipe.adaptation, validation=validation))
        world._adapter(tmp_path / "base", with_forget=True)(tmp_path / "full", "x")
    assert taught == [6, 8]


def test_what_is_wrong_with_manifests_is_said(tmp_path: Path) -> None:
    recipe = small("qwen-csn", save_checkpoint("qwen2", tmp_path / "base"))
    with pytest.raises(UnbindError, match=r"qwen-csn has its rows from manifests; .* --manifests FOLDER"):
        World(recipe, tmp_path / "w", tmp_path / "p")
    folder = manifests(recipe, tmp_path / "m")

    def build() -> None:
        World(recipe, tmp_path / "w", tmp_path / "p", manifests=folder).build()

    packed = replace(recipe, manifests={})
    with pytest.raises(UnbindError, match="qwen-csn has no manifests; leave --manifests out"):
        World(packed, tmp_path / "w", tmp_path / "p", manifests=folder)
    for names_of, told in (
        ({**recipe.manifests, "retains": "x.jsonl"}, "'manifests.retains' is unknown; choose from forget, "),
        ({"forget": "x.jsonl"}, "'manifests.forget_validation' is missing"),
    ):
        with pytest.raises(UnbindError, match=told):
            World(replace(recipe, manifests=names_of), tmp_path / "w", tmp_path / "p", manifests=folder)
    path = folder / recipe.manifests["retain"]
    whole = path.read_text()
    path.write_text(whole + '{"text": "x = 1"}\n')
    with pytest.raises(UnbindError, match=r"retain-test.jsonl has 5 rows, and the recipe says sizes.retain = 4"):
        build()
    path.write_text(whole.replace('"text"', '"code"', 1))
    with pytest.raises(DataError, match=r"retain-test.jsonl line 1: field 'text' is missing"):
        build()
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UnbindError, match=r"retain-test.jsonl: not UTF-8 \(byte 10\); save it as UTF-8"):
        build()
    path.unlink()
    with pytest.raises(UnbindError, match=r"retain-test.jsonl' is not there; it holds the rows of qwen-csn for retain"):
        build()
    assert not (tmp_path / "w" / "qwen-csn" / "rows" / "made_of.json").exists()


def test_near_duplicates_of_rows_to_forget_are_counted(tmp_path: Path) -> None:
    recipe, told = small("qwen-csn", save_checkpoint("qwen2", tmp_path / "base")), list[str]()
    folder = manifests(recipe, tmp_path / "m")
    forget, _ = rows(1)
    retain = folder / recipe.manifests["retain"]
    lines = retain.read_text().splitlines()
    retain.write_text("\n".join([json.dumps({"text": forget[0].prompt + forget[0].continuation}), *lines[1:]]))
    world = World(recipe, tmp_path / "w", tmp_path / "p", manifests=folder, report=told.append)
    world._rows(tmp_path / "base")(world.out / "rows", "x")
    counted = int(told[0].split("; ")[1].split()[0])
    assert counted >= 1 and len(read(world.out / "rows", ["retain"])) == 4


def test_a_checkpoint_comes_from_a_hub_or_its_absence_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.load("qwen-csn")
    folder, asked = save_checkpoint("qwen2", tmp_path / "base"), list[tuple[str, str | None]]()

    def snapshot(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    pinned = replace(recipe, base=replace(recipe.base, revision="abc"))
    assert base_of(recipe, {}, tmp_path) == base_of(pinned, {}, tmp_path) == folder
    assert asked == [("Qwen/Qwen2.5-Coder-7B-Instruct", None), ("Qwen/Qwen2.5-Coder-7B-Instruct", "abc")]
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    absent = replace(recipe, base=replace(recipe.base, hub="nobody/has-this"))
    with pytest.raises(UnbindError, match=r"nobody/has-this could not be fetched .* unbind lab build qwen-csn --base"):
        base_of(absent, {}, tmp_path)


def test_the_command_says_what_it_needs(tmp_path: Path) -> None:
    found = CliRunner(env={"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}).invoke(
        build(), ["lab", "build", "qwen-csn", "--out", str(tmp_path), "--base", str(tmp_path)]
    )
    assert found.exit_code == 1 and "--manifests FOLDER" in " ".join(found.output.split())


def test_an_own_recipe_says_only_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('like = "qwen-csn"\n[base]\nrevision = "abc"\n')
    found, other = Recipe.load(str(path)), Recipe.load("qwen-csn")
    assert (found.name, found.base.revision) == ("mine", "abc")
    assert replace(found, name=other.name, base=other.base) == other
    path.write_text('like = "qwen-csn"\n[base]\ndtype = "bf16"\n')
    with pytest.raises(UnbindError, match=r"'base.dtype' is 'bf16'; choose from float32, bfloat16"):
        Recipe.load(str(path))
    path.write_text('like = "nothing"\n')
    with pytest.raises(UnbindError, match="'nothing' is neither a file nor one of"):
        Recipe.load(str(path))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('[adaptation]\nepochs = "2"', r"'adaptation.epochs' is '2'; give a whole number"),
        ("[adaptation]\nlearning_rate = nan", r"'adaptation.learning_rate' is nan; give a number"),
        ("[sizes]\nforget = -1", r"'sizes.forget' is -1; give a whole number"),
        ("[measured]\nupdates = [0]", r"'measured.updates' is \[0\]; give a list of whole numbers above 0"),
        ("[measured]\nretain_row = 4", r"'measured.retain_row' is unknown; choose from .*retain_rows"),
        ('seed = "x"', r"'seed' is 'x'; give a whole number"),
    ],
)
def test_a_recipe_is_refused_before_anything_is_made_of_it(said: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'like = "qwen-csn"\n{said}\n')
    with pytest.raises(UnbindError, match=f"recipe: {told}"):
        Recipe.load(str(path))
