"""What a fit says of rows that chose nothing, and the paper's own fit, to the letter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.core.conftest import TinyCheckpoint
from tests.core.fitting.test_fit import FORGET, RETAIN, WIDE
from unbind_core import FitOptions, FitReport, LoadedModel, ModuleBank, UnbindModule, attach, fit, load_model
from unbind_core.applying.bank import edit_of
from unbind_core.errors import DataError
from unbind_core.evaluation.bounds import share_bound
from unbind_core.evaluation.replay import Replay
from unbind_core.fitting.calibration import PAPER_QUANTILES, PAPER_STRENGTHS, Budgets
from unbind_core.fitting.certificate import certify
from unbind_core.fitting.fit import context_of
from unbind_core.progress import silent
from unbind_core.rows import RetainRow
from unbind_core.windows import Window, forget_windows, retain_windows

MORE = [RetainRow(row.text.replace("size", "length")) for row in RETAIN[:8]]


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: TinyCheckpoint) -> LoadedModel:
    return load_model(tiny_checkpoint("llama"))


def run(loaded: LoadedModel, options: FitOptions, **more: Any) -> tuple[UnbindModule, FitReport]:
    return fit(
        loaded.model, loaded.tokenizer, FORGET, RETAIN, name="m", identity=loaded.identity, options=options, **more
    )


@pytest.fixture(scope="module")
def fitted(loaded: LoadedModel) -> tuple[UnbindModule, FitReport]:
    return run(loaded, replace(WIDE, layers=(0,)), retain_calibration=MORE)


def open_share(loaded: LoadedModel, module: UnbindModule, windows: Sequence[Window]) -> float:
    """Of all positions, as a server counts them that is given one window after the other."""
    evaluated = opened = 0
    for window in windows:
        bank = ModuleBank.of([module])
        with attach(loaded.model, bank), torch.no_grad():
            loaded.model(torch.tensor([window.ids]))
        counts = bank.counts()[module.name]["prefill"]
        evaluated, opened = evaluated + counts[0], opened + counts[1]
    assert evaluated == sum(len(window.ids) for window in windows)
    return opened / evaluated


def test_the_certificate_counts_the_rows_that_chose_nothing(
    loaded: LoadedModel, fitted: tuple[UnbindModule, FitReport]
) -> None:
    module, report = fitted
    rows = [*RETAIN, *MORE]
    part = module.partitions["retain_certificate"]
    assert len(part) == 4 and min(part) >= len(RETAIN)
    windows = retain_windows(loaded.tokenizer, rows, part, module.forms)
    replay = Replay(loaded.model, windows, [module.layer], pad=0)
    found = replay.run(edit_of(module, replay.device)[1], module.layer, kl_budget=float("inf")).rows
    assert set(found) == set(part)
    certificate = report.certificate
    assert certificate is not None and module.measured["certificate"] == certificate
    assert certificate["touched"] == share_bound(sum(row.changed > 0 for row in found.values()), 4).to_json()
    expected = [min(max(row.kl / row.scored, 0.0), 1.0) for row in found.values()]
    assert certificate["kl"]["observed"] == pytest.approx(sum(expected) / 4, rel=1e-4)
    assert all(
        certificate[name]["value"] > certificate[name]["observed"] for name in ("kl", "nll", "open_rate", "bleu")
    )
    assert UnbindModule.from_bytes(module.to_bytes()).measured["certificate"] == certificate


@pytest.mark.parametrize("others", [0, 8])
def test_a_row_that_trained_or_chose_elsewhere_certifies_nothing(loaded: LoadedModel, others: int) -> None:
    again = [*RETAIN[:8], *MORE[:others]]
    module, report = run(loaded, replace(WIDE, layers=(0,)), retain_calibration=again)
    part = module.partitions["retain_certificate"]
    fresh = [i for i in part if i >= len(RETAIN) + 8]
    assert part and len(fresh) < len(part)
    found = report.certificate
    assert (found["touched"]["n"] if found else 0) == len(fresh) and bool(fresh) == bool(others)


def test_the_fit_tells_at_what_share_of_the_rows_kept_back_its_gate_is_open(
    loaded: LoadedModel, fitted: tuple[UnbindModule, FitReport]
) -> None:
    module, report = fitted
    rows = module.partitions["forget_validation"]
    assert 0 < len(rows) < len(FORGET)
    windows = forget_windows(loaded.tokenizer, FORGET, rows, module.forms)
    assert module.measured["forget_open_rate"] == pytest.approx(open_share(loaded, module, windows), abs=1e-3)
    assert report.selected is not None
    assert report.selected["forget_open_rate"] == module.measured["forget_open_rate"] > 0


def test_what_is_over_its_budget_on_those_rows_is_named(
    loaded: LoadedModel, fitted: tuple[UnbindModule, FitReport]
) -> None:
    module, _ = fitted
    strong = replace(module, kappa=1000.0, tau=0.0)
    given = (loaded.model, loaded.tokenizer, FORGET, RETAIN, MORE, "m", loaded.identity)
    context = context_of(*given, FitOptions(gate="auto"), silent, None)
    certificate = certify(context, strong, [])
    assert certificate is not None and {"kl", "open_rate"} <= set(certificate["over"])
    assert (certificate["touched"]["observed"], certificate["touched"]["value"]) == (1.0, 1.0)
    assert certify(context, strong, context.parts.retain_certificate) is None
    fewer = certify(context, strong, context.parts.retain_certificate[:3])
    assert fewer is not None and fewer["touched"]["n"] == 1


def test_the_papers_own_fit_has_its_grids_its_form_and_all_of_its_rows_from_the_retain_set(loaded: LoadedModel) -> None:
    module, report = run(loaded, FitOptions(gate="paper-strict", layers=(0, 2)), retain_calibration=MORE)
    tried = {(trial["layer"], trial["quantile"], trial["grid"], trial["kappa"]) for trial in report.scan}
    assert tried == {
        (layer, q, "paper", kappa) for layer in (0, 2) for q in PAPER_QUANTILES for kappa in PAPER_STRENGTHS[1:]
    }
    assert all(trial["verdict"] != "over KL budget (screened)" for trial in report.scan)
    assert all(trial["retain_kl"] is not None for trial in report.scan if trial["forget_gain"] > 0)
    assert module.forms == ("plain",) and module.detector == "fisher"
    parts = module.partitions
    assert sorted((*parts["retain_fit"], *parts["retain_calibration"])) == list(range(len(RETAIN)))
    assert (len(parts["retain_calibration"]), parts["retain_certificate"], report.certificate) == (5, (), None)
    assert module.settings["retain_limit"] == 600 and module.settings["norm_strengths"] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("forms", ("plain", "fim")), ("quantiles", (0.5,)), ("budgets", Budgets(kl=0.5)), ("retain_limit", 100)],
)
def test_the_papers_own_fit_refuses_what_it_fixes(loaded: LoadedModel, field: str, value: object) -> None:
    with pytest.raises(DataError, match=rf"{field}: gate 'paper-strict' fixes it .* use gate 'paper'"):
        run(loaded, replace(FitOptions(gate="paper-strict"), **{field: value}))
