"""A fit from rows to module on a tiny model: deterministic, cancellable, cached, honest about failure; the model is left alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.conftest import TinyCheckpoint, make_module
from tests.core.test_architectures import make_adapter
from unbind_core import FitOptions, FitReport, LoadedModel, UnbindModule, fit, load_model
from unbind_core.encoding import encode
from unbind_core.errors import Cancelled, DataError, InsufficientRows, ModelMismatch
from unbind_core.evaluation.held_out import HeldOut
from unbind_core.evaluation.scores import RowScore, extractable
from unbind_core.evaluation.verify import verify
from unbind_core.fitting.calibration import Budgets
from unbind_core.fitting.certificate import certify
from unbind_core.fitting.fit import context_of, prepare_retained
from unbind_core.fitting.retained import retain_states
from unbind_core.progress import Progress, silent
from unbind_core.rows import ForgetRow, RetainRow, forget_digest
from unbind_core.windows import forget_prompt, retain_windows

FORGET = [
    ForgetRow(f"def secret_{i}(key):\n", f"    token = {i * 7919}\n    return key + token * {i}\n") for i in range(8)
]
RETAIN = [
    RetainRow(f"class Item{i}:\n    size = {i}\n\n    def area(self):\n        return self.size ** 2\n")
    for i in range(24)
]
WIDE = FitOptions(gate="paper", budgets=Budgets(kl=5.0, nll=5.0, bleu=1.0))


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: TinyCheckpoint) -> LoadedModel:
    return load_model(tiny_checkpoint("llama"))


def run(loaded: LoadedModel, options: FitOptions = WIDE, **more: object) -> tuple[UnbindModule, FitReport]:
    return fit(
        loaded.model, loaded.tokenizer, FORGET, RETAIN, name="m", identity=loaded.identity, options=options, **more
    )


def test_the_same_rows_give_the_same_module(loaded: LoadedModel) -> None:
    first, report = run(loaded)
    second, _ = run(loaded)
    assert report.outcome == "calibrated"
    assert torch.equal(first.w, second.w) and torch.equal(first.v, second.v)
    assert (first.layer, first.tau, first.kappa, first.s_ref) == (second.layer, second.tau, second.kappa, second.s_ref)
    assert first.forget_digest == forget_digest(FORGET)
    assert first.forms == ("plain", "fim")
    assert len(report.scan) == 1 * 8 * 15  # one layer of three: a push keeps away from the last two
    assert report.exactness < 1e-5


def test_a_fit_on_a_compiled_model_is_the_same(loaded: LoadedModel) -> None:
    model = copy.deepcopy(loaded.model)
    model.compile(backend="eager")
    encoded = loaded.tokenizer(FORGET[0].prompt, return_tensors="pt")
    with torch.no_grad():
        model(**encoded, use_cache=False), model.base_model(**encoded, use_cache=False)
    first, second = run(replace(loaded, model=model))[0], run(loaded)[0]
    assert torch.equal(first.w, second.w) and torch.equal(first.v, second.v)
    assert (first.layer, first.tau, first.kappa, first.s_ref) == (second.layer, second.tau, second.kappa, second.s_ref)


def test_the_chosen_candidate_raises_the_forget_loss_most_within_the_budgets(loaded: LoadedModel) -> None:
    _, report = run(loaded, FitOptions(gate="paper", budgets=Budgets(kl=0.05, nll=0.05, bleu=1.0), full_scan=True))
    allowed = [
        trial
        for trial in report.scan
        if trial["forget_gain"] > 0 and trial["retain_kl"] <= 0.05 and trial["retain_nll_increase"] <= 0.05
    ]
    assert report.selected is not None
    assert report.selected["forget_nll"] == max(trial["forget_nll"] for trial in allowed)
    assert all(trial["retain_kl"] is not None for trial in report.scan if trial["forget_gain"] > 0)


def test_a_fit_leaves_the_model_as_it_was(loaded: LoadedModel) -> None:
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    run(loaded)
    after = loaded.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loaded.model.modules())


def test_budgets_that_nothing_meets_end_as_ineffective_with_a_module_that_changes_nothing(loaded: LoadedModel) -> None:
    module, report = run(loaded, FitOptions(gate="paper", budgets=Budgets(kl=0.0, nll=-1.0)))
    assert report.outcome == "ineffective"
    assert report.selected is None
    assert module.kappa == 0.0


def test_retain_states_go_on_where_they_were_ended(loaded: LoadedModel, tmp_path: Path) -> None:
    """An idle worker's are ended when a job comes."""
    long = [RetainRow(f"size_{i} = {i}\n" * 150) for i in range(24)]
    windows = retain_windows(loaded.tokenizer, long, range(len(long)))
    asked: dict[str, Any] = {"pad": 0, "limit_bytes": 2**20, "fingerprint": loaded.identity.fingerprint}
    expected = retain_states(loaded.model, windows, 1, **asked)
    batches = count = 0

    def end(made: Progress) -> None:
        nonlocal batches
        batches = made.total
        if made.done > made.total // 2:
            raise Cancelled("a job came")

    with pytest.raises(Cancelled):
        retain_states(loaded.model, windows, 1, cache=tmp_path, progress=end, **asked)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert 0 < len(before) < batches

    def tell(made: Progress) -> None:
        nonlocal count
        count += 1

    found = retain_states(loaded.model, windows, 1, cache=tmp_path, progress=tell, **asked)
    assert 0 < count < batches
    assert all(file.stat().st_mtime_ns == written for file, written in before.items())
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0], expected[0])


def test_retain_statistics_come_from_the_cache_the_second_time(loaded: LoadedModel, tmp_path: Path) -> None:
    stages: list[list[str]] = []
    modules = []
    for _ in range(2):
        seen: list[str] = []
        module, _ = run(loaded, cache=tmp_path, progress=lambda p, seen=seen: seen.append(p.stage))
        stages.append(seen)
        modules.append(module)
    kept = {"retain states", "calibration states", "retain completions", "retain completions' states"}
    assert kept <= set(stages[0]) and not kept & set(stages[1])
    assert torch.equal(modules[0].w, modules[1].w)
    for file in tmp_path.iterdir():  # a damaged cache is no cache
        file.write_bytes(file.read_bytes()[:40])
    again, _ = run(loaded, cache=tmp_path)
    assert torch.equal(modules[0].w, again.w)


def test_what_was_prepared_of_the_retain_rows_is_what_a_fit_takes_up(loaded: LoadedModel, tmp_path: Path) -> None:
    asked = {"identity": loaded.identity, "cache": tmp_path}
    held_out = [RetainRow(row.text.replace("size", "length")) for row in RETAIN[:4]]
    seconds = prepare_retained(
        loaded.model, loaded.tokenizer, RETAIN[:16], retain_calibration=RETAIN[16:], held_out=held_out, **asked
    )
    assert list(seconds)[-1] == "held-out completions"  # the fit comes first, and can begin before they are there
    files = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    seen: list[str] = []

    def callback(progress: Progress) -> None:
        seen.append(progress.stage)
        if progress.stage == "rows met elsewhere":
            raise Cancelled("everything was captured by then")

    with pytest.raises(Cancelled):
        fit(
            loaded.model,
            loaded.tokenizer,
            FORGET,
            RETAIN[:16],
            name="m",
            retain_calibration=RETAIN[16:],
            progress=callback,
            **asked,
        )
    assert "forget states" in seen and not {"retain states", "retain completions"} & set(seen)
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == files and len(files) == 9
    seen.clear()
    given = (loaded.model, loaded.tokenizer, FORGET, RETAIN[:16], RETAIN[16:], "m", loaded.identity, FitOptions())
    context = context_of(*given, lambda made: seen.append(made.stage), tmp_path)
    module = make_module(loaded.identity, layer=context.layers[0], s_ref=1e9)  # its gate stays shut: nothing is decoded
    assert certify(context, module, []) is not None and set(seen) == {"certificate"}
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == files
    seen.clear()
    given = {"cache": tmp_path, "fingerprint": loaded.identity.fingerprint, "progress": callback}
    HeldOut(loaded.model, loaded.tokenizer, held_out, [1], **given)
    assert seen and "retain completions" not in seen


@pytest.mark.parametrize("stage", ["retain states", "forget states and gradients", "forget scan", "retain budgets"])
def test_raising_cancelled_from_the_callback_stops_at_any_stage(loaded: LoadedModel, stage: str) -> None:
    def callback(progress: Progress) -> None:
        if progress.stage == stage:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        run(loaded, progress=callback)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loaded.model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (FitOptions(layers=(7,)), "layers: 7 does not exist"),
        (FitOptions(layers=()), "layers: the list is empty"),
        (FitOptions(quantiles=(1.5,)), "quantiles"),
        (FitOptions(strengths=(-1.0,)), "strengths"),
        (FitOptions(forms=("spm",)), "forms: 'spm'"),
    ],
)
def test_a_bad_option_is_named(loaded: LoadedModel, options: FitOptions, message: str) -> None:
    with pytest.raises(DataError, match=message):
        run(loaded, options)


def test_scores_from_before_that_are_not_one_a_row_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(DataError, match=r"before: 1 scores .* one a row"):
        run(loaded, before=[RowScore({"plain": 1.0})])


def test_too_few_rows_are_refused_with_the_number_needed(loaded: LoadedModel) -> None:
    with pytest.raises(InsufficientRows, match="at least 3"):
        fit(loaded.model, loaded.tokenizer, FORGET[:2], RETAIN, name="m", identity=loaded.identity, options=WIDE)


def test_verify_reports_rows_apart_by_what_the_fit_did_with_them(loaded: LoadedModel, tmp_path: Path) -> None:
    module, _ = run(loaded)
    module.save(tmp_path / "m.safetensors")
    table = verify(loaded.model, loaded.tokenizer, module, FORGET, RETAIN[:3])  # identified by itself
    for column in ("before", "after"):
        groups = table[column]
        assert set(groups) == {"all", "reported_by", "chosen_by", "fitted", "calibration", "validation", "retain"}
        assert sum(groups[name]["rows"] for name in ("fitted", "calibration", "validation")) == len(FORGET)
        assert {"f_bleu", "f_bleu_fim", "spans_50", "spans_100", "mean_recovery"} <= set(groups["all"])
    assert table["before"]["retain"]["gate_rate"] == 0.0
    assert 0.0 <= table["after"]["retain"]["gate_rate"] <= 1.0
    coarse = replace(module, calibrated={"dtype": "bfloat16", "quantisation": None})
    with pytest.raises(ModelMismatch, match=r"the model runs in float32; run the model with --dtype bfloat16"):
        verify(loaded.model, loaded.tokenizer, coarse, FORGET[:3], [], identity=loaded.identity)
    others = verify(loaded.model, loaded.tokenizer, module, FORGET[:3], [], identity=loaded.identity)
    assert set(others["before"]) == {"all", "chosen_by", "reported_by"}


def test_verify_refuses_another_model_and_keeps_nothing_of_it(
    loaded: LoadedModel, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    module, other = make_module(loaded.identity, layer=1), load_model(tiny_checkpoint("llama", seed=1))
    asked = {"attempts": 0, "cache": tmp_path}
    for identity in (None, other.identity):
        with pytest.raises(ModelMismatch, match=r"was fitted on 'llama' .* not on 'llama'"):
            verify(other.model, other.tokenizer, module, [], RETAIN[:3], identity=identity, **asked)
    assert list(tmp_path.iterdir()) == []
    first = verify(loaded.model, loaded.tokenizer, module, [], RETAIN[:3], **asked)
    again = verify(loaded.model, loaded.tokenizer, module, [], RETAIN[:3], attempts=0)
    for column in (
        "before",
        "after",
    ):  # kept states lie elsewhere in memory, which some processors add up in another order
        was, found = dict(first[column]), dict(again[column])
        assert found.pop("retain") == pytest.approx(was.pop("retain"), rel=1e-6) and found == was


def test_verify_takes_a_merged_adapter_by_the_identity_from_before(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint("llama")
    merged = load_model(base, make_adapter(base, tmp_path))
    given = (merged.model, merged.tokenizer, make_module(merged.identity, layer=1), FORGET[:2], [])
    with pytest.raises(ModelMismatch, match="where an adapter was merged, give the identity from before"):
        verify(*given, attempts=0)
    assert verify(*given, attempts=0, identity=merged.identity)["before"]["all"]["rows"] == 2


def test_a_random_model_has_memorised_nothing(loaded: LoadedModel) -> None:
    found = extractable(loaded.model, loaded.tokenizer, FORGET, progress=silent)
    assert found["memorised"] is False
    assert found["rows"] == len(FORGET)


@pytest.mark.parametrize(
    ("length", "span", "is_extracted"),
    [
        (1, 1, False),
        (3, 3, False),
        (4, 4, True),
        (6, 5, False),
        (6, 6, True),
        (14, 7, False),
        (14, 8, True),
        (60, 30, True),
    ],
)
def test_what_comes_back_by_chance_is_not_memorised(
    loaded: LoadedModel, length: int, span: int, is_extracted: bool
) -> None:
    ids = encode(loaded.tokenizer, FORGET[0].continuation * 4)
    row = ForgetRow(FORGET[0].prompt, loaded.tokenizer.decode(ids[:length]))
    assert len(forget_prompt(loaded.tokenizer, row, "plain")[1]) == length
    score = RowScore({"plain": 0.0}, span)
    found = extractable(loaded.model, loaded.tokenizer, [row], scores=[score])
    assert (found["extracted"], found["memorised"]) == (int(is_extracted), is_extracted)
