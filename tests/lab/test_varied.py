"""One system in variants: strengths of a module, and the module without one of its parts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.bench.attacks.attacked import System
from tests.core.conftest import lowrank, make_module, make_network_module
from unbind_core.encoding import encode_prompt
from unbind_core.errors import UnbindError
from unbind_core.fitting.options import possible_layers
from unbind_core.module import UnbindModule
from unbind_core.rows import forget_digest
from unbind_lab.filters.filter import Absent
from unbind_lab.filters.models import FULL
from unbind_lab.lab import Entry, Lab
from unbind_lab.plots import draw
from unbind_lab.protocols import varied
from unbind_lab.protocols.ablations import VARIANTS
from unbind_lab.protocols.activations import BINS
from unbind_lab.protocols.protocol import Protocol
from unbind_lab.protocols.strengths import STRENGTHS
from unbind_lab.protocols.varied import NONE
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


@pytest.mark.parametrize("kind", ["network", "fisher"])
def test_activations_are_those_that_open_the_gate_where_it_is_served(
    setting: Setting, tmp_path: Path, kind: str
) -> None:
    made = with_module(setting, tmp_path, kind)
    Lab(made, tmp_path).run(chosen(["m-full", "unbind-rewrite"]), ["main", "activations"])
    folder = tmp_path / setting.name / "activations"
    assert not (folder / "m-full-shipped.jsonl").read_text()
    found = [json.loads(line) for line in (folder / "unbind-rewrite-shipped.jsonl").read_text().splitlines()]
    bench = Bench(made)
    module = UnbindModule.load(made.modules["rewrite"])
    # one boundary: with a lower one to close at, a gate is open at more positions than reach the threshold
    system = System("module", bench.full, (replace(module, tau_close=None),))
    for role, texts in (
        ("forget", [row.prompt + row.continuation for row in bench.forget]),
        ("retain", [row.text for row in bench.retain]),
    ):
        gates = system.gates([encode_prompt(bench.full.tokenizer, text) for text in texts])
        counts = [one["counts"] for one in found if one["role"] == role]
        assert [sum(one.values()) for one in counts] == [len(gate) for gate in gates]
        reached = [sum(count for bin, count in one.items() if int(bin) >= BINS) for one in counts]
        assert reached == [int(gate.sum()) for gate in gates] and any(reached)
        every = sorted(int(bin) for one in counts for bin, count in one.items() for _ in range(count))
        told = json.loads((folder / "unbind-rewrite-shipped.json").read_text())["value"]
        assert told[f"reached_{role}"] == pytest.approx(100 * sum(reached) / len(every))
        for name, share in (("median", 0.5), ("high", 0.999)):
            assert told[f"{name}_{role}"] == (every[math.ceil(share * len(every)) - 1] + 1) / BINS
    table = markdown(tmp_path / setting.name).split("### activations")[1]
    assert [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| unbind")] == ["| unbind-rewrite"]
    assert (tmp_path / "activations.svg") in draw(tmp_path / setting.name, tmp_path)


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


def test_a_model_that_gives_nothing_back_has_nothing_to_be_tuned_by(setting: Setting, tmp_path: Path) -> None:
    told = tmp_path / setting.name / "tuning/m-full.json"
    Lab(setting, tmp_path)._full_on_validation  # noqa: B018 - which writes it
    kept = json.loads(told.read_text())
    told.write_text(json.dumps({**kept, "value": {**kept["value"], "f_bleu": 0.0}}))
    said = list[str]()
    with pytest.raises(UnbindError, match="not measured: ga; why stands above"):
        Lab(setting, tmp_path, report=said.append).run(chosen(["ga"]), ["main"], ["tuned"])
    assert any("'forget_validation', so no configuration has an FU-H to be chosen by" in line for line in said)
    row = {
        "role": "forget",
        "row": 0,
        "bleu": 0.0,
        "span": 0,
        "recovery": 0.0,
        "empty": True,
        "nll": 1.0,
        "kl": 0.0,
        "tokens": 1,
    }

    def nothing(*_: object) -> list[dict[str, Any]]:
        return [{"variant": NONE, **row}]

    with pytest.raises(Absent, match=r"strengths: .* FU-H is undefined; name rows in the setting's 'forget'"):
        Lab(setting, tmp_path).measured(Entry(FULL, "shipped", {}), Protocol("strengths", nothing, varied.summary, ()))
