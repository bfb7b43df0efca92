"""What a fit needs of the retain rows alone: computed once per model and retain set, kept on disk, reused by every takedown."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from unbind_core.architecture import unwrap
from unbind_core.evaluation.replay import BLEU_NEW_TOKENS, Replay, RetainCompletions
from unbind_core.files import write_whole
from unbind_core.fitting.moments import Moments, load_moments, save_moments
from unbind_core.progress import Progress, ProgressCallback, counted, silent
from unbind_core.rows import RetainRow
from unbind_core.running.capture import capture_states
from unbind_core.running.device import bfloat16_is_fast
from unbind_core.running.generation import Sampling, complete
from unbind_core.windows import MAX_WINDOW, Window, batches, encode_prompt, pad_id

STATE_FILES = 8


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def retain_moments(
    model: nn.Module,
    windows: Sequence[Window],
    layers: Sequence[int],
    *,
    pad: int,
    cache: Path | None = None,
    fingerprint: str = "",
    progress: ProgressCallback = silent,
) -> dict[int, Moments]:
    """Moments of the retain states of every layer by one forward pass a window; kept in ``cache`` if given.

    The key is the model's fingerprint, its dtype, the windows (which hold the retain set and the window policy), the layers.
    """
    parameter = next(model.parameters())
    file = (
        cache
        and cache
        / f"moments-{_key(fingerprint, parameter.dtype, [(w.ids, w.first_target) for w in windows], layers)}.safetensors"
    )
    if file:
        known = load_moments(file, list(layers), parameter.device)
        if known is not None:
            return known
    found: dict[int, Moments] = {}
    every = list(batches(windows, pad, device=parameter.device))
    for batch in counted(every, len(every), "retain states", progress):
        for layer, states in capture_states(model, batch, layers).items():
            found.setdefault(layer, Moments(states.shape[-1], parameter.device)).add(states[batch.predictors])
    if file:
        save_moments(file, found)
    return found


def retain_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[RetainRow], indices: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and references for R-BLEU: the latest boundary with a full target of min(128, n - 32) and 32 prefix tokens.

    Rows of 32 tokens or fewer are left out; prompts keep their last 2,048 less target tokens.
    """
    prompts, references = [], []
    for index in indices:
        ids = encode_prompt(tokenizer, rows[index].text)
        target = min(BLEU_NEW_TOKENS, len(ids) - 32)
        if target > 0:
            prompts.append(ids[:-target][-(MAX_WINDOW - target) :])
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
    prompts, references = retain_prompts(tokenizer, rows, indices)
    outputs = unedited_completions(model, tokenizer, prompts, cache=cache, fingerprint=fingerprint, progress=progress)
    key = _key(fingerprint, next(model.parameters()).dtype, prompts, outputs, layers, "empty ones too")
    return RetainCompletions(
        model, prompts, references, outputs, layers, pad=pad_id(tokenizer), end=tokenizer.eos_token_id,
        cache=cache and cache / f"paths-{key}.safetensors",
    )  # fmt: skip


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
    file = cache and cache / f"completions-{_key(fingerprint, next(model.parameters()).dtype, prompts)}.json"
    outputs = _known(file) if file else None
    if outputs is None:
        outputs = complete(
            model, prompts, Sampling(BLEU_NEW_TOKENS), pad=pad_id(tokenizer), end=tokenizer.eos_token_id,
            stage="retain completions", progress=progress,
        )  # fmt: skip
        if file:
            write_whole(file, lambda temporary: temporary.write_text(json.dumps(outputs)))
    return outputs


def retain_replay(
    model: nn.Module,
    windows: Sequence[Window],
    layers: Sequence[int],
    *,
    pad: int,
    cache: Path | None,
    fingerprint: str,
    stage: str = "calibration states",
    progress: ProgressCallback = silent,
) -> Replay:
    """Windows of retain rows with their states at some layers, from ``cache`` where they are known."""
    dtype = next(model.parameters()).dtype
    key = _key(fingerprint, dtype, [(w.ids, w.first_target) for w in windows], layers)
    return Replay(
        model, windows, layers, pad=pad, cache=cache and cache / f"calibration-{key}.safetensors", stage=stage,
        progress=progress,
    )  # fmt: skip


def _known(file: Path) -> list[list[int]] | None:
    """What a cache file holds; None where there is none or it is damaged."""
    try:
        known: list[list[int]] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return known


def retain_states(
    model: nn.Module,
    windows: Sequence[Window],
    layers: Sequence[int],
    *,
    pad: int,
    limit_bytes: int,
    cache: Path | None = None,
    fingerprint: str = "",
    progress: ProgressCallback = silent,
) -> tuple[dict[int, Tensor], Tensor]:
    """A sample of retain states of every layer, bfloat16 [N,d] on the model's device, kept in ``cache`` if given, in files that
    are written one after another, so that work that is ended can be gone on with; and which row each is of, int64 [N].

    Every k-th predictor position of all windows, k the smallest for which the layers together stay within ``limit_bytes``.
    """
    parameter = next(model.parameters())
    size = sum(window.target_count for window in windows) * len(layers) * _width(model) * 2
    step = max(1, -(-size // limit_bytes))
    roughly = bfloat16_is_fast(parameter.device)  # they are kept in bfloat16 anyway
    key = _key(fingerprint, parameter.dtype, [(w.ids, w.first_target) for w in windows], layers, step, roughly)
    every = list(batches(windows, pad, device=parameter.device))
    rows = [torch.tensor([w.row for w in one.windows])[one.window_index().cpu()][::step] for one in every]
    shape = sum(map(len, rows)), _width(model)
    joined = {layer: torch.empty(shape, dtype=torch.bfloat16, device=parameter.device) for layer in layers}
    size, filled = max(1, -(-len(every) // STATE_FILES)), 0
    for first in range(0, len(every), size):
        file = cache and cache / f"states-{key}-{first}.safetensors"
        part = _known_states(file, layers, parameter.device) if file else None
        if part is None:
            found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
            for done, batch in enumerate(every[first : first + size], start=first + 1):
                for layer, states in capture_states(model, batch, layers, roughly=roughly).items():
                    found[layer].append(states[batch.predictors][::step].to(torch.bfloat16))
                progress(Progress("retain states", done, len(every)))
            part = {layer: torch.cat(states) for layer, states in found.items()}
            if file:
                _write_states(file, part)
        count = len(part[layers[0]])
        for layer, states in part.items():
            joined[layer][filled : filled + count] = states
        filled += count
    return joined, torch.cat(rows)


def _write_states(file: Path, part: dict[int, Tensor]) -> None:
    tensors = {str(layer): states.cpu() for layer, states in part.items()}
    write_whole(file, lambda temporary: save_file(tensors, temporary))


def _width(model: nn.Module) -> int:
    return int(unwrap(model).config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]


def _known_states(file: Path, layers: Sequence[int], device: torch.device) -> dict[int, Tensor] | None:
    """What a file of states holds; None where there is none or it is damaged."""
    try:
        with safe_open(file, framework="pt", device=str(device)) as opened:
            return {layer: opened.get_tensor(str(layer)) for layer in layers}
    except (OSError, SafetensorError):
        return None
