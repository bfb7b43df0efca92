"""A module is taken over by a quantised model where it holds there what a fit must hold, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.core.conftest import make_module
from tests.core.fitting.test_certificate import open_share
from tests.support import memorising
from tests.support.quantised import FP8_TOLD, fp8
from unbind_core import FitOptions, LoadedModel, UnbindModule, fit, load_model
from unbind_core.errors import DataError, ModelMismatch
from unbind_core.fitting.adopt import RAISED, Adoption, adopt
from unbind_core.fitting.certificate import certify
from unbind_core.fitting.context import Context
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.windows import forget_windows

FORGET = [ForgetRow(row["prompt"], row["continuation"]) for row in memorising.forget_rows()][:3]
RETAIN = [RetainRow(row["text"]) for row in memorising.retain_rows()]


@pytest.fixture(scope="module")
def quantised(memorised: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(fp8(memorised, tmp_path_factory.mktemp("adopt") / "fp8"))


@pytest.fixture(scope="module")
def fitted(memorised: Path, quantised: LoadedModel) -> UnbindModule:
    """The first of eight quick fits that holds when so small a model is quantised: which of them do differs between processors."""
    loaded = load_model(memorised)
    for seed in range(8):
        module, report = fit(
            loaded.model,
            loaded.tokenizer,
            FORGET,
            RETAIN,
            name="m",
            identity=loaded.identity,
            options=FitOptions(effort=0.2, seed=seed),
        )
        if report.outcome == "calibrated" and run(quantised, module).module is not None:
            return module
    raise AssertionError("none of the modules holds on the quantised model")


def run(loaded: LoadedModel, module: UnbindModule, rows: list[ForgetRow] = FORGET, **more: Any) -> Adoption:
    return adopt(loaded.model, loaded.tokenizer, module, rows, RETAIN, identity=loaded.identity, **more)


def test_a_module_that_holds_on_the_quantised_model_becomes_one_of_it(
    memorised: Path, quantised: LoadedModel, fitted: UnbindModule
) -> None:
    with pytest.raises(ModelMismatch):
        fitted.require(quantised.identity)
    found = run(quantised, fitted)
    assert found.module is not None and found.failed == []
    adopted = UnbindModule.from_bytes(found.module.to_bytes())
    adopted.require(quantised.identity)
    assert adopted.calibrated == {"dtype": "float32", "quantisation": f"{FP8_TOLD}, dequantised"}
    assert adopted.digest != fitted.digest
    times = adopted.measured["adopted"]["thresholds_raised"]  # which of them is needed differs between processors
    assert adopted.measured["adopted"] == {
        "from": fitted.digest,
        "model": {"fingerprint": fitted.model.fingerprint, "name": fitted.model.name},
        "calibrated": dict(fitted.calibrated),
        "thresholds_raised": times,
    }
    assert adopted.measured["forgot"]["f_bleu"]["plain"] <= adopted.measured["aim"]["f_bleu"]["plain"]
    assert {"cost", "certificate", "retain_left_out"} <= adopted.measured.keys()
    for loaded, module in ((load_model(memorised), fitted), (quantised, adopted)):
        windows = forget_windows(loaded.tokenizer, FORGET, range(len(FORGET)), module.forms)
        assert module.measured["forget_open_rate"] == pytest.approx(open_share(loaded, module, windows), abs=1e-3)
    assert fitted.measured["forget_open_rate"] > 0.5 > fitted.measured["cost"]["open_rate"]
    assert all(bool((tensor == fitted.tensors[name]).all()) for name, tensor in adopted.tensors.items())
    assert times in RAISED and adopted.tau == pytest.approx(times * fitted.tau)
    assert (adopted.name, adopted.settings) == (fitted.name, fitted.settings)
    with pytest.raises(DataError, match="is of this model already"):
        run(quantised, adopted)


def test_one_that_does_not_forget_enough_there_is_not_taken_over(quantised: LoadedModel, fitted: UnbindModule) -> None:
    found = run(quantised, replace(fitted, kappa=0.0))
    assert found.module is None
    assert any(reason.startswith("recovery 1.000 (aim 0.080)") for reason in found.failed)
    assert found.to_json()["adopted"] is False and "forgot" in found.measured


def test_one_that_costs_too_much_there_is_not_asked_what_it_forgets(
    quantised: LoadedModel, fitted: UnbindModule
) -> None:
    open_everywhere = replace(fitted, s_ref=fitted.s_ref - 100 * fitted.tau)
    found = run(quantised, open_everywhere)
    assert found.module is None and "forgot" not in found.measured
    assert any(reason.startswith("open_rate ") for reason in found.failed)


def test_thresholds_that_let_it_open_too_often_there_are_raised(
    quantised: LoadedModel, fitted: UnbindModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = run(quantised, fitted).module
    assert held is not None
    low = replace(fitted, tau=held.tau, tau_close=held.tau_close)
    monkeypatch.setattr("unbind_core.fitting.adopt.RAISED", RAISED[:1])
    while not (failed := run(quantised, low).failed):  # until it opens too often, where a fifth higher it does not
        low = replace(low, tau=low.tau / 1.2, tau_close=low.tau_close and low.tau_close / 1.2)
    assert low.tau < held.tau and any(reason.startswith("open_rate ") for reason in failed)
    monkeypatch.undo()
    certified: list[UnbindModule] = []

    def noting(context: Context, module: UnbindModule, left_out: Sequence[int]) -> dict[str, Any] | None:
        certified.append(module)
        return certify(context, module, left_out)

    monkeypatch.setattr("unbind_core.fitting.adopt.certify", noting)
    found = run(quantised, low)
    assert found.module is not None
    assert [(one.tau, one.tau_close) for one in certified] == [(found.module.tau, found.module.tau_close)]
    times = found.module.measured["adopted"]["thresholds_raised"]
    assert times in RAISED[1:3] and found.module.tau == pytest.approx(times * low.tau)
    assert low.tau_close is None or found.module.tau_close == pytest.approx(times * low.tau_close)
    assert found.module.measured["cost"]["cautious"]["open_rate"] <= low.budgets["open_rate"]


def test_what_cannot_be_measured_is_refused_by_name(quantised: LoadedModel, fitted: UnbindModule) -> None:
    other = replace(quantised.identity, fingerprint="0" * 64)
    with pytest.raises(DataError, match="paper's gate"):
        run(quantised, make_module(other))
    with pytest.raises(DataError, match="not the rows that it was fitted on"):
        run(quantised, fitted, FORGET[:-1])
    with pytest.raises(ModelMismatch, match="has 32 and 4"):
        adopt(
            quantised.model,
            quantised.tokenizer,
            fitted,
            FORGET,
            RETAIN,
            identity=replace(quantised.identity, num_layers=4),
        )
