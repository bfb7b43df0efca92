"""Completions of retain rows by the unedited model, kept on disk, and what an edit changes of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from unbind_core.applying.attach import attach
from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.selection import Selection
from unbind_core.encoding import encode_prompt, pad_id
from unbind_core.evaluation.metrics import BLEU_NEW_TOKENS, sentence_bleu
from unbind_core.evaluation.replay import Replay, cache_key
from unbind_core.files import write_text
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_core.rows import RetainRow
from unbind_core.running.generation import Sampling, complete
from unbind_core.windows import MAX_WINDOW, Window, window_limit


class RetainCompletions:
    """Greedy completions of retain rows before any edit, to hold a candidate's BLEU against (Appendix B.3).

    ``prompts`` and ``references`` are token ids; ``outputs`` the unedited completions.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        references: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        layers: Sequence[int],
        *,
        pad: int,
        end: int | None,
        cache: Path | None = None,
        progress: ProgressCallback = silent,
    ) -> None:
        self.model, self.pad, self.end = model, pad, end
        self.prompts, self.references = prompts, references
        self.left_out: frozenset[int] = frozenset()
        self.scores = [sentence_bleu(r, o) for r, o in zip(references, outputs, strict=True)]
        # Greedy decoding leaves the unedited path only where a gate opens on that path, be it the prompt alone.
        paths = [Window((*p, *o), len(p), i) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))]
        self.replay = Replay(
            model, paths, layers, pad=pad, cache=cache, stage="retain completions' states", progress=progress
        )

    def without(self, outside: Collection[int]) -> RetainCompletions:
        """The same without the rows at some places of ``prompts``."""
        other = copy.copy(self)
        other.left_out, other.replay = frozenset(outside), self.replay.without(outside)
        return other

    def drop(self, bank: ModuleBank, selection: Selection, layer: int) -> float:
        """R-BLEU(original) - R-BLEU(edited), mean over rows."""
        drops = self.drops(bank, selection, layer)
        return sum(drops) / max(len(drops), 1)

    def drops(
        self, bank: ModuleBank, selection: Selection, layer: int, progress: ProgressCallback = silent
    ) -> list[float]:
        """R-BLEU(original) - R-BLEU(edited) of every row; only rows on whose path a gate opens are generated again."""
        wanted: list[int] = []
        for kept in counted(self.replay.batches, len(self.replay.batches), "retain completions", progress):
            _, changed = self.replay.touched(kept, selection, layer)
            touched = changed.any(-1).tolist()
            wanted += [window.row for window, hit in zip(kept.batch.windows, touched, strict=True) if hit]
        outputs = complete(
            self.model,
            [self.prompts[i] for i in wanted],
            Sampling(BLEU_NEW_TOKENS),
            pad=self.pad,
            end=self.end,
            editing=lambda: attach(self.model, bank),
            stage="retain completions",
            progress=progress,
        )
        lost = [0.0] * len(self.prompts)
        for i, output in zip(wanted, outputs, strict=True):
            lost[i] = self.scores[i] - sentence_bleu(self.references[i], output)
        return [drop for i, drop in enumerate(lost) if i not in self.left_out]


def retain_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[RetainRow], indices: Sequence[int], limit: int = MAX_WINDOW
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and references for R-BLEU: the latest boundary with a full target of min(128, n - 32) and 32 prefix tokens.

    Rows of 32 tokens or fewer are left out; prompts keep their last 2,048 (``limit``) less target tokens.
    """
    prompts, references = [], []
    for index in indices:
        ids = encode_prompt(tokenizer, rows[index].text)
        target = min(BLEU_NEW_TOKENS, len(ids) - 32)
        if target > 0:
            prompts.append(ids[:-target][-(limit - target) :])
            references.append(ids[-target:])
    return prompts, references


def retain_completions(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[RetainRow],
    indices: Sequence[int],
    layers: Sequence[int],
    cache: Path | None,
    fingerprint: str,
    progress: ProgressCallback,
) -> RetainCompletions:
    """The unedited greedy completions of retain rows and the states on their paths, from ``cache`` where they are known."""
    prompts, references = retain_prompts(tokenizer, rows, indices, window_limit(model))
    outputs = unedited_completions(model, tokenizer, prompts, cache=cache, fingerprint=fingerprint, progress=progress)
    key = cache_key(fingerprint, next(model.parameters()).dtype, prompts, outputs, layers, "empty ones too")
    return RetainCompletions(
        model,
        prompts,
        references,
        outputs,
        layers,
        pad=pad_id(tokenizer),
        end=tokenizer.eos_token_id,
        cache=cache and cache / f"paths-{key}.safetensors",
        progress=progress,
    )


def unedited_completions(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    cache: Path | None = None,
    fingerprint: str = "",
    progress: ProgressCallback = silent,
) -> list[list[int]]:
    """Greedy completions of at most BLEU_NEW_TOKENS tokens, kept in the folder ``cache`` if given.

    The key is the model's fingerprint, its dtype and the prompts.
    """
    file = cache and cache / f"completions-{cache_key(fingerprint, next(model.parameters()).dtype, prompts)}.json"
    outputs = _known(file) if file else None
    if outputs is None:
        outputs = complete(
            model,
            prompts,
            Sampling(BLEU_NEW_TOKENS),
            pad=pad_id(tokenizer),
            end=tokenizer.eos_token_id,
            stage="retain completions",
            progress=progress,
        )
        if file:
            write_text(file, json.dumps(outputs))
    return outputs


def _known(file: Path) -> list[list[int]] | None:
    """What a cache file holds; None where there is none or it is damaged."""
    try:
        known: list[list[int]] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return known
