"""What one pass over all layers' gradients is worth beside one autograd call a target: how near it is, and how quick."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from server import demo
from unbind_core.architecture import LoadedModel, decoder_layers
from unbind_core.encoding import encode_prompt
from unbind_core.errors import UnbindError
from unbind_core.progress import Progress, ProgressCallback
from unbind_core.rows import parse_retain
from unbind_core.running.capture import capture, capture_per_target, relative_errors
from unbind_core.windows import Window, make_batch

ORACLE_LENGTH = 256  # tokens of a window


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _windows(loaded: LoadedModel, count: int) -> list[Window]:
    """``count`` windows of exactly ORACLE_LENGTH tokens, cut from the demo's retain rows laid end to end."""
    rows = parse_retain(demo.ROWS / "retain_train.jsonl")
    ids: list[int] = []
    windows: list[Window] = []
    for row in rows:
        ids += encode_prompt(loaded.tokenizer, row.text)
        if len(ids) >= ORACLE_LENGTH:
            windows.append(Window(tuple(ids[:ORACLE_LENGTH]), 1, len(windows)))
            ids = []
        if len(windows) == count:
            return windows
    raise UnbindError(f"the demo rows make only {len(windows)} windows of {ORACLE_LENGTH} tokens")


def fit_figures(
    loaded: LoadedModel, *, oracle_windows: int = 2, repeats: int = 7, progress: ProgressCallback
) -> dict[str, Any]:
    """Accuracy and cost of one-pass capture, all layers.

    ``max_relative_error``: worst layer and window, in the model's dtype; ``oracle_speedup``: time of one autograd call a
    target over time of one pass, medians; ``forward_equivalents``: one pass over a plain forward pass, interleaved.
    """
    model = loaded.model
    layers = list(range(len(decoder_layers(model))))
    device = next(model.parameters()).device
    windows = _windows(loaded, 8)
    capture(model, make_batch(windows[:1], 0, device), layers)  # warm up
    errors: list[float] = []
    speedups: list[float] = []
    for done, window in enumerate(windows[:oracle_windows], start=1):
        begun = time.perf_counter()
        reference = capture_per_target(model, window, layers)
        oracle = time.perf_counter() - begun
        batch = reference.batch
        one_pass = statistics.median(_seconds(partial(capture, model, batch, layers)) for _ in range(5))
        errors.append(max(relative_errors(capture(model, batch, layers), reference).values()))
        speedups.append(oracle / one_pass)
        progress(Progress("one autograd call a target", done, oracle_windows))
    batch = make_batch(windows, 0, device)

    @torch.no_grad()
    def forward() -> object:
        return model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False)

    forward()
    ratios = []
    for done in range(repeats):
        plain = _seconds(forward)
        ratios.append(_seconds(lambda: capture(model, batch, layers)) / plain)
        progress(Progress("one pass against a forward pass", done + 1, repeats))
    return {
        "max_relative_error": max(errors),
        "oracle_speedup": statistics.median(speedups),
        "forward_equivalents": statistics.median(ratios),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "layers": len(layers),
        "window_tokens": ORACLE_LENGTH,
    }
