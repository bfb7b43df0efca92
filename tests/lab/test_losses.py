"""Each loss against numbers worked out by hand, against a slow reading of its formula, and its gradient against differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from unbind_core.architecture import load_model
from unbind_core.encoding import encode
from unbind_core.progress import silent
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.windows import Window, forget_windows, make_batch, retain_windows
from unbind_lab.setting import Bench, Setting
from unbind_lab.systems import BASELINES
from unbind_lab.trained import step
from unbind_lab.trained.asu import smoothed_attention
from unbind_lab.trained.dpo import DPO, dpo
from unbind_lab.trained.flat import by_kl, by_total_variation
from unbind_lab.trained.npo import npo
from unbind_lab.trained.prod import prod, signed_weights
from unbind_lab.trained.rmu import RMU, control, rmu
from unbind_lab.trained.rmu import weights as rmu_weights
from unbind_lab.trained.simnpo import simnpo
from unbind_lab.trained.step import Step, by_row, kl
from unbind_lab.trained.task_vector import subtracted
from unbind_lab.trained.training import ANSWER, Rows, Trained, _steps, train

TRAINED = [system for system in BASELINES if isinstance(system, Trained)]
FORGET = [
    ForgetRow("def a(x):\n", "    return x + 1\n"),
    ForgetRow("def b():\n", "    return [1, 2, 3][0] * 2\n    pass\n"),
]
RETAIN = [RetainRow("for index in range(10):\n    print(index)\n"), RetainRow("class Reader:\n    pass\n")]


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_formulas_give_what_paper_and_pencil_do() -> None:
    assert npo(numbers(-2), numbers(-1), 0.1).item() == pytest.approx(20 * math.log(1 + math.exp(-0.1)))
    assert simnpo(numbers(-1, -3), 0.7, 0.5).item() == pytest.approx(
        2 / 0.7 * (math.log(1 + math.exp(-0.2)) + math.log(1 + math.exp(-1.6))) / 2
    )
    assert dpo(numbers(-1), numbers(-2), numbers(-3), numbers(-1), 0.05).item() == pytest.approx(24.8383, abs=1e-4)
    assert by_kl(numbers(0.8), numbers(0.1)).item() == pytest.approx(math.exp(-0.2) - 0.1)
    assert by_total_variation(numbers(0.8), numbers(0.1)).item() == pytest.approx(0.282184, abs=1e-6)
    assert kl(numbers(0.5, 0.5).log()[None], numbers(0.25, 0.75).log()[None]).item() == pytest.approx(
        0.143841, abs=1e-6
    )
    assert rmu(numbers(1, 1)[None], numbers(0, 2), numbers(1, 0)[None], numbers(0, 0)[None], 100).item() == 51
    assert subtracted({"a": numbers(1)}, {"a": numbers(3)}, {"alpha": 1.0})["a"].item() == -1
    assert by_row(numbers(1, 2, 6), torch.tensor([0, 0, 1]), 2, mean=True).tolist() == [1.5, 6]


def test_prod_takes_the_memorised_token_down_and_spreads_its_mass_over_the_likeliest_others() -> None:
    reference = numbers(0.5, 0.3, 0.2).log()[None]
    token = torch.tensor([0])
    assert signed_weights(reference, token, 0.2, 0.9)[0].tolist() == pytest.approx([-0.1, 0.6, 0.4])
    assert signed_weights(reference, token, 0.2, 0.5)[0].tolist() == pytest.approx([-0.1, 1.0, 0.0])
    assert prod(torch.zeros(1, 3, dtype=torch.float64), numbers(-0.1, 0.6, 0.4)[None]).item() == pytest.approx(
        0.9 * math.log(3)
    )


FIXED = numbers(-0.5, -0.9, 0.3)
FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "npo": lambda x, y: npo(x, y, 0.1),
    "simnpo": lambda x, y: simnpo(x * y, 0.7, 0.1),
    "dpo": lambda x, y: dpo(x, y, FIXED, -FIXED, 0.05),
    "flat-kl": by_kl,
    "flat-tv": by_total_variation,
    "kl": lambda x, y: kl(FIXED[None], x[None] * y[None]),
    "prod": lambda x, y: prod((x * y)[None], signed_weights(FIXED[None], torch.tensor([1]), 0.2, 0.9)),
    "rmu": lambda x, y: rmu(x[None], numbers(1, 0, 2), y[None], numbers(0, 1, 0)[None], 3.0),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_every_formula_has_the_gradient_of_its_differences(name: str) -> None:
    x, y = numbers(-0.3, -1.2, 0.4).requires_grad_(), numbers(-0.7, 0.2, -0.1).requires_grad_()
    assert torch.autograd.gradcheck(FORMULAS[name], (x, y))


class Oracle:
    """One row at a time, unpadded, token by token."""

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        self.model, self.reference = model, reference

    def logs(
        self, window: Window, model: nn.Module | None = None, first: int | None = None, last: int | None = None
    ) -> Tensor:
        """Log-probabilities [n,V] at positions that predict tokens ``first`` to ``last``."""
        with torch.no_grad():
            found = (model or self.model)(input_ids=torch.tensor([window.ids])).logits[0].double().log_softmax(-1)
        return found[
            (window.first_target if first is None else first) - 1 : (len(window.ids) if last is None else last) - 1
        ]

    def own(self, windows: list[Window], model: nn.Module | None = None) -> list[list[float]]:
        """Log-probability of each target token of each row."""
        return [
            [float(log[token]) for log, token in zip(self.logs(w, model), w.ids[w.first_target :], strict=True)]
            for w in windows
        ]

    def context(self, windows: list[Window]) -> list[float]:
        return [
            float(log[token])
            for w in windows
            for log, token in zip(self.logs(w, first=1, last=w.first_target), w.ids[1 : w.first_target], strict=True)
        ]

    def kl(self, windows: list[Window]) -> float:
        found = []
        for w in windows:
            p, q = self.logs(w, self.reference), self.logs(w)
            found += (p.exp() * (p - q)).sum(-1).tolist()
        return sum(found) / len(found)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


@pytest.fixture(scope="module")
def parts(setting: Setting) -> tuple[nn.Module, nn.Module, list[Window], list[Window], list[Window]]:
    """Two models in float64, and windows of unequal lengths: to forget, answered otherwise, kept."""
    loaded = load_model(setting.base, setting.full, dtype=torch.float64)
    other = load_model(setting.base, setting.retrained, dtype=torch.float64, merge=False).model
    forget = forget_windows(loaded.tokenizer, FORGET, range(2))
    answer = encode(loaded.tokenizer, ANSWER)
    chosen = [Window((*w.ids[: w.first_target], *answer), w.first_target, w.row) for w in forget]
    return other, loaded.model, forget, chosen, retain_windows(loaded.tokenizer, RETAIN, range(2))


def step_of(parts: tuple[nn.Module, nn.Module, list[Window], list[Window], list[Window]], system: Trained) -> Step:
    model, reference, *windows = parts
    forget, chosen, retain = (make_batch(one, 0) for one in windows)
    return Step(model, reference, system.paper.options, forget, chosen, retain)


def test_losses_count_continuations_alone_neither_prompts_nor_padding(parts) -> None:  # type: ignore[no-untyped-def]
    model, reference, forget, chosen, retain = parts
    slow = Oracle(model, reference)
    now, before = slow.own(forget), slow.own(forget, reference)
    gained, gained_before = slow.own(chosen), slow.own(chosen, reference)
    sp = lambda z: math.log(1 + math.exp(z))  # noqa: E731
    forget_nll, retain_nll = -mean(flat(now)), -mean(flat(slow.own(retain)))
    odds = [math.exp(log) for log in flat(now)]
    assert min(odds) < max(odds)
    expected = {
        "ga": -forget_nll,
        "graddiff": -forget_nll + retain_nll,
        "npo-kl": 20 * mean([sp(0.1 * (sum(a) - sum(b))) for a, b in zip(now, before, strict=True)]) + slow.kl(retain),
        "simnpo-kl": 2 / 0.7 * mean([sp(0.7 * mean(a)) for a in now]) + slow.kl(retain),
        "dpo": 40
        * mean(
            [
                sp(-0.05 * ((sum(c) - sum(a)) - (sum(d) - sum(b))))
                for a, b, c, d in zip(now, before, gained, gained_before, strict=True)
            ]
        ),
        "flat-kl": mean(
            [
                math.exp(mean([math.exp(x) for x in a]) - 1) - mean([math.exp(x) for x in c])
                for a, c in zip(now, gained, strict=True)
            ]
        ),
        "flat-tv": mean(
            [
                (math.tanh(mean([math.exp(x) for x in a])) - math.tanh(mean([math.exp(x) for x in c]))) / 2
                for a, c in zip(now, gained, strict=True)
            ]
        ),
        "task-vector": forget_nll,
        "code-eraser": -forget_nll - 0.5 * mean(slow.context(forget)) - 0.1 * slow.kl(forget) + 0.1 * slow.kl(retain),
    }
    found = {s.name: s.loss(step_of(parts, s)).item() for s in TRAINED if s.name in expected}
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("system", TRAINED, ids=lambda system: system.name)
def test_every_loss_has_the_gradient_of_its_differences(parts, system: Trained) -> None:  # type: ignore[no-untyped-def]
    model = parts[0]
    names = set(system.weights(model))
    weights = [p for name, p in model.named_parameters() if name in names]
    assert weights
    for p in weights:
        p.requires_grad_(True)
    grads = torch.autograd.grad(system.loss(step_of(parts, system)), weights)
    slope = float(sum(grad.square().sum() for grad in grads) ** 0.5)
    values = []
    for sign in (1e-3, -2e-3, 1e-3):  # along the gradient; not smaller, as the library's norms compute in float32
        with torch.no_grad():
            for p, grad in zip(weights, grads, strict=True):
                p.add_(sign / slope * grad)
            values.append(system.loss(step_of(parts, system)))
    model.requires_grad_(False)
    assert float((values[0] - values[1]) / 2e-3) == pytest.approx(slope, rel=1e-2)


@pytest.mark.parametrize("system", TRAINED, ids=lambda system: system.name)
def test_an_update_is_the_same_however_its_rows_share_passes_and_in_whatever_order(
    parts,  # type: ignore[no-untyped-def]
    system: Trained,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, reference, *windows = parts
    names = set(system.weights(model))
    weights = [p for name, p in model.named_parameters() if name in names]
    for p in weights:
        p.requires_grad_(True)

    def update(together: int, order: int) -> tuple[float, list[Tensor]]:
        monkeypatch.setattr(step, "TOGETHER", together)
        loss = system.loss(step_of((model, reference, *(some[::order] for some in windows)), system))
        return loss.item(), list(torch.autograd.grad(loss, weights))

    once, slopes = update(8, 1)
    for together, order in ((1, 1), (1, -1), (8, -1)):
        found, others = update(together, order)
        assert found == pytest.approx(once, rel=1e-9)
        for one, other in zip(slopes, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)  # the library's norms compute in float32
    model.requires_grad_(False)


def test_pieces_of_a_batch_are_all_its_rows_without_what_is_padding_to_all_of_them() -> None:
    windows = [Window(tuple(range(length)), 1, 0) for length in range(2, 2 + 3 * step.TOGETHER)]
    batch = make_batch(windows, 0)
    found = step.pieces(batch)
    assert [window for piece in found for window in piece.windows] == windows
    assert [piece.ids.shape[1] for piece in found] == [1 + step.TOGETHER * n for n in (1, 2, 3)]
    assert torch.equal(torch.cat([piece.next_tokens() for piece in found]), batch.next_tokens())


def test_smoothed_attention_is_that_of_a_smaller_scale_and_ends_with_its_block(parts) -> None:  # type: ignore[no-untyped-def]
    model = parts[1]
    ids = torch.tensor([parts[2][0].ids])
    plain = model(input_ids=ids).logits
    with smoothed_attention(model, 1.5):
        assert not torch.allclose(model(input_ids=ids).logits, plain)
    assert torch.equal(model(input_ids=ids).logits, plain)


def test_rmu_leads_to_a_vector_of_its_length() -> None:
    assert control(16, 20.0).norm().item() == pytest.approx(20.0)


def test_updates_that_bfloat16_cannot_tell_one_by_one_add_up(setting: Setting) -> None:
    bench = Bench(replace(setting, dtype="bfloat16"))
    model = bench.adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name in rmu_weights(model)}
    rows, how = Rows(bench.forget, bench.retain_training), replace(RMU.paper, updates=60)
    after = train(
        RMU, how, model, bench.full.model, bench.full.tokenizer, rows, rows_an_update=2, seed=0, progress=silent
    )
    for name, weight in before.items():
        assert weight.dtype is torch.bfloat16 and float((after[60][name] != weight).float().mean()) > 0.5


@pytest.mark.parametrize("depth", [28, 32])
def test_rmu_stands_where_the_paper_s_does(depth: int) -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=8, intermediate_size=8, num_hidden_layers=depth, num_attention_heads=1, vocab_size=8
    )
    names = rmu_weights(AutoModelForCausalLM.from_config(config))
    assert names == [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (5, 6, 7)]


def test_a_row_longer_than_an_input_is_one_of_them(setting: Setting) -> None:
    bench = Bench(setting)
    rows = Rows(
        [replace(bench.forget[0], continuation="    return 1\n" * 700), *bench.forget[1:]], bench.retain_training
    )
    steps = _steps(DPO, DPO.paper, bench.adapted(), bench.full.model, bench.full.tokenizer, rows, 3, 0)
    found = [next(steps), next(steps)]  # a pass over four rows
    assert sorted(window.row for one in found for window in one.forget_batch.windows) == [0, 1, 2, 3]
    for window in (window for one in found for window in one._chosen.windows):  # type: ignore[union-attr]
        assert list(window.ids[: window.first_target]) == encode(bench.full.tokenizer, rows.forget[window.row].prompt)
