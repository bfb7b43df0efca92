"""Greedy completions of protected rows under one edit after another, mostly without decoding: the target itself is the draft.

A row that the model recites goes the way of its target until the edit turns it, and then most often ends. So one pass over a
prompt with its target, kept up to the edited layer, tells how far the completion follows and what comes then, as in
speculative decoding. Only what turns away and goes on is decoded; it is a draft for the edits that are tried after.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from unbind_core.applying.attach import attach
from unbind_core.applying.bank import edit_of
from unbind_core.architecture import decoder_layers, unwrap
from unbind_core.evaluation.kept import rows_of
from unbind_core.evaluation.replay import Replay, changed_by
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback, counted, silent
from unbind_core.running.generation import Sampling, complete
from unbind_core.running.recording import recording
from unbind_core.running.vocabulary import logits_in_parts
from unbind_core.windows import Batch, Window, batches, window_limit

BATCH_TOKENS = 2048
MOST_KEPT = 2 << 30  # bytes of paths' states beside those of the rows; a call that needs more takes its rows in groups
STAGE = "forget rows: greedy"
Path = tuple[int, ...]  # token ids of a prompt and what follows it


@dataclass(frozen=True)
class _PathStates:
    """One batch of paths: unedited states [B,T,d] and the token that the unedited model puts after each position, [B,T]."""

    batch: Batch
    states: Tensor
    following: Tensor


class Drafts:
    """Completions under modules of one layer, or under none: greedy and without penalties."""

    def __init__(
        self, model: nn.Module, layer: int | None = None, *, pad: int, end: int | None, replay: Replay | None = None
    ) -> None:
        """``layer`` is the modules', ``pad`` and ``end`` are token ids; ``replay`` has kept the states of some paths already."""
        self.model, self.pad, self.end = model, pad, end
        self.layer = len(decoder_layers(model)) - 1 if layer is None else layer
        self._given = 0  # batches that ``replay`` holds anyway
        self._batches: list[_PathStates] = []
        self._paths: set[Path] = set()
        # what was decoded after a draft was turned away from: the draft for the next time
        self._continuations: dict[Path, Path] = {}
        self._latest: tuple[UnbindModule | None, dict[Path, list[int]]] = None, {}
        for one in replay.batches if replay is not None else ():
            last = max(one.states)
            following = self._most_likely(one.batch, last, one.states[last])
            self._batches.append(_PathStates(one.batch, one.states[self.layer], following))
            self._paths |= {window.ids for window in one.batch.windows}
        self._given = len(self._batches)

    def complete(
        self,
        module: UnbindModule | None,
        prompts: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        count: int,
        progress: ProgressCallback = silent,
    ) -> list[list[int]]:
        """Up to ``count`` new token ids after each prompt, without the end token: what
        :func:`unbind_core.running.generation.complete` gives under the module, but for the last bits of half-precision states.
        """
        config, itemsize = unwrap(self.model).config, next(self.model.parameters()).dtype.itemsize
        a_token = config.get_text_config().hidden_size * itemsize  # type: ignore[union-attr, operator]
        group, room, found = 0, 0, list[list[int]]()
        for i, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
            size = (len(prompt) + max(len(target), count)) * int(a_token)
            room += size
            if room > MOST_KEPT and i > group:
                found += self._complete(module, prompts[group:i], targets[group:i], count, progress)
                group, room = i, size
        return found + self._complete(module, prompts[group:], targets[group:], count, progress)

    def _complete(
        self,
        module: UnbindModule | None,
        prompts: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        count: int,
        progress: ProgressCallback,
    ) -> list[list[int]]:
        self._let_go()
        found: list[list[int]] = [[] for _ in prompts]
        drafts = {i: (*prompt, *target) for i, (prompt, target) in enumerate(zip(prompts, targets, strict=True))}
        longest, positions = window_limit(self.model), window_limit(self.model, sys.maxsize)
        paths = {i: path[: max(longest, len(prompts[i]) + 1)] for i, path in drafts.items()}
        unknown: dict[int, Path] = {}
        while paths:
            self._keep(set(paths.values()) - self._paths, progress)
            following = self._following(module, set(paths.values()), progress)
            turned = [
                i for i, path in paths.items() if _follow(path, following[path], found[i], prompts[i], count, self.end)
            ]
            ends = {i: (*prompts[i], *found[i]) for i in turned}
            unknown |= {i: path for i, path in ends.items() if path not in self._continuations}
            paths = {i: self._continuations[path] for i, path in ends.items() if path in self._continuations}
        if unknown:
            most = max(count - len(found[i]) for i in unknown)
            decoded = complete(
                self.model,
                list(unknown.values()),
                Sampling(most),
                pad=self.pad,
                end=self.end,
                editing=partial(self._editing, module),
                stage=STAGE,
                progress=progress,
            )
            for (i, path), tokens in zip(unknown.items(), decoded, strict=True):
                found[i] = (found[i] + tokens)[:count]
                self._continuations[path] = (*path, *tokens)[:positions]
        return found

    def _editing(self, module: UnbindModule | None) -> AbstractContextManager[object]:
        if module is None:
            return nullcontext()
        return attach(self.model, edit_of(module, next(self.model.parameters()).device)[0])

    def _keep(self, paths: set[Path], progress: ProgressCallback) -> None:
        windows = [Window(path, 1, i) for i, path in enumerate(sorted(paths))]
        device = next(self.model.parameters()).device
        every = list(batches(windows, self.pad, tokens=BATCH_TOKENS, device=device))
        for batch in counted(every, len(every), STAGE, progress):
            with recording(self.model, [self.layer]) as states:
                following = self._most_likely(batch)
            self._batches.append(_PathStates(batch, states[self.layer], following))
        self._paths |= paths

    def _let_go(self) -> None:
        """Drop the states of paths where they are too many; those of a path that is asked again are computed again."""
        kept = self._batches[self._given :]
        if sum(one.states.numel() * one.states.element_size() for one in kept) > MOST_KEPT:
            self._paths -= {window.ids for one in kept for window in one.batch.windows}
            del self._batches[self._given :]

    def _most_likely(self, batch: Batch, layer: int | None = None, states: Tensor | None = None) -> Tensor:
        """The most likely token after each position, int64 [B,T], where ``layer`` puts out ``states``."""
        parts = logits_in_parts(self.model, batch.ids, batch.attention_mask, None, layer, states)
        return torch.cat([part.argmax(-1) for part in parts]).view_as(batch.ids)

    def _following(
        self, module: UnbindModule | None, wanted: set[Path], progress: ProgressCallback
    ) -> dict[Path, list[int]]:
        """The most likely token after each position of each path, under the module; what the last one was asked is remembered."""
        device = next(self.model.parameters()).device
        selection = edit_of(module, device)[1] if module is not None else None
        if module is not self._latest[0]:
            self._latest = module, {}
        found = self._latest[1]
        unasked = wanted - found.keys()
        for kept in counted(self._batches, len(self._batches), STAGE, progress):
            paths = [window.ids for window in kept.batch.windows]
            if not unasked.intersection(paths):
                continue
            following = kept.following
            if selection is not None:
                edit, changed = changed_by(selection, self.layer, kept.batch, kept.states)
                if bool((rows := changed.any(-1)).any()):
                    following = following.clone()
                    following[rows] = self._most_likely(rows_of(kept.batch, rows), self.layer, edit.states[rows])
            found |= {path: tokens[: len(path)] for path, tokens in zip(paths, following.tolist(), strict=True)}
        return found


def _follow(
    path: Path, following: Sequence[int], found: list[int], prompt: Sequence[int], count: int, end: int | None
) -> bool:
    """Add to ``found``, what came after ``prompt`` so far, what comes on ``path`` and at its end; whether there is more to come."""
    at = len(prompt) + len(found)
    for draft, token in zip((*path[at:], None), following[at - 1 :], strict=True):
        if len(found) == count or token == end:
            return False
        found.append(token)
        if token != draft:
            return len(found) < count
    return False
