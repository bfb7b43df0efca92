"""What a fit needs of the retain rows alone: computed once per model and retain set, kept on disk, reused by every takedown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from unbind_core.architecture import unwrap
from unbind_core.evaluation.completions import RetainCompletions, retain_completions
from unbind_core.evaluation.replay import Replay, cache_key, retain_replay
from unbind_core.files import write_whole
from unbind_core.fitting.context import Context
from unbind_core.fitting.moments import Moments, load_moments, save_moments
from unbind_core.progress import Progress, ProgressCallback, counted, silent
from unbind_core.running.capture import capture_states
from unbind_core.running.device import bfloat16_is_fast
from unbind_core.windows import Window, batches

STATE_FILES = 8


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
        / f"moments-{cache_key(fingerprint, parameter.dtype, [(w.ids, w.first_target) for w in windows], layers)}.safetensors"
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


def retain_states(
    model: nn.Module,
    windows: Sequence[Window],
    layer: int,
    *,
    pad: int,
    limit_bytes: int,
    cache: Path | None = None,
    fingerprint: str = "",
    progress: ProgressCallback = silent,
) -> tuple[Tensor, Tensor]:
    """A sample of retain states of a layer, bfloat16 [N,d] on the model's device, kept in ``cache`` if given, in files that
    are written one after another, so that work that is ended can be gone on with; and which row each is of, int64 [N].

    Every k-th predictor position of all windows, k the smallest for which they stay within ``limit_bytes``.
    """
    parameter = next(model.parameters())
    size = sum(window.target_count for window in windows) * _width(model) * 2
    step = max(1, -(-size // limit_bytes))
    roughly = bfloat16_is_fast(parameter.device)  # they are kept in bfloat16 anyway
    key = cache_key(fingerprint, parameter.dtype, [(w.ids, w.first_target) for w in windows], [layer], step, roughly)
    every = list(batches(windows, pad, device=parameter.device))
    rows = [torch.tensor([w.row for w in one.windows])[one.window_index().cpu()][::step] for one in every]
    joined = torch.empty((sum(map(len, rows)), _width(model)), dtype=torch.bfloat16, device=parameter.device)
    size, filled = max(1, -(-len(every) // STATE_FILES)), 0
    for first in range(0, len(every), size):
        file = cache and cache / f"states-{key}-{first}.safetensors"
        part = _known_states(file, layer, parameter.device) if file else None
        if part is None:
            found: list[Tensor] = []
            for done, batch in enumerate(every[first : first + size], start=first + 1):
                states = capture_states(model, batch, [layer], roughly=roughly)[layer]
                found.append(states[batch.predictors][::step].to(torch.bfloat16))
                progress(Progress("retain states", done, len(every)))
            part = torch.cat(found)
            if file:
                _write_states(file, layer, part)
        joined[filled : filled + len(part)] = part
        filled += len(part)
    return joined, torch.cat(rows)


def _write_states(file: Path, layer: int, part: Tensor) -> None:
    tensors = {str(layer): part.cpu()}
    write_whole(file, lambda temporary: save_file(tensors, temporary))


def _width(model: nn.Module) -> int:
    return int(unwrap(model).config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]


def _known_states(file: Path, layer: int, device: torch.device) -> Tensor | None:
    """What a file of states holds; None where there is none or it is damaged."""
    try:
        with safe_open(file, framework="pt", device=str(device)) as opened:
            return cast(Tensor, opened.get_tensor(str(layer)))
    except (OSError, SafetensorError):
        return None


@dataclass(frozen=True)
class Retained:
    """What ``gate="auto"`` needs of the retain rows alone: a sample of the states at the layer that is edited, bfloat16 [N,d], with
    the row that each is of, the calibration windows with theirs, and the unedited completions.
    """

    states: Tensor
    rows: Tensor
    calibration: Replay
    completions: RetainCompletions

    def without(self, rows: Sequence[int], completions: Sequence[int]) -> Retained:
        """The same without some retain rows, and without the completions at some places. Takes the states over: the last ones
        move to where those were that go, as copying a gigabyte to be rid of a few takes seconds.
        """
        stay = torch.isin(self.rows, torch.tensor(rows), invert=True)
        count = int(stay.sum())
        gone, moved = (~stay[:count]).nonzero()[:, 0], count + stay[count:].nonzero()[:, 0]
        for part in (self.states, self.rows):
            part[gone.to(part.device)] = part[moved.to(part.device)]
        return Retained(
            self.states[:count],
            self.rows[:count],
            self.calibration.without(rows),
            self.completions.without(completions),
        )


def retained(context: Context) -> Retained:
    """From the cache where it is known; nothing of it depends on the forget rows."""
    (layer,), fingerprint = context.layers, context.identity.fingerprint
    with context.clock.stage("retain states"):
        states, rows = retain_states(
            context.model,
            context.training_windows(context.parts.retain_fit),
            layer,
            pad=context.pad,
            limit_bytes=context.options.state_bytes,
            cache=context.cache,
            fingerprint=fingerprint,
            progress=context.progress,
        )
    return Retained(states, rows, *calibration(context))


def calibration(context: Context) -> tuple[Replay, RetainCompletions]:
    """What a module's cost is measured on: the calibration windows with their states, and the unedited completions."""
    (layer,), fingerprint = context.layers, context.identity.fingerprint
    with context.clock.stage("calibration states"):
        windows = context.retain_windows(context.parts.retain_calibration)
        replay = retain_replay(
            context.model,
            windows,
            [layer],
            pad=context.pad,
            cache=context.cache,
            fingerprint=fingerprint,
            progress=context.progress,
        )
    with context.clock.stage("retain completions"):
        completions = retain_completions(
            context.model,
            context.tokenizer,
            context.retain,
            context.parts.retain_calibration,
            [layer],
            context.cache,
            fingerprint,
            context.progress,
        )
    return replay, completions


def contradicting_paths(context: Context, completions: RetainCompletions) -> list[int]:
    """The places of the completions whose path holds a long span of a forget row."""
    paths = zip(completions.prompts, completions.references, strict=True)
    return [i for i, (prompt, reference) in enumerate(paths) if context.holds_protected([*prompt, *reference])]
