"""What ``bench gate`` measures on: the demo model, its rows, what modules cost on held-out rows and what they make forgotten."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from server import demo
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import available_forms, pad_id
from unbind_core.errors import UnbindError
from unbind_core.evaluation.completions import retain_prompts
from unbind_core.evaluation.metrics import sentence_bleu
from unbind_core.evaluation.scores import RowScore, by_ways, forget_scores
from unbind_core.evaluation.verify import perplexity
from unbind_core.fitting.corrections.reference import Kind, Reference, load_reference
from unbind_core.fitting.fit import fit
from unbind_core.fitting.options import FitOptions
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback
from unbind_core.rows import ForgetRow, RetainRow, forget_digest, parse_forget, parse_retain
from unbind_core.running.generation import Sampling, complete
from unbind_core.windows import Window, perplexity_windows, retain_windows

NEW_TOKENS = 128


@dataclass(frozen=True)
class World:
    """The demo model and its rows."""

    loaded: LoadedModel
    forget: Mapping[str, Sequence[ForgetRow]]
    retain: Sequence[RetainRow]
    calibration: Sequence[RetainRow]
    test: Sequence[RetainRow]
    reference: Reference = field(default_factory=Reference)

    @classmethod
    def load(cls, loaded: LoadedModel, quick: bool = False, kind: Kind = Kind.NAMED) -> World:
        """The rows that are shipped, and what fits lead towards: the demo's own reference, or what there is without one.
        ``quick``: a third of the rows that are to stay, but for those of calibration.
        """
        sets = {name: _rows(f"forget_{name}", parse_forget) for name in "abc"}
        train, calibration, test = (_rows(f"retain_{part}", parse_retain) for part in ("train", "calibration", "test"))
        device = str(next(loaded.model.parameters()).device)
        named, adapter = demo.REFERENCE if kind is Kind.NAMED else None, None if kind is Kind.ITSELF else demo.ADAPTER
        reference = load_reference(demo.BASE, adapter, named=named, device=device)
        every = 3 if quick else 1
        return cls(loaded, sets, train[::every], calibration, test[::every], reference)

    @property
    def device(self) -> str:
        """Where the model is."""
        return str(next(self.loaded.model.parameters()).device)

    def rows(self, size: int) -> Sequence[ForgetRow]:
        """A forget set of this size: set A and its first rows, set B, or the first rows of set C."""
        if size == len(self.forget["b"]):
            return self.forget["b"]
        return self.forget["a" if size <= len(self.forget["a"]) else "c"][:size]


def _rows(name: str, parse: Callable[..., Any]) -> Any:
    path = demo.ROWS / f"{name}.jsonl"
    with path.open(encoding="utf-8") as lines:
        return parse(lines, path.name)


class Retained:
    """The held-out rows, measured once without modules; then again under each module or set of modules."""

    def __init__(self, world: World, progress: ProgressCallback) -> None:
        self.world, self.progress = world, progress
        model, tokenizer = world.loaded.model, world.loaded.tokenizer
        self.pad, self.end = pad_id(tokenizer), tokenizer.eos_token_id
        self.windows = self._windows(world.test)
        self.met = retain_windows(tokenizer, world.test, range(len(world.test)), available_forms(tokenizer))
        self.prompts, self.references = retain_prompts(tokenizer, world.test, range(len(world.test)))
        self.before = perplexity(model, self.windows, self.pad, progress=progress)
        self.outputs = self._complete(nullcontext)
        self.bleu = self._bleu(self.outputs)

    def _complete(self, editing: Callable[[], AbstractContextManager[object]]) -> list[list[int]]:
        model = self.world.loaded.model
        return complete(
            model,
            self.prompts,
            Sampling(NEW_TOKENS),
            pad=self.pad,
            end=self.end,
            editing=editing,
            stage="unrelated prompts",
            progress=self.progress,
        )

    def _bleu(self, outputs: Sequence[Sequence[int]]) -> float:
        return statistics.fmean(sentence_bleu(r, o) for r, o in zip(self.references, outputs, strict=True))

    def measure(self, modules: Sequence[UnbindModule]) -> dict[str, float]:
        """Rise of perplexity, fall of BLEU, share of open positions (of the module that has most), gates open at a position (of all
        modules together), share of greedy completions unchanged to the token.
        """
        model, bank = self.world.loaded.model, bank_of(self.world, modules)

        def editing() -> AbstractContextManager[object]:
            return attach(model, bank)

        after = perplexity(model, self.windows, self.pad, editing=editing, progress=self.progress)
        meeting = bank_of(self.world, modules)  # gates are counted on rows as requests have them
        perplexity(model, self.met, self.pad, editing=lambda: attach(model, meeting), progress=self.progress)
        counts = [phases["prefill"] for phases in meeting.counts().values()]
        rates = [opened / max(evaluated, 1) for evaluated, opened in counts]
        outputs = self._complete(editing)
        same = statistics.fmean(a == b for a, b in zip(self.outputs, outputs, strict=True))
        return {
            "ppl_increase": after / self.before - 1,
            "bleu_drop": self.bleu - self._bleu(outputs),
            "open_rate": max(rates, default=0.0),
            "open_at_once": sum(rates),
            "unchanged": same,
        }

    def _windows(self, rows: Sequence[RetainRow]) -> list[Window]:
        """Rows as R-PPL takes them, and in the other forms that the tokenizer has."""
        tokenizer = self.world.loaded.tokenizer
        others = [form for form in available_forms(tokenizer) if form != "plain"]
        return perplexity_windows(tokenizer, rows) + retain_windows(tokenizer, rows, range(len(rows)), others)

    def rise(self, modules: Sequence[UnbindModule], rows: Sequence[RetainRow]) -> float:
        """Rise of the mean NLL of other retain rows, relative."""
        before, after = map(math.log, self.perplexities(modules, rows))
        return after / before - 1

    def perplexities(self, modules: Sequence[UnbindModule], rows: Sequence[RetainRow]) -> tuple[float, float]:
        """Of other retain rows: without the modules, and with them."""
        model, bank = self.world.loaded.model, bank_of(self.world, modules)
        windows = self._windows(rows)
        return perplexity(model, windows, self.pad), perplexity(
            model, windows, self.pad, editing=lambda: attach(model, bank)
        )


def bank_of(world: World, modules: Sequence[UnbindModule]) -> ModuleBank:
    """A bank of these modules, where the model is."""
    return ModuleBank.of(modules, torch.device(world.device))


def scores(
    world: World,
    rows: Sequence[ForgetRow],
    modules: Sequence[UnbindModule],
    attempts: int,
    progress: ProgressCallback,
    stage: str,
) -> list[RowScore]:
    """Scores of forget rows with these modules on; with none, of the model as it is."""
    model, tokenizer = world.loaded.model, world.loaded.tokenizer
    bank = bank_of(world, modules)
    return forget_scores(
        model,
        tokenizer,
        rows,
        forms=available_forms(tokenizer),
        attempts=attempts,
        editing=(lambda: attach(model, bank)) if modules else nullcontext,
        progress=progress,
        stage=stage,
    )


def forgetting(before: Sequence[RowScore], after: Sequence[RowScore]) -> dict[str, Any]:
    """Cuts of F-BLEU, rows with exact spans of 50 tokens, mean recovery in per cent; of the ways to ask that a fit may look at
    (``chosen_by``) and those that none does (``reported_by``) the same apart.
    """

    def cut(form: str) -> float:
        return 1 - sum(s.bleu[form] for s in after) / max(sum(s.bleu[form] for s in before), 1e-9)

    return {
        "f_bleu_cut": cut("plain"),
        "f_bleu_cut_fim": cut("fim"),
        "spans_50": sum(s.span >= 50 for s in after),
        "mean_recovery": 100 * statistics.fmean(s.recovery for s in after),
        **by_ways(after),
    }


def fit_one(
    world: World,
    rows: Sequence[ForgetRow],
    name: str,
    gate: str,
    cache: Path | None,
    progress: ProgressCallback,
    policy: str | None = None,
    beside: int = 0,
) -> tuple[UnbindModule, Any]:
    """One fit as ``unbind fit`` makes it, of a module that is on beside so many others."""
    return fit(
        world.loaded.model,
        world.loaded.tokenizer,
        rows,
        world.retain,
        name=name,
        retain_calibration=world.calibration,
        identity=world.loaded.identity,
        options=FitOptions(gate=gate, policy=policy if gate == "auto" else None, beside=beside),
        progress=progress,
        cache=cache,
        reference=world.reference,
    )


def fit_kept(
    world: World,
    rows: Sequence[ForgetRow],
    name: str,
    cache: Path | None,
    progress: ProgressCallback,
    policy: str | None = None,
    beside: int = 0,
    keep: Path | None = None,
) -> UnbindModule:
    """The module of that name in the folder ``keep``; where there is none, one that is fitted and kept there.

    Raises UnbindError where the one there was fitted on other rows, for another policy or towards another reference.
    """
    path = None if keep is None else keep / f"{name}.safetensors"
    if path is not None and path.is_file():
        module = UnbindModule.load(path)
        module.require(world.loaded.identity)
        led = module.measured.get("correction", {}).get("reference", {}).get("kind", world.reference.kind)
        same = (module.forget_digest, led) == (forget_digest(rows), world.reference.kind)
        if not same or policy not in (None, module.policy):
            raise UnbindError(
                f"--keep: {path} was fitted on other rows, for another policy or towards another reference; name another folder"
            )
        return module
    module, _ = fit_one(world, rows, name, "auto", cache, progress, policy, beside)
    if path is not None:
        module.save(path)
    return module


def fit_parts(
    world: World,
    rows: Sequence[ForgetRow],
    name: str,
    most: int,
    cache: Path | None,
    progress: ProgressCallback,
    policy: str | None = None,
    keep: Path | None = None,
) -> list[UnbindModule]:
    """Modules of at most so many rows each in place of one of all of them: parts of the set in its order and of one size, but for
    a row, each fitted as one that comes beside those before it. ``keep``: a folder for them, in which they are not fitted again.
    """
    count = math.ceil(len(rows) / most)
    ends = [len(rows) * part // count for part in range(count + 1)]
    found = []
    for part, (begin, end) in enumerate(pairwise(ends)):
        called = name if count == 1 else f"{name}-{part + 1}"
        found.append(fit_kept(world, rows[begin:end], called, cache, progress, policy, part, keep))
    return found
