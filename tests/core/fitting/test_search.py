"""Trying an edit on kept states equals running the whole model with the module attached; the search keeps its promises."""

from __future__ import annotations

import pytest
import torch

from tests.core.conftest import FAMILIES, TinyCheckpoint, make_module
from unbind_core import ModuleBank, attach, load_model
from unbind_core.evaluation.completions import RetainCompletions
from unbind_core.evaluation.metrics import sentence_bleu
from unbind_core.evaluation.replay import Replay
from unbind_core.fitting.calibration import Budgets, Gate
from unbind_core.fitting.search import Candidate, search
from unbind_core.module import UnbindModule
from unbind_core.progress import silent
from unbind_core.running.generation import Sampling, complete
from unbind_core.running.likelihood import target_nll
from unbind_core.running.upper_layers import logits_above
from unbind_core.windows import Window, make_batch


def windows(count: int, seed: int = 0) -> list[Window]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for row in range(count):
        length = int(torch.randint(8, 30, (1,), generator=generator))
        ids = torch.randint(5, 300, (length,), generator=generator).tolist()
        made.append(Window(tuple(ids), 3, row))
    return made


def gated_module(model: torch.nn.Module, identity: object, layer: int, kappa: float = 3.0) -> UnbindModule:
    """A module whose gate opens on some positions of random text and not on others."""
    module = make_module(identity, layer=layer, kappa=kappa)
    replay = Replay(model, windows(4), [layer], pad=0)
    scores = torch.cat([(k.states[layer].float() @ module.w)[k.batch.attention_mask.bool()] for k in replay.batches])
    s_ref = float(scores.median())
    tau = float((scores - s_ref).clamp(min=0).quantile(0.8))
    return make_module(identity, layer=layer, kappa=kappa, s_ref=s_ref, tau=tau)


@pytest.mark.parametrize("family", FAMILIES)
def test_running_the_upper_layers_alone_gives_the_models_own_logits(
    family: str, tiny_checkpoint: TinyCheckpoint
) -> None:
    model = load_model(tiny_checkpoint(family)).model
    replay = Replay(model, windows(3), [0, 1, 2], pad=0)
    kept = replay.batches[0]
    with torch.no_grad():
        whole = model(input_ids=kept.batch.ids, attention_mask=kept.batch.attention_mask, use_cache=False).logits
    for layer in (0, 1, 2):
        above = logits_above(model, kept.batch.ids, kept.batch.attention_mask, layer, kept.states[layer])
        torch.testing.assert_close(above, whole)
    with torch.no_grad():
        after = model(input_ids=kept.batch.ids, attention_mask=kept.batch.attention_mask, use_cache=False).logits
    assert torch.equal(after, whole)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_trial_on_kept_states_equals_the_attached_model(layer: int, tiny_checkpoint: TinyCheckpoint) -> None:
    loaded = load_model(tiny_checkpoint("qwen2"))
    module = gated_module(loaded.model, loaded.identity, layer)
    texts = windows(6, seed=1)
    replay = Replay(loaded.model, texts, [layer], pad=0, tokens=64)
    bank = ModuleBank()
    bank.add(module)
    selection = bank.select([{module.name: 1.0}])
    assert selection is not None
    outcome = replay.run(selection, layer, kl_budget=float("inf"))
    assert 0 < outcome.open_gates < outcome.evaluated

    nll = kl = 0.0
    for window in texts:
        batch = make_batch([window], 0)
        with torch.no_grad():
            plain = loaded.model(batch.ids).logits
            with attach(loaded.model, bank):
                edited = loaded.model(batch.ids).logits
        nll += float(target_nll(edited, batch).sum())
        p, q = (torch.log_softmax(x[batch.predictors], -1) for x in (plain, edited))
        kl += float((p.exp() * (p - q)).sum())
    assert outcome.nll == pytest.approx(nll, rel=1e-5)
    assert outcome.kl == pytest.approx(kl, rel=1e-3)
    assert replay.count == sum(w.target_count for w in texts)


def test_the_bleu_drop_equals_generating_everything_again(tiny_checkpoint: TinyCheckpoint) -> None:
    loaded = load_model(tiny_checkpoint("qwen2"))
    module = gated_module(loaded.model, loaded.identity, 1, kappa=8.0)
    bank = ModuleBank()
    bank.add(module)
    selection = bank.select([{module.name: 1.0}])
    assert selection is not None
    texts = windows(8, seed=2)
    prompts = [w.ids[:-4] for w in texts]
    sampling = Sampling(128)
    before = complete(loaded.model, prompts, sampling, pad=0, end=None)
    references = [o[:64] for o in before]  # what the model says anyway, so that any change costs BLEU
    after = complete(loaded.model, prompts, sampling, pad=0, end=None, editing=lambda: attach(loaded.model, bank))
    expected = sum(sentence_bleu(r, b) - sentence_bleu(r, a) for r, b, a in zip(references, before, after, strict=True))
    completions = RetainCompletions(loaded.model, prompts, references, before, [1], pad=0, end=None)
    assert completions.drop(bank, selection, 1) == pytest.approx(expected / len(prompts), abs=1e-6)
    assert expected != 0


@pytest.fixture
def world(
    tiny_checkpoint: TinyCheckpoint,
) -> tuple[list[Candidate], dict[int, UnbindModule], Replay, Replay, RetainCompletions]:
    loaded = load_model(tiny_checkpoint("qwen2"))
    modules: dict[int, UnbindModule] = {}
    rivals = []
    for layer in (0, 1, 2):
        for kappa in (0.5, 2.0, 8.0):
            module = gated_module(loaded.model, loaded.identity, layer, kappa)
            candidate = Candidate(layer, Gate(0.5, module.tau, module.v, -1.0, 1.0), "paper", kappa)
            modules[id(candidate)] = module
            rivals.append(candidate)
    layers = [0, 1, 2]
    texts = windows(8, seed=3)
    prompts = [w.ids[:6] for w in texts]
    outputs = complete(loaded.model, prompts, Sampling(16), pad=0, end=None)
    completions = RetainCompletions(loaded.model, prompts, outputs, outputs, layers, pad=0, end=None)
    forget = Replay(loaded.model, windows(3, seed=4), layers, pad=0)
    return rivals, modules, forget, Replay(loaded.model, texts, layers, pad=0), completions


@pytest.mark.parametrize("kl", [1e-9, 1e-3, 1e-2, 10.0])
def test_the_lazy_search_finds_what_the_full_scan_finds(
    kl: float, world: tuple[list[Candidate], dict[int, UnbindModule], Replay, Replay, RetainCompletions]
) -> None:
    rivals, modules, forget, retain, completions = world
    budgets = Budgets(kl=kl, nll=10.0, bleu=10.0)
    found = []
    for full_scan in (False, True):
        best = search(
            rivals, lambda t: modules[id(t)], forget, retain, completions, budgets, full_scan=full_scan, progress=silent
        )
        found.append((best.layer, best.kappa) if best else None)
    assert found[0] == found[1]
    feasible = [
        t for t in rivals if t.forget_gain and t.forget_gain > 0 and t.retain_kl is not None and t.retain_kl <= kl
    ]
    if feasible:
        winner = max(feasible, key=lambda t: t.forget_nll)
        assert found[0] == (winner.layer, winner.kappa)
    else:
        assert found[0] is None


@pytest.mark.parametrize("full_scan", [False, True])
def test_what_half_precision_does_not_hold_is_within_no_budget(
    full_scan: bool, tiny_checkpoint: TinyCheckpoint
) -> None:
    loaded = load_model(tiny_checkpoint("qwen2"), dtype=torch.float16)
    modules: dict[int, UnbindModule] = {}
    rivals = []
    for kappa in (1e7, 0.5):
        module = gated_module(loaded.model, loaded.identity, 0, kappa)
        candidate = Candidate(0, Gate(0.5, module.tau, module.v, -1.0, 1.0), "paper", kappa)
        modules[id(candidate)] = module
        rivals.append(candidate)
    texts = windows(8, seed=3)
    prompts = [w.ids[:6] for w in texts]
    outputs = complete(loaded.model, prompts, Sampling(16), pad=0, end=None)
    completions = RetainCompletions(loaded.model, prompts, outputs, outputs, [0], pad=0, end=None)
    forget, retain = (Replay(loaded.model, each, [0], pad=0) for each in (windows(3, seed=4), texts))
    search(
        rivals,
        lambda t: modules[id(t)],
        forget,
        retain,
        completions,
        Budgets(kl=10.0, nll=10.0, bleu=10.0),
        full_scan=full_scan,
        progress=silent,
    )
    verdicts = {t.kappa: t.verdict for t in rivals}
    assert verdicts[1e7] == ("no gain" if full_scan else "over KL budget (screened)")
