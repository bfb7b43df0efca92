"""Rows -> token windows with target positions, in plain and in fill-in-the-middle order; windows -> padded batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from unbind_core.architecture import decoder_stack, unwrap
from unbind_core.encoding import (
    beginning,
    encode,
    encode_behind,
    encode_prompt,
    fim_ids,
    fim_prompt,
    fim_template,
)
from unbind_core.errors import DataError
from unbind_core.rows import ForgetRow, RetainRow

MAX_WINDOW = 2048  # tokens


def trained_positions(model: nn.Module) -> int | None:
    """Positions that a model was trained for; None where it does not say."""
    config = unwrap(model).config.get_text_config()  # type: ignore[union-attr, operator]
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)  # MPT's name


def _fixed_positions(model: nn.Module) -> int | None:
    """How many positions a model can have: those of a table, learned (GPT-2, GPT-BigCode, OPT) or computed beforehand (GPT-J,
    CodeGen, MPT). None where each is computed when it comes, as rotary ones mostly are.
    """
    inner, count = unwrap(model), trained_positions(model)
    if not count:
        return None
    stack, layers = decoder_stack(model)
    words = inner.get_input_embeddings()  # type: ignore[operator]
    tables = (part for part in stack.children() if isinstance(part, nn.Embedding) and part is not words)
    # OPT's table has two rows more than positions.
    if any(0 <= table.num_embeddings - count <= 2 for table in tables):
        return count
    beforehand = any(part.dim() == 2 and len(part) == count for part in layers[0].buffers())
    return count if beforehand or unwrap(model).config.model_type == "mpt" else None  # type: ignore[union-attr]


def window_limit(model: nn.Module, most: int = MAX_WINDOW) -> int:
    """Tokens of the longest window: ``most``, or the model's positions where those are of a table and fewer."""
    return min(most, _fixed_positions(model) or most)


def with_room(model: nn.Module, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The prompts, of which the last tokens are left that have room for new ones, where the model has a table of positions.

    Raises DataError where there are no more positions than new tokens.
    """
    positions = _fixed_positions(model)
    if positions is None:
        return [list(prompt) for prompt in prompts]
    if positions <= new_tokens:
        raise DataError(
            f"model: it has {positions} positions, and {new_tokens} new tokens are asked for; take a model with more positions"
        )
    return [list(prompt[-(positions - new_tokens) :]) for prompt in prompts]


@dataclass(frozen=True)
class Window:
    """Token ids of one unpadded window; the targets are positions ``first_target`` .. ``len(ids) - 1``.

    The state at position ``t`` predicts token ``t + 1``, so predictor positions are the targets less one. What is in front
    of ``start`` is not of the row.
    """

    ids: tuple[int, ...]
    first_target: int
    row: int
    form: str = "plain"
    start: int = 0

    @property
    def target_count(self) -> int:
        """How many next-token predictions the window scores."""
        return len(self.ids) - self.first_target


def fim_split(row: ForgetRow) -> tuple[str, str, str]:
    """Prefix, suffix and middle of a forget row: the editor has the prompt and the last fifth of the continuation.

    The suffix starts at the first line start at or after 80 % of the continuation; without one it is empty.
    """
    text = row.continuation
    line_end = text.find("\n", round(len(text) * 0.8))
    if line_end == -1 or not text[line_end + 1 :].strip():
        earlier = text.rstrip("\n").rfind("\n")
        line_end = earlier if earlier > len(text) // 2 else -1
    middle, suffix = (text, "") if line_end == -1 else (text[: line_end + 1], text[line_end + 1 :])
    return row.prompt, suffix, middle


def _retain_fim_split(text: str, seed: int) -> tuple[str, str, str]:
    """Prefix, suffix and middle of a retain row, cut at two line starts drawn from the text and the seed alone."""
    rng = random.Random(hashlib.sha256(f"{seed}:{text}".encode()).digest())
    starts = [0] + [i + 1 for i, c in enumerate(text) if c == "\n" and i + 1 < len(text)]
    first, second = sorted((rng.choice(starts), rng.choice([*starts, len(text)])))
    return text[:first], text[second:], text[first:second]


def forget_prompt(tokenizer: PreTrainedTokenizerBase, row: ForgetRow, form: str) -> tuple[list[int], list[int]]:
    """Prompt ids and the ids the model must not give back, in one form; what evaluation and fitting share."""
    if form == "plain":
        return encode_prompt(tokenizer, row.prompt), encode_behind(tokenizer, row.continuation)
    prefix, suffix, middle = fim_split(row)
    prompt = fim_prompt(tokenizer, prefix, suffix)
    if prompt is None:
        raise DataError("forms: the tokenizer has no fill-in-the-middle tokens; use forms plain")
    return prompt, encode_behind(tokenizer, middle)


def _plain_windows(bos: list[int], ids: list[int], first: int, row: int, limit: int) -> Iterator[Window]:
    """Non-overlapping windows of at most ``limit`` tokens with BOS; ``first`` is the index in ``ids`` of the first target."""
    step = limit - len(bos)
    for start in range(0, len(ids), step):
        part = ids[start : start + step]
        target = len(bos) + max(first - start, 0)
        target = max(target, 1)  # position 0 has no state before it
        if target < len(bos) + len(part):
            yield Window(tuple(bos + part), target, row)


def forget_windows(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[ForgetRow],
    indices: Sequence[int],
    forms: Sequence[str] = ("plain",),
    limit: int = MAX_WINDOW,
) -> list[Window]:
    """Windows of the given rows; only continuation (or middle) tokens are targets (Appendix B.1).

    A fill-in-the-middle window that would be longer than ``limit`` loses the start of its prompt.
    """
    windows: list[Window] = []
    for index in indices:
        for form in forms:
            prompt, target = forget_prompt(tokenizer, rows[index], form)
            if not target or not prompt:
                raise DataError(f"forget row {index}: prompt and continuation must both have at least one token")
            if form == "plain":
                bos = beginning(tokenizer)
                ids = prompt[len(bos) :] + target
                windows += _plain_windows(bos, ids, len(prompt) - len(bos), index, limit)
            else:
                target = target[: limit // 2]
                prompt = prompt[-(limit - len(target)) :]
                windows.append(Window(tuple(prompt + target), len(prompt), index, form))
    return windows


def retain_windows(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[RetainRow],
    indices: Sequence[int],
    forms: Sequence[str] = ("plain",),
    limit: int = MAX_WINDOW,
    seed: int = 0,
) -> list[Window]:
    """Windows of the given retain rows; every token but the first is a target (Appendix B.1)."""
    template = fim_template(tokenizer)
    windows: list[Window] = []
    for index in indices:
        text = rows[index].text
        for form in forms:
            if form == "plain":
                windows += _plain_windows(beginning(tokenizer), encode(tokenizer, text), 0, index, limit)
            elif template is not None:
                prefix, *others = _retain_fim_split(text, seed)
                suffix, middle = (encode_behind(tokenizer, part) for part in others)
                ids = fim_ids(tokenizer, template, encode(tokenizer, prefix), suffix) + middle
                if 2 <= len(ids) <= limit:  # a longer one would have to be torn; its plain windows are all there
                    windows.append(Window(tuple(ids), 1, index, form))
    return windows


def perplexity_windows(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[RetainRow], limit: int = MAX_WINDOW
) -> list[Window]:
    """What R-PPL is taken of: of each row BOS, or the end token where none is defined, and at most 2,047 tokens, of which every one
    is a target (Appendix A.3). What is longer is cut off; a row without a token is left out.
    """
    first = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    windows = []
    for index, row in enumerate(rows):
        ids = [*first, *encode(tokenizer, row.text)][:limit]
        if len(ids) > 1:
            windows.append(Window(tuple(ids), 1, index))
    return windows


@dataclass(frozen=True)
class Batch:
    """Right-padded windows. ``ids`` int64 [B,T]; ``predictors`` bool [B,T], true where the state predicts a target."""

    windows: tuple[Window, ...]
    ids: Tensor
    attention_mask: Tensor
    predictors: Tensor

    def next_tokens(self) -> Tensor:
        """int64 [N]: the target of every predictor position, in the order of ``predictors.nonzero()``."""
        return self.ids[:, 1:][self.predictors[:, :-1]]

    def window_index(self) -> Tensor:
        """int64 [N]: which window of the batch each prediction belongs to."""
        return self.predictors.nonzero()[:, 0]


def make_batch(windows: Sequence[Window], pad: int, device: torch.device | str = "cpu") -> Batch:
    """Pad windows on the right: with causal attention no real position can see a padded one."""
    length = max(len(window.ids) for window in windows)
    ids = torch.full((len(windows), length), pad, dtype=torch.int64)
    mask = torch.zeros((len(windows), length), dtype=torch.int64)
    predictors = torch.zeros((len(windows), length), dtype=torch.bool)
    for i, window in enumerate(windows):
        ids[i, : len(window.ids)] = torch.tensor(window.ids)
        mask[i, : len(window.ids)] = 1
        predictors[i, window.first_target - 1 : len(window.ids) - 1] = True
    return Batch(tuple(windows), ids.to(device), mask.to(device), predictors.to(device))


def batches(
    windows: Sequence[Window], pad: int, *, tokens: int = 4096, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Batches of similar length, longest first, each of at most ``tokens`` padded tokens (and at least one window)."""
    waiting: list[Window] = []
    for window in sorted(windows, key=lambda w: -len(w.ids)):
        if waiting and (len(waiting) + 1) * len(waiting[0].ids) > tokens:
            yield make_batch(waiting, pad, device)
            waiting = []
        waiting.append(window)
    if waiting:
        yield make_batch(waiting, pad, device)
