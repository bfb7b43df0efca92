"""What a model makes of held-out retain rows, and what a module changes of it: the ``retain`` part of the before/after table.

A module changes a row only if its gate opens somewhere on the row's unedited path. So the unedited model goes through all rows
once; under a module only the touched windows run again, from the edited layer up, and only the touched rows are completed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from unbind_core.applying.bank import edit_of
from unbind_core.encoding import available_forms, pad_id
from unbind_core.evaluation.completions import retain_completions
from unbind_core.evaluation.replay import Outcome, Replay, retain_replay
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback, silent
from unbind_core.rows import RetainRow
from unbind_core.windows import Window, perplexity_windows, retain_windows, window_limit


class HeldOut:
    """Rows under one model. ``layers`` are those whose modules will be asked about."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[RetainRow],
        layers: Sequence[int] = (),
        *,
        cache: Path | None = None,
        fingerprint: str = "",
        progress: ProgressCallback = silent,
    ) -> None:
        """``cache`` is a folder for the unedited completions and states, ``fingerprint`` the identity they are kept under."""
        pad, every = pad_id(tokenizer), range(len(rows))
        self._device = next(model.parameters()).device

        def replay(windows: Sequence[Window]) -> Replay:
            return retain_replay(
                model,
                windows,
                layers,
                pad=pad,
                cache=cache,
                fingerprint=fingerprint,
                stage="retain perplexity",
                progress=progress,
            )

        # Gates are counted where requests meet them; what R-PPL puts in front of a row is in front of no request.
        limit = window_limit(model)
        self._met = {
            form: replay(retain_windows(tokenizer, rows, every, [form], limit)) for form in available_forms(tokenizer)
        }
        first = perplexity_windows(tokenizer, rows, limit)
        self._scored = {
            "ppl": replay(first),
            **{f"ppl_{form}": met for form, met in self._met.items() if form != "plain"},
        }
        self._completions = retain_completions(model, tokenizer, rows, every, layers, cache, fingerprint, progress)

    def measures(self, module: UnbindModule | None = None, progress: ProgressCallback = silent) -> dict[str, float]:
        """``ppl``, ``ppl_fim`` (where the tokenizer has the form), ``gate_rate`` over both forms and ``bleu``, under the module.

        ``ppl`` is exp(total target NLL / number of targets) (Appendix A.3), ``ppl_fim`` the same of rows in that form;
        ``gate_rate`` is the share of positions with an open gate.
        """
        measures: dict[str, float] = {}
        outcomes: dict[Replay, Outcome] = {}
        if module is not None:
            selection = edit_of(module, self._device)[1]
            for replay in dict.fromkeys([*self._scored.values(), *self._met.values()]):
                outcomes[replay] = replay.run(selection, module.layer, progress=progress)
        for name, replay in self._scored.items():
            nll = outcomes[replay].nll if module is not None else replay.base_nll
            measures[name] = math.exp(nll / max(replay.count, 1))
        met = [outcomes[replay] for replay in self._met.values()] if module is not None else []
        measures["gate_rate"] = sum(one.open_gates for one in met) / max(sum(one.evaluated for one in met), 1)
        kept = sum(self._completions.scores)
        if module is not None:
            bank, selection = edit_of(module, self._device)
            kept -= sum(self._completions.drops(bank, selection, module.layer, progress))
        measures["bleu"] = kept / max(len(self._completions.scores), 1)
        return measures
