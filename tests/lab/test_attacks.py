"""Attacks on systems of the lab: what refuses, bars or cuts is met as a client meets it, and figures are of records alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from server.bench.attacks import logits, repeated
from server.bench.attacks.attacked import Material as Attackers
from server.bench.attacks.attacked import System
from server.bench.attacks.known import KNOWN
from server.bench.attacks.likeness import membership, numbers
from unbind_core.encoding import encode
from unbind_core.running.generation import Sampling
from unbind_lab.filters.memfree import MemFree
from unbind_lab.lab import Lab
from unbind_lab.protocols.attacked import LabSystem
from unbind_lab.protocols.attacks import TOLD, summary
from unbind_lab.served import Served
from unbind_lab.setting import Bench, Setting
from unbind_lab.systems import chosen
from unbind_lab.table import markdown


@pytest.fixture
def bench(setting: Setting) -> Bench:
    """The tiny setting's models and rows."""
    return Bench(setting)


@pytest.fixture
def attackers(bench: Bench) -> Attackers:
    """Its rows to forget and ordinary code."""
    return Attackers(bench.full.tokenizer, bench.forget, bench.retain)


def test_a_model_under_nothing_is_met_as_by_the_bench_of_the_server(bench: Bench, attackers: Attackers) -> None:
    ours, theirs = LabSystem(Served(bench.full.model, bench.full.tokenizer)), System("none", bench.full)
    texts = [encode(bench.full.tokenizer, row.prompt + row.continuation) for row in bench.forget]
    for (i, p), (j, q) in zip(ours.served(texts), theirs.served(texts), strict=True):
        assert i == j and p.shape == q.shape == (len(texts[i]), q.shape[1])
        assert torch.allclose(p, q.clamp(min=-30), atol=1e-4)
    for name in ("stored", "banned", "undo_rows", "assisted_undo", "logprobs", "iterative"):
        (attack,) = (one for one in KNOWN if one.name == name)
        assert attack.run(ours, attackers) == attack.run(theirs, attackers), name


def test_what_a_system_bars_stays_barred_under_a_client_s_bias(bench: Bench, attackers: Attackers) -> None:
    model, tokenizer = bench.full.model, bench.full.tokenizer
    plain = LabSystem(Served(model, tokenizer))
    prompts = [encode(tokenizer, row.prompt) for row in bench.forget]
    banned = [logits.Banned(attackers)]
    said = plain.complete(prompts, Sampling(12), processors=banned)
    runs = MemFree([[*p, *s] for p, s in zip(prompts, said, strict=True)], 4, len(tokenizer))
    again = LabSystem(Served(model, tokenizer, decoding=runs)).complete(prompts, Sampling(12), processors=banned)
    for prompt, before, after in zip(prompts, said, again, strict=True):
        assert before != after and not set(after) & set(tokenizer.all_special_ids)
        text = [*prompt[-3:], *after]
        known = [*prompt, *before]
        assert not {tuple(text[i : i + 4]) for i in range(len(text) - 3)} & {
            tuple(known[i : i + 4]) for i in range(len(known) - 3)
        }


def test_a_refused_text_serves_its_end_and_nothing_else(bench: Bench, attackers: Attackers) -> None:
    system = LabSystem(Served(bench.full.model, bench.full.tokenizer, refuses=lambda text: "secret" in text))
    texts = [encode(bench.full.tokenizer, text) for text in ("def secret_1():\n", "def open_1():\n")]
    found = dict(system.served(texts))
    assert set(found[0].argmax(-1).tolist()) == {bench.full.tokenizer.eos_token_id}
    assert float(found[0].exp().sum(-1).max()) == pytest.approx(1, abs=1e-6)
    assert not torch.equal(found[1], found[0][: len(found[1])])
    assert all(answer.output == () for attack in KNOWN[:1] for answer in attack.run(system, attackers))


def test_the_summary_is_of_each_row_s_longest_and_each_attack_s_mean() -> None:
    found = summary(
        [
            {"attack": "short_8", "row": 0, "span": 50, "recovery": 0.5, "bleu": 0.1},
            {"attack": "short_8", "row": 1, "span": 10, "recovery": 0.1, "bleu": 0.1},
            {"attack": "mid_half_16", "row": 0, "span": 20, "recovery": 0.2, "bleu": 0.1},
            {"attack": "renamed", "row": 1, "span": 20, "recovery": 0.4, "bleu": 0.1},
            {"attack": "assisted", "row": 1, "span": 90, "recovery": 0.9, "accuracy": 0.8},
        ]
    )
    assert (found["spans_50"], found["spans_20"]) == (1, 2)
    assert (found["recovery_short"], found["recovery_middle"], found["recovery_rewritten"]) == pytest.approx(
        (30, 20, 40)
    )
    assert found["recovery_worst"] == pytest.approx(40) and found["recovery_mean"] == pytest.approx(30)
    assert found["accuracy"] == pytest.approx(80)
    assert "membership_auc" not in found


def test_it_runs_is_kept_and_has_a_table(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((logits, "NEW_TOKENS"), (repeated, "NEW_TOKENS"), (repeated, "STEP"), (repeated, "SAMPLES")):
        monkeypatch.setattr(module, name, 4)
    forget = tmp_path / "more.jsonl"
    row = {"prompt": "def more(self):\n", "continuation": "    return self.more + 1\n" * 3}
    forget.write_text(setting.forget.read_text() + json.dumps(row) + "\n")  # as many as a cross-validation needs
    more = replace(setting, forget=forget, retain_rows=6)
    Lab(more, tmp_path).run(chosen(["m-full", "prompt-filter"]), ["main", "attacks"])
    folder = tmp_path / setting.name / "attacks"
    found = [json.loads(line) for line in (folder / "m-full-shipped.jsonl").read_text().splitlines()]
    assert {one["attack"] for one in found} >= {*TOLD, "stored", "best_of_20_t0.8", "membership"}
    kept = json.loads((folder / "m-full-shipped.json").read_text())["value"]
    assert {name: kept[name] for name in summary(found)} == summary(found) and "membership_auc" in kept
    bench = Bench(more)
    asked = numbers(System("none", bench.full), Attackers(bench.full.tokenizer, bench.forget, bench.retain))
    told = membership([one for _, one in asked], [row < len(bench.forget) for row, _ in asked])
    assert told is not None and kept["membership_auc"] == pytest.approx(told["auc"], abs=0.05)
    assert "### attacks" in markdown(folder.parent) and "membership AUC" in markdown(folder.parent)
