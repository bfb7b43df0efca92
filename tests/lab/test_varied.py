"""One system in variants: strengths of a module, and the module without one of its parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.core.conftest import lowrank, make_module, make_network_module
from unbind_core.fitting.options import possible_layers
from unbind_core.module import UnbindModule
from unbind_core.rows import forget_digest
from unbind_lab.lab import Lab
from unbind_lab.protocols.ablations import VARIANTS
from unbind_lab.protocols.strengths import STRENGTHS
from unbind_lab.setting import Bench, Setting
from unbind_lab.systems import chosen
from unbind_lab.table import markdown


def with_module(setting: Setting, folder: Path, kind: str) -> Setting:
    bench = Bench(setting)
    identity = bench.full.identity
    fields: dict[str, Any] = {"forget_digest": forget_digest(bench.forget)}
    if kind == "network":
        module = make_network_module(identity, "one", **lowrank(identity.hidden_size), **fields)
    else:
        module = make_module(identity, "one", **fields)
    module.save(folder / "one.safetensors")
    return replace(setting, modules={"rewrite": folder / "one.safetensors"})


@pytest.mark.parametrize(
    ("kind", "variants"),
    [("network", [*VARIANTS]), ("fisher", ["whole", "open"])],
)
def test_variants_hold_the_system_itself_and_m_full(
    setting: Setting, tmp_path: Path, kind: str, variants: list[str]
) -> None:
    made = with_module(setting, tmp_path, kind)
    Lab(made, tmp_path).run(chosen(["m-full", "unbind-rewrite"]), ["main", "strengths", "ablations"])
    folder = tmp_path / setting.name

    def kept(protocol: str, system: str) -> dict[str, float]:
        found: dict[str, float] = json.loads((folder / protocol / f"{system}-shipped.json").read_text())["value"]
        return {name: value for name, value in found.items() if isinstance(value, int | float)}

    own, full = kept("main", "unbind-rewrite"), kept("main", "m-full")
    assert own["r_ppl"] != full["r_ppl"]
    strengths, ablations = (kept(protocol, "unbind-rewrite") for protocol in ("strengths", "ablations"))
    for found, itself in ((strengths, "1"), (ablations, "whole")):
        assert {name: found[f"{itself}: {name}"] for name in own} == pytest.approx(own)
        assert {name: found[f"none: {name}"] for name in full} == pytest.approx(full)
    assert len({strengths[f"{one:g}: r_ppl"] for one in STRENGTHS}) == len(STRENGTHS)
    assert list(dict.fromkeys(name.split(":")[0] for name in ablations)) == ["none", *variants]
    assert len({ablations[f"{name}: r_ppl"] for name in variants}) >= len(variants) - ("one" in variants)
    assert kept("strengths", "m-full") == kept("ablations", "m-full") == {}
    text = markdown(folder)
    rows = [
        line.split(" | ")[:2] for line in text.split("### strengths")[1].splitlines() if line.startswith("| unbind")
    ]
    heads = [*(f"strength {one:g}" for one in STRENGTHS), *(VARIANTS[name][0] for name in variants)]
    assert rows == [["| unbind-rewrite", head] for head in heads]


def test_the_paper_s_gate_is_fitted_at_each_layer_that_it_may_stand_at(setting: Setting, tmp_path: Path) -> None:
    made = with_module(setting, tmp_path, "fisher")
    made = replace(made, modules={"paper": made.modules["rewrite"]})
    Lab(made, tmp_path).run(chosen(["m-full", "unbind-paper"]), ["main", "layers"])
    kept = json.loads((tmp_path / setting.name / "layers" / "unbind-paper-shipped.json").read_text())["value"]
    layers = possible_layers("paper", Bench(setting).full.identity.num_layers)
    names = [f"layer-{layer}" for layer in layers]
    assert [name for name in dict.fromkeys(key.split(":")[0] for key in kept if ":" in key) if name != "none"] == names
    for name, layer in zip(names, layers, strict=True):
        path = next((tmp_path / setting.name / "made" / "unbind-paper-shipped").glob(f"{name}-*.safetensors"))
        module = UnbindModule.load(path)
        assert module.layer == layer and module.v is not None
        w, v = module.w.reshape(-1).double(), module.v.double()
        assert kept[f"{name}: cosine"] == pytest.approx(float(w @ v / (w.norm() * v.norm())), abs=1e-6)
    assert "| unbind-paper | layer 0 |" in markdown(tmp_path / setting.name).split("### layers")[1]
