"""``unbind bench gate``: what the paper's gate and the measured choice reach on forget sets of growing size, side by side.

Every figure is of the demo model. Rows to forget come from its memorised sets, retain figures from 300 held-out rows.
"""

from __future__ import annotations

import ast
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server import demo
from server.bench.paraphrase import PARAPHRASES
from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.encoding import available_forms, encode, pad_id
from unbind_core.evaluation.completions import retain_prompts
from unbind_core.evaluation.metrics import EXTRACTED_SPAN, sentence_bleu, spans
from unbind_core.evaluation.scores import RowScore, forget_scores
from unbind_core.evaluation.verify import perplexity
from unbind_core.files import write_whole
from unbind_core.fitting.fit import fit
from unbind_core.fitting.options import FitOptions
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback, counted
from unbind_core.rows import ForgetRow, RetainRow, parse_forget, parse_retain
from unbind_core.running.generation import Sampling, complete
from unbind_core.windows import Window, forget_prompt, retain_windows

SIZES = (5, 12, 24, 40, 120, 300)
GATES = ("paper", "auto")
JOINT_MODULES, JOINT_ROWS = 10, 12
SAMPLES = 5
REWRITTEN_ROWS = 40  # of larger sets, every so many-th row is rewritten and read
NEW_TOKENS = 128


@dataclass(frozen=True)
class World:
    """The demo model and its rows."""

    loaded: LoadedModel
    forget: Mapping[str, Sequence[ForgetRow]]
    retain: Sequence[RetainRow]
    calibration: Sequence[RetainRow]
    test: Sequence[RetainRow]

    @classmethod
    def load(cls, loaded: LoadedModel) -> World:
        """The rows that are shipped."""
        sets = {name: _rows(f"forget_{name}", parse_forget) for name in "abc"}
        retain = [_rows(f"retain_{part}", parse_retain) for part in ("train", "calibration", "test")]
        return cls(loaded, sets, *retain)

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
        self.windows = retain_windows(tokenizer, world.test, range(len(world.test)), available_forms(tokenizer))
        self.prompts, self.references = retain_prompts(tokenizer, world.test, range(len(world.test)))
        self.before = perplexity(model, self.windows, self.pad, progress=progress)
        self.outputs = self._complete(nullcontext)
        self.bleu = self._bleu(self.outputs)

    def _complete(self, editing: Callable[[], AbstractContextManager[object]]) -> list[list[int]]:
        model = self.world.loaded.model
        return complete(
            model, self.prompts, Sampling(NEW_TOKENS), pad=self.pad, end=self.end, editing=editing,
            stage="unrelated prompts", progress=self.progress,
        )  # fmt: skip

    def _bleu(self, outputs: Sequence[Sequence[int]]) -> float:
        return statistics.fmean(sentence_bleu(r, o) for r, o in zip(self.references, outputs, strict=True))

    def measure(self, modules: Sequence[UnbindModule], windows: Sequence[Window] | None = None) -> dict[str, float]:
        """Rise of perplexity, fall of BLEU, share of open positions, share of greedy completions unchanged to the token."""
        model, bank = self.world.loaded.model, _bank(self.world, modules)

        def editing() -> AbstractContextManager[object]:
            return attach(model, bank)

        after = perplexity(model, self.windows, self.pad, editing=editing, progress=self.progress)
        counts = [phases["prefill"] for phases in bank.counts().values()]
        outputs = self._complete(editing)
        same = statistics.fmean(a == b for a, b in zip(self.outputs, outputs, strict=True))
        return {
            "ppl_increase": after / self.before - 1,
            "bleu_drop": self.bleu - self._bleu(outputs),
            "open_rate": max((opened / max(evaluated, 1) for evaluated, opened in counts), default=0.0),
            "unchanged": same,
        }

    def rise(self, modules: Sequence[UnbindModule], rows: Sequence[RetainRow]) -> float:
        """Rise of the mean NLL of other retain rows, relative."""
        before, after = map(math.log, self.perplexities(modules, rows))
        return after / before - 1

    def perplexities(self, modules: Sequence[UnbindModule], rows: Sequence[RetainRow]) -> tuple[float, float]:
        """Of other retain rows: without the modules, and with them."""
        model, tokenizer = self.world.loaded.model, self.world.loaded.tokenizer
        bank = _bank(self.world, modules)
        windows = retain_windows(tokenizer, rows, range(len(rows)), available_forms(tokenizer))
        return perplexity(model, windows, self.pad), perplexity(
            model, windows, self.pad, editing=lambda: attach(model, bank)
        )


def _bank(world: World, modules: Sequence[UnbindModule]) -> ModuleBank:
    bank = ModuleBank(next(world.loaded.model.parameters()).device)
    for module in modules:
        bank.add(module)
    return bank


def scores(
    world: World, rows: Sequence[ForgetRow], modules: Sequence[UnbindModule], attempts: int, progress: ProgressCallback,
    stage: str,
) -> list[RowScore]:  # fmt: skip
    """Scores of forget rows with these modules on; with none, of the model as it is."""
    model, tokenizer = world.loaded.model, world.loaded.tokenizer
    bank = _bank(world, modules)
    return forget_scores(
        model, tokenizer, rows, forms=available_forms(tokenizer), attempts=attempts,
        editing=(lambda: attach(model, bank)) if modules else nullcontext, progress=progress, stage=stage,
    )  # fmt: skip


def forgetting(before: Sequence[RowScore], after: Sequence[RowScore]) -> dict[str, float | int]:
    """Cuts of F-BLEU, rows with exact spans of 50 tokens, mean recovery in per cent."""

    def cut(form: str) -> float:
        return 1 - sum(s.bleu[form] for s in after) / max(sum(s.bleu[form] for s in before), 1e-9)

    return {
        "f_bleu_cut": cut("plain"),
        "f_bleu_cut_fim": cut("fim"),
        "spans_50": sum(s.span >= 50 for s in after),
        "mean_recovery": 100 * statistics.fmean(s.recovery for s in after),
    }


def gate_figures(
    loaded: LoadedModel, *, sizes: Sequence[int] = SIZES, gates: Sequence[str] = GATES, attempts: int = 5,
    joint: bool = True, cache: Path | None = None, keep: Path | None = None, progress: ProgressCallback,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """The whole table. ``attempts`` a way to ask for the measured choice; one for the paper's gate and before.

    ``keep``: a folder for the modules that were fitted and each size's figures. ``report`` hears of each result as it comes.
    """
    world = World.load(loaded)
    retained = Retained(world, progress)
    other = load_model(demo.BASE, demo.RETRAINED)
    table: dict[str, Any] = {"sizes": {}}
    for size in sizes:
        rows = world.rows(size)
        before = scores(world, rows, (), 1, progress, f"{size} rows before")
        entry: dict[str, Any] = {"before": {"f_bleu": statistics.fmean(s.bleu["plain"] for s in before)}}
        fitted: dict[str, UnbindModule] = {}
        for gate in gates:
            begun = time.monotonic()
            module, found = fit_one(world, rows, f"{gate}-{size}", gate, cache, progress)
            seconds = time.monotonic() - begun
            fitted[gate] = module
            if keep is not None:
                module.save(keep / f"{module.name}.safetensors")
            tries = attempts if gate == "auto" else 1
            after = scores(world, rows, (module,), tries, progress, f"{size} rows, {gate}")
            entry[gate] = {
                "gate": found.gate, "outcome": found.outcome, **forgetting(before, after), **retained.measure((module,)),
                "fit_seconds": seconds, "attempts": 6 * tries, "layer": module.layer, "kappa": module.kappa,
                "apart": apart_figures(world, retained, rows, module),
                "neighbours": neighbours_rise(world, retained, rows, module),
                "paraphrased": paraphrased(world, rows, module, progress),
                "output": outputs(world, other, rows, module),
            }  # fmt: skip
            entry[gate]["groups"] = _groups(module, before, after)
            report(
                f"{size} rows, {gate}: " + ", ".join(f"{k} {_short(v)}" for k, v in entry[gate].items() if _short(v))
            )
        entry["before"]["paraphrased"] = paraphrased(world, rows, None, progress)
        entry["before"]["output"] = outputs(world, other, rows, None)
        table["sizes"][str(size)] = entry
        if keep is not None:
            _write(keep / f"{size}-{'-'.join(gates)}.json", entry)
    if joint:
        table["joint"] = joint_figures(world, retained, cache, progress)
        report(f"joint: {table['joint']}")
    return table


def _write(path: Path, entry: Mapping[str, Any]) -> None:
    """One size's figures, kept as soon as they are known."""
    write_whole(path, lambda temporary: temporary.write_text(json.dumps(entry, indent=1)))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value) if isinstance(value, int | str) else ""


def fit_one(
    world: World, rows: Sequence[ForgetRow], name: str, gate: str, cache: Path | None, progress: ProgressCallback
) -> tuple[UnbindModule, Any]:
    """One fit as ``unbind fit`` makes it."""
    return fit(
        world.loaded.model, world.loaded.tokenizer, rows, world.retain, name=name, retain_calibration=world.calibration,
        identity=world.loaded.identity, options=FitOptions(gate=gate), progress=progress, cache=cache,
    )  # fmt: skip


def _groups(module: UnbindModule, before: Sequence[RowScore], after: Sequence[RowScore]) -> dict[str, Any]:
    """The same figures for rows by what the fit did with them."""
    parts = {part: module.partitions[f"forget_{part}"] for part in ("fit", "calibration", "validation")}
    return {
        part: {"rows": len(rows), **forgetting([before[i] for i in rows], [after[i] for i in rows])}
        for part, rows in parts.items()
        if rows
    }


def joint_figures(world: World, retained: Retained, cache: Path | None, progress: ProgressCallback) -> dict[str, Any]:
    """Ten modules fitted apart: forgetting of each alone and with all on, and what all of them cost together."""
    sets = [world.forget["c"][i * JOINT_ROWS : (i + 1) * JOINT_ROWS] for i in range(JOINT_MODULES)]
    modules = [fit_one(world, rows, f"joint-{i}", "auto", cache, progress)[0] for i, rows in enumerate(sets)]
    changes = []
    for rows, module in zip(counted(sets, len(sets), "joint", progress), modules, strict=True):
        before = scores(world, rows, (), 0, progress, "joint")
        alone, together = (
            forgetting(before, scores(world, rows, on, 0, progress, "joint")) for on in ((module,), modules)
        )
        changes.append({
            "f_bleu_cut_alone": alone["f_bleu_cut"], "f_bleu_cut_together": together["f_bleu_cut"],
            "f_bleu_cut_fim_alone": alone["f_bleu_cut_fim"], "f_bleu_cut_fim_together": together["f_bleu_cut_fim"],
        })  # fmt: skip
    worst = max(
        one[f"{form}_alone"] - one[f"{form}_together"] for one in changes for form in ("f_bleu_cut", "f_bleu_cut_fim")
    )
    return {"modules": changes, "worst_loss": worst, **retained.measure(modules)}


# Neighbours: retain rows whose identifiers are most like those of the forget rows.


def _identifiers(text: str) -> Counter[str]:
    return Counter(re.findall(r"[A-Za-z_][A-Za-z0-9_]+", text))


def nearest(rows: Sequence[ForgetRow], pool: Sequence[RetainRow]) -> list[RetainRow]:
    """For each forget row the retain row with the greatest cosine of TF-IDF vectors over identifiers; each once."""
    documents = [_identifiers(row.text) for row in pool]
    spread = Counter(word for document in documents for word in document)

    def vector(counts: Counter[str]) -> dict[str, float]:
        raw = {word: n * math.log((1 + len(pool)) / (1 + spread[word])) for word, n in counts.items()}
        norm = math.sqrt(sum(value * value for value in raw.values())) or 1.0
        return {word: value / norm for word, value in raw.items()}

    vectors = [vector(document) for document in documents]
    found = []
    for row in rows:
        own = vector(_identifiers(row.prompt + row.continuation))
        found.append(max(range(len(pool)), key=lambda i: sum(v * vectors[i].get(word, 0.0) for word, v in own.items())))
    return [pool[i] for i in sorted(set(found))]


def neighbours_rise(
    world: World, retained: Retained, rows: Sequence[ForgetRow], module: UnbindModule
) -> dict[str, float | int]:
    """Relative rise of NLL on the nearest retain rows: of all of them, of those that do not themselves hold a span of 50 tokens
    of a forget row (there a gate is right to open), and of those that no fit has seen.
    """
    everything = [*world.retain, *world.calibration, *world.test]
    near, unseen = nearest(rows, everything), nearest(rows, world.test)
    apart = _apart(world, rows, near)
    return {
        "rows": len(near), "nll_increase": retained.rise((module,), near),
        "repeating_rows": len(near) - len(apart), "apart_nll_increase": retained.rise((module,), apart),
        "unseen_rows": len(unseen), "unseen_nll_increase": retained.rise((module,), unseen),
    }  # fmt: skip


def apart_figures(
    world: World, retained: Retained, rows: Sequence[ForgetRow], module: UnbindModule
) -> dict[str, float | int]:
    """Rise of perplexity on the held-out rows that hold no span of 50 tokens of a forget row, and how many do hold one: what is to
    be kept there is what is to be forgotten, and a fit leaves such rows of its own out.
    """
    apart = _apart(world, rows, world.test)
    before, after = retained.perplexities((module,), apart)
    return {"repeating_rows": len(world.test) - len(apart), "ppl_increase": after / before - 1}


def _apart(world: World, rows: Sequence[ForgetRow], others: Sequence[RetainRow]) -> list[RetainRow]:
    protected = {span for row in rows for span in _spans(world, row.prompt + row.continuation)}
    return [row for row in others if not protected & _spans(world, row.text)]


def _spans(world: World, text: str) -> set[tuple[int, ...]]:
    return spans(encode(world.loaded.tokenizer, text), EXTRACTED_SPAN)


def paraphrased(
    world: World, rows: Sequence[ForgetRow], module: UnbindModule | None, progress: ProgressCallback
) -> dict[str, float]:
    """Mean F-BLEU of plain greedy completions where the prompt is lightly rewritten, by kind of rewriting."""
    modules = () if module is None else (module,)
    found = {}
    for kind, rewrite in PARAPHRASES.items():
        after = scores(world, [rewrite(row) for row in _some(rows)], modules, 0, progress, f"paraphrased ({kind})")
        found[kind] = statistics.fmean(s.bleu["plain"] for s in after)
    return found


def outputs(world: World, other: LoadedModel, rows: Sequence[ForgetRow], module: UnbindModule | None) -> dict[str, Any]:
    """What is written in place of the rows: its perplexity under the unmodified and the retrained model, and its form.

    ``empty``: share of completions without a token; ``parsed``: share of Python prompts that parse with their completion;
    ``looping``: share of completions of 16 tokens or more in which one token is over half.
    """
    loaded = world.loaded
    tokenizer, end = loaded.tokenizer, loaded.tokenizer.eos_token_id
    bank = _bank(world, () if module is None else (module,))
    rows = _some(rows)
    prompts = [forget_prompt(tokenizer, row, "plain")[0] for row in rows]
    new = complete(
        loaded.model, prompts, Sampling(NEW_TOKENS), pad=pad_id(tokenizer), end=end,
        editing=(lambda: attach(loaded.model, bank)) if module is not None else nullcontext,
    )  # fmt: skip
    # Where the text ended by itself, that it did is part of what was written.
    written = [[*o, end] if len(o) < NEW_TOKENS else o for o in new]
    windows = [Window((*p, *o), len(p), i) for i, (p, o) in enumerate(zip(prompts, written, strict=True))]
    texts = [str(tokenizer.decode(o)) for o in new]
    return {
        "empty": statistics.fmean(not o for o in new),
        "tokens": statistics.fmean(len(o) for o in new),
        "perplexity": perplexity(loaded.model, windows, pad_id(tokenizer)),
        "perplexity_retrained": perplexity(other.model, windows, pad_id(tokenizer)),
        "parsed": statistics.fmean(_parses(row.prompt + text) for row, text in zip(rows, texts, strict=True)),
        "looping": statistics.fmean(_loops(o) for o in new),
        "samples": texts[:SAMPLES],
    }


def _some(rows: Sequence[ForgetRow]) -> Sequence[ForgetRow]:
    return rows[:: max(1, -(-len(rows) // REWRITTEN_ROWS))]


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _loops(tokens: Sequence[int]) -> bool:
    return len(tokens) >= 16 and Counter(tokens).most_common(1)[0][1] > len(tokens) / 2
