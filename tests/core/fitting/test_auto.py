"""Gate auto on a model that has really memorised: it leads elsewhere, stays within its budgets, and says what it tried."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from server.worker import child
from tests.support import memorising
from unbind_core import FitOptions, FitReport, LoadedModel, ModuleBank, UnbindModule, attach, fit, load_model
from unbind_core.architecture import decoder_layers
from unbind_core.encoding import encode_prompt
from unbind_core.errors import Cancelled, DataError, InsufficientRows
from unbind_core.evaluation.scores import forget_scores
from unbind_core.fitting import auto
from unbind_core.fitting.auto import MARGINS
from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.judge import Remainder
from unbind_core.fitting.options import BUDGETS, Target
from unbind_core.fitting.separation import RAISED, cautious, told
from unbind_core.progress import Progress
from unbind_core.rows import ForgetRow, RetainRow

FORGET = [ForgetRow(row["prompt"], row["continuation"]) for row in memorising.forget_rows()]
RETAIN = [RetainRow(row["text"]) for row in memorising.retain_rows()]
QUICK = FitOptions(effort=0.1)
WIDE = Budgets(kl=9.0, nll=9.0, bleu=1.0, open_rate=1.0)


@pytest.fixture(scope="module")
def loaded(memorised: Path) -> LoadedModel:
    return load_model(memorised)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(
    loaded: LoadedModel, rows: Sequence[ForgetRow], options: FitOptions = QUICK, **more: Any
) -> tuple[UnbindModule, FitReport]:
    return fit(
        loaded.model, loaded.tokenizer, rows, RETAIN, name="m", identity=loaded.identity, options=options, **more
    )


@pytest.fixture(scope="module")
def fitted(loaded: LoadedModel) -> tuple[UnbindModule, FitReport]:
    """All rows, no cache."""
    return run(loaded, FORGET, FitOptions())


def f_bleu(loaded: LoadedModel, module: UnbindModule | None, rows: Sequence[ForgetRow] = FORGET) -> float:
    bank = ModuleBank()
    if module is not None:
        bank.add(module)
    found = forget_scores(
        loaded.model, loaded.tokenizer, rows, forms=("plain",), attempts=0, editing=lambda: attach(loaded.model, bank)
    )
    return sum(score.bleu["plain"] for score in found) / len(found)


@pytest.mark.slow
def test_the_module_leads_elsewhere_within_the_budgets(
    loaded: LoadedModel, fitted: tuple[UnbindModule, FitReport]
) -> None:
    module, report = fitted
    assert report.outcome == "calibrated" and report.selected is not None
    assert (module.policy, module.correction, module.layer) == ("rewrite", "network", 2)
    assert f_bleu(loaded, None) > 0.6
    assert f_bleu(loaded, module) < 0.15
    estimates = report.selected["cost"]["cautious"]
    assert all(estimates[name] <= limit for name, limit in asdict(BUDGETS["auto"]).items())
    assert dict(module.budgets) == asdict(BUDGETS["auto"])
    assert module.partitions["forget_fit"] == tuple(range(len(FORGET)))  # no row is kept back
    again = UnbindModule.from_bytes(module.to_bytes())
    assert again.measured["cost"] == report.selected["cost"] and again.window == report.selected["separation"]["window"]
    forgot, aim = report.selected["forgot"], report.selected["aim"]
    assert forgot["spans"] == 0 and forgot["recovery"] <= aim["recovery"] and forgot["empty"] <= aim["empty"]
    assert all(value <= aim["f_bleu"][form] for form, value in forgot["f_bleu"].items())


@pytest.mark.slow
def test_the_gate_opens_on_the_first_tokens_of_a_row_and_from_its_middle_on(
    loaded: LoadedModel, fitted: tuple[UnbindModule, FitReport]
) -> None:
    module, report = fitted
    assert report.selected is not None and report.selected["opens"]["p95"] <= 12
    assert (module.first, module.least) == (4, max(1, module.window // 2))
    for row in FORGET:
        text = row.prompt + row.continuation
        for part in (text, text[len(text) // 2 :]):
            ids = torch.tensor([encode_prompt(loaded.tokenizer, part)])
            bank = ModuleBank.of([module])
            with attach(loaded.model, bank), torch.no_grad():
                loaded.model(ids)
            assert bank.counts()["m"]["prefill"][1] > 0, part


@pytest.mark.slow
def test_a_silencing_module_ends_the_answer(loaded: LoadedModel, cache: Path) -> None:
    module, report = run(loaded, FORGET, FitOptions(policy="silent"), cache=cache)
    assert report.outcome == "calibrated" and module.policy == "silent"
    assert f_bleu(loaded, module) < 0.027 * f_bleu(loaded, None) + 0.01


@pytest.mark.slow
def test_every_gate_that_was_tried_says_what_became_of_it(fitted: tuple[UnbindModule, FitReport]) -> None:
    module, report = fitted
    assert [level["verdict"].startswith("chosen") for level in report.levels].count(True) == 1
    assert all(level["verdict"] and level["opens"] for level in report.levels)
    assert report.gate == module.detector == "network"
    assert report.to_json()["levels"] == report.levels
    assert report.layers == [{"layer": module.layer}]


def test_what_a_gate_cannot_do_is_refused_by_name(loaded: LoadedModel) -> None:
    for options, message in (
        (FitOptions(layers=(0,)), "layers: gate 'auto' does not stand at layer 0 of 3"),
        (FitOptions(gate="paper", layers=(2,)), "layers: gate 'paper' does not stand at layer 2"),
        (FitOptions(gate="paper", policy="rewrite"), "policy: gate 'paper' knows silent"),
        (FitOptions(policy="loud"), "policy: gate 'auto' knows rewrite and silent"),
        (FitOptions(effort=0.0), "effort: 0.0 is not above 0"),
        (FitOptions(gate="paper", effort=0.5), "effort: gate 'paper' trains nothing; leave it out, or use gate 'auto'"),
        (FitOptions(quantiles=(0.5,)), "quantiles: gate 'auto' has no use for it; leave it out, or use gate 'paper'"),
        (FitOptions(full_scan=True), "full_scan: gate 'auto' has no use for it"),
        (FitOptions(budgets=Budgets(kl=-0.01)), r"budgets\.kl: -0.01 is met by no module"),
        (FitOptions(budgets=Budgets(nll=float("nan"))), r"budgets\.nll: nan is met by no module"),
        (FitOptions(beside=-1), "beside: -1 is no number of other modules"),
    ):
        with pytest.raises(DataError, match=message):
            run(loaded, FORGET, options)


@pytest.mark.parametrize(
    ("opens", "expected"),
    [
        ([5], {"median": 5, "p95": 5, "within_12": 1.0, "never": 0}),
        ([None], {"median": None, "p95": None, "within_12": 0.0, "never": 1}),
        ([*range(20)], {"median": 9, "p95": 18, "within_12": 0.6, "never": 0}),
        ([3, 11, 12, None], {"median": 11, "p95": None, "within_12": 0.5, "never": 1}),
    ],
)
def test_when_gates_open_is_told_by_quantiles_that_count_those_that_never_do(
    opens: list[int | None], expected: dict[str, float | None]
) -> None:
    assert told(opens) == expected


@pytest.mark.slow
def test_one_row_alone_is_enough(loaded: LoadedModel, cache: Path) -> None:
    reachable = replace(QUICK, target=Target(alone_cut=0.5, alone_recovery=0.5))
    module, report = run(loaded, FORGET[:1], reachable, cache=cache)
    assert report.outcome == "calibrated"
    assert len(cast(torch.Tensor, module.heads)) == 1
    assert f_bleu(loaded, module, FORGET[:1]) < 0.1 < f_bleu(loaded, None, FORGET[:1])


@pytest.mark.slow
def test_beside_others_the_gate_that_is_chosen_opens_later_where_it_forgets_as_much(
    loaded: LoadedModel, cache: Path
) -> None:
    reachable = replace(QUICK, budgets=WIDE, target=Target(alone_cut=0.5, alone_recovery=0.5))
    alone, told_alone = run(loaded, FORGET[:4], reachable, cache=cache)
    beside, told_beside = run(loaded, FORGET[:4], replace(reachable, beside=9), cache=cache)
    assert (told_alone.outcome, told_beside.outcome) == ("calibrated", "calibrated")
    verdicts = [level["verdict"] for level in told_beside.levels]
    assert verdicts[:-1] == [*[level["verdict"] for level in told_alone.levels[:-1]], "raised, as other modules are on"]
    assert verdicts[-1] == "chosen"
    assert alone.tau < beside.tau <= 1.01 * RAISED * alone.tau and beside.settings["beside"] == 9
    assert beside.tau_close is not None and alone.tau_close == pytest.approx(beside.tau_close, rel=0.05)
    before, after = (f_bleu(loaded, module, FORGET[:4]) for module in (None, beside))
    assert after < 0.5 * before


@pytest.mark.slow
def test_a_fit_tells_of_progress_all_the_time(loaded: LoadedModel) -> None:
    voice, passes, gaps = child.Voice(io.StringIO(), pause=0), 0, []

    def tell(progress: Progress) -> None:
        nonlocal passes
        voice.progress(progress)
        gaps.append((passes, f"before {progress.stage}"))
        passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    voice.begin("fit")
    hook = decoder_layers(loaded.model)[-1].register_forward_pre_hook(count)
    try:
        run(loaded, FORGET[:2], progress=tell)
    finally:
        hook.remove()
    lines = [json.loads(line) for line in voice.out.getvalue().splitlines()[1:]]  # type: ignore[attr-defined]
    shares = [line["progress"] for line in lines]
    assert shares == sorted(shares) and 0.5 < shares[-1] < 1
    # Passes of the model between two reports: those of one stretch of decoding, and never those of a candidate's whole trial.
    assert max(gaps)[0] <= 64, max(gaps)
    stands = [len(list(same)) for _, same in groupby(shares)]
    assert max(stands) < 10


@pytest.mark.slow
def test_a_cache_changes_nothing(loaded: LoadedModel, tmp_path: Path) -> None:
    modules = [run(loaded, FORGET[:1], cache=folder)[0] for folder in (None, tmp_path, tmp_path)]
    assert any(tmp_path.iterdir())
    assert len({replace(module, created_at="").digest for module in modules}) == 1


@pytest.mark.slow
def test_the_papers_gate_is_left_to_those_who_ask_for_it(loaded: LoadedModel, cache: Path) -> None:
    module, report = run(loaded, FORGET, FitOptions(gate="paper", layers=(0,), budgets=WIDE), cache=cache)
    assert (module.detector, module.window, module.tau_close, module.heads) == ("fisher", 1, None, None)
    assert report.gate == "paper" and report.levels == [] and report.scan
    assert all(module.partitions[part] for part in ("forget_fit", "forget_calibration", "forget_validation"))
    with pytest.raises(InsufficientRows, match="gate 'auto' needs one"):
        run(loaded, FORGET[:2], FitOptions(gate="paper"))


@pytest.mark.slow
def test_a_target_out_of_reach_ends_as_short_with_the_best_there_is(
    loaded: LoadedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[UnbindModule] = []

    class Judge(auto.Judge):
        def remainder(self, module: UnbindModule, *rest: Any, **more: Any) -> Remainder:
            asked.append(module)
            return super().remainder(module, *rest, **more)

    monkeypatch.setattr(auto, "Judge", Judge)
    module, report = run(loaded, FORGET[:1], replace(QUICK, budgets=WIDE, target=Target(alone_cut=2.0)), cache=cache)
    assert len(asked) == len({id(each) for each in asked}) > 1  # no gate is asked about all rows twice
    assert report.outcome == "short" and module.kappa > 0
    (best,) = (level for level in report.levels if level["verdict"] == "chosen: the best within the budgets")
    assert all(report.selected[key] == best[key] for key in best)  # type: ignore[index]
    assert report.selected and all("(aim " in part for part in report.selected["missed"] or [""])
    asked_about = [level for level in report.levels if "forgot" in level]
    left = [max(level["forgot"]["f_bleu"].values()) + level["forgot"]["recovery"] for level in (best, *asked_about)]
    assert left[0] == pytest.approx(min(left[1:]), abs=0.1)
    tried = [(level["margin"], level["tau"]) for level in asked_about if "last_tokens" not in level]
    first, *firmer = ([tau for number, tau in tried if number == margin] for margin in MARGINS)
    assert firmer == [first, first]  # firmer corrections, behind the gates that were within the budgets


def test_empty_answers_alone_lead_to_no_firmer_correction(loaded: LoadedModel, cache: Path) -> None:
    target = Target(alone_cut=0.0, alone_recovery=1.0, above_empty=-2.0)  # met in all but that
    levels = run(loaded, FORGET[:1], replace(QUICK, budgets=WIDE, target=target), cache=cache)[1].levels
    assert {level["margin"] for level in levels} == {MARGINS[0]}


@pytest.mark.slow
def test_budgets_that_nothing_meets_end_as_ineffective_with_a_module_that_changes_nothing(
    loaded: LoadedModel, cache: Path
) -> None:
    module, report = run(loaded, FORGET[:1], replace(QUICK, budgets=Budgets(nll=-1.0)), cache=cache)
    assert (report.outcome, report.selected, module.kappa) == ("ineffective", None, 0.0)
    assert {level["verdict"] for level in report.levels} == {"over budget"}
    assert f_bleu(loaded, module, FORGET[:1]) == f_bleu(loaded, None, FORGET[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", ["rows met elsewhere", "correction", "detector of 128", "forget rows: greedy", "gates"]
)
def test_a_cancelled_fit_leaves_the_model_as_it_was(loaded: LoadedModel, cache: Path, stage: str) -> None:
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    switches = [(parameter.requires_grad, parameter.grad) for parameter in loaded.model.parameters()]

    def callback(progress: Progress) -> None:
        if progress.stage == stage:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        run(loaded, FORGET[:1], cache=cache, progress=callback)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())
    assert switches == [(parameter.requires_grad, parameter.grad) for parameter in loaded.model.parameters()]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in loaded.model.modules())


def test_a_cautious_estimate_is_deterministic_above_the_mean_and_exact_where_rows_agree() -> None:
    parts = [(float(i % 5), 10.0) for i in range(50)]
    assert cautious(parts) == cautious(parts) > sum(a for a, _ in parts) / 500
    assert cautious(parts, seed=1) != cautious(parts)
    assert cautious([(3.0, 10.0)] * 4) == pytest.approx(0.3)
    assert cautious([(0.0, 0.0)]) == 0.0
    more = [(a, b) for a, b in parts for _ in range(9)]
    assert cautious(more) < cautious(parts)  # more rows, a smaller margin
