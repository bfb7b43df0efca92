"""The loop of every system that changes weights: AdamW on M_full's own adapter, a constant rate, batches from seeded streams.

As Appendix C.1 has it: rank and scaling are the adapter's, weight decay 0.01, passes in bfloat16, trainable numbers in FP32.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from unbind_core.encoding import encode, pad_id
from unbind_core.progress import ProgressCallback, counted
from unbind_core.rows import ForgetRow, RetainRow
from unbind_core.windows import Window, forget_windows, make_batch, retain_windows
from unbind_lab.trained.step import Step

ANSWER = "# Code removed by request."  # y+ of DPO and FLAT (Appendix C.2)
Weights = dict[str, Tensor]


def adapter_weights(model: nn.Module) -> list[str]:
    """What nearly all systems train: the names of the adapter's tensors."""
    return [name for name, _ in model.named_parameters() if "lora_" in name]


def started_from(model: nn.Module, weights: Weights) -> nn.Module:
    """The model with these tensors in place of its own."""
    own = dict(model.named_parameters())
    for name, tensor in weights.items():
        own[name].data.copy_(tensor)
    return model


def as_trained(_before: Weights, after: Weights, _options: Mapping[str, float]) -> Weights:
    """What nearly all systems serve."""
    return after


@dataclass(frozen=True)
class Configuration:
    """A learning rate, a number of updates, and the system's own numbers."""

    learning_rate: float
    updates: int
    options: Mapping[str, float] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """As files hold it."""
        return {"learning_rate": self.learning_rate, "updates": self.updates, **self.options}


@dataclass(frozen=True)
class Trained:
    """A system that changes weights. ``paper``: what the paper ran on CodeSearchNet (table 6), where it is not said otherwise.

    ``answers``: its loss needs the fixed answer; ``retains``: it needs retain rows, the first ``pool`` in seeded order (None: all),
    and of each the first ``retain_tokens`` (None: all). ``weights`` names what is trained; ``finish`` makes what
    is served of the tensors before and after.
    """

    name: str
    loss: Callable[[Step], Tensor]
    paper: Configuration
    answers: bool = False
    retains: bool = False
    pool: int | None = None
    retain_tokens: int | None = None
    weight_decay: float = 0.01
    weights: Callable[[nn.Module], list[str]] = adapter_weights
    finish: Callable[[Weights, Weights, Mapping[str, float]], Weights] = as_trained


@dataclass(frozen=True)
class Rows:
    """What a system is trained on."""

    forget: Sequence[ForgetRow]
    retain: Sequence[RetainRow]


def train(
    system: Trained,
    configuration: Configuration,
    model: nn.Module,
    reference: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    *,
    rows_an_update: int,
    seed: int,
    lengths: Sequence[int] = (),
    progress: ProgressCallback,
) -> dict[int, Weights]:
    """Number of updates -> the tensors that are served after so many: of ``configuration.updates`` and each of ``lengths`` below.

    The rate is constant, so a shorter run is the beginning of a longer one. The same arguments give the same tensors on the
    same machine. ``model`` is trained in place; ``reference`` is M_full and stays as it is.
    """
    names = set(system.weights(model))
    parameters = {name: p for name, p in model.named_parameters() if name in names}
    model.requires_grad_(False)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    masters = [p if p.dtype is torch.float32 else p.detach().float() for p in parameters.values()]
    optimizer = torch.optim.AdamW(masters, lr=configuration.learning_rate, weight_decay=system.weight_decay)
    steps = _steps(system, configuration, model, reference, tokenizer, rows, rows_an_update, seed)
    wanted = {length for length in lengths if length < configuration.updates} | {configuration.updates}
    found: dict[int, Weights] = {}
    model.eval()  # the adapters have no dropout, and nothing else differs
    stage = f"{system.name}, rate {configuration.learning_rate:g}"
    for done in counted(range(1, configuration.updates + 1), configuration.updates, stage, progress):
        model.zero_grad(set_to_none=True)
        system.loss(next(steps)).backward()
        _step(optimizer, list(parameters.values()), masters)
        if done in wanted:
            after = {name: p.detach().clone() for name, p in parameters.items()}
            found[done] = system.finish(before, after, configuration.options)
    return found


def _step(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], masters: Sequence[Tensor]) -> None:
    """One update, by numbers in FP32: what it adds to a weight in bfloat16 is often less than half of what that can tell apart."""
    apart = [(p, master) for p, master in zip(parameters, masters, strict=True) if p is not master]
    for parameter, master in apart:
        master.grad = None if parameter.grad is None else parameter.grad.float()
    optimizer.step()
    for parameter, master in apart:
        parameter.data.copy_(master)


def _steps(
    system: Trained,
    configuration: Configuration,
    model: nn.Module,
    reference: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    size: int,
    seed: int,
) -> Iterator[Step]:
    pad, device = pad_id(tokenizer), next(model.parameters()).device
    forget = [*first_windows(forget_windows(tokenizer, rows.forget, range(len(rows.forget)))).values()]
    answer = encode(tokenizer, ANSWER)
    chosen = [Window((*w.ids[: w.first_target], *answer), w.first_target, w.row) for w in forget]
    order = (
        random.Random(seed).sample(range(len(rows.retain)), len(rows.retain))[: system.pool] if system.retains else []
    )
    of_retain = first_windows(retain_windows(tokenizer, rows.retain, order)).values()
    retain = [_shortened(window, system.retain_tokens) for window in of_retain]
    forget_stream, retain_stream = _stream(len(forget), size, seed), _stream(len(retain), size, seed + 1)
    while True:
        at = _by_length(forget, next(forget_stream))
        yield Step(
            model,
            reference,
            configuration.options,
            make_batch([forget[i] for i in at], pad, device),
            make_batch([chosen[i] for i in at], pad, device) if system.answers else None,
            make_batch([retain[i] for i in _by_length(retain, next(retain_stream))], pad, device)
            if system.retains
            else None,
        )


def first_windows(windows: Sequence[Window]) -> dict[int, Window]:
    """Index of a row -> the first of its windows that scores a token: an input has at most 2,048, as the paper's, and begins where
    its row does. A row of one token without BOS scores none, and has no window.
    """
    found: dict[int, Window] = {}
    for window in windows:
        found.setdefault(window.row, window)
    return found


def _by_length(windows: Sequence[Window], some: Sequence[int]) -> list[int]:
    """In the order in which a pass has the least padding; no loss depends on the order of the rows."""
    return sorted(some, key=lambda i: len(windows[i].ids))


def _shortened(window: Window, most: int | None) -> Window:
    return window if most is None else Window(window.ids[: window.first_target + most], window.first_target, window.row)


def _stream(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Groups of ``size`` of so many items, each pass over them in another seeded order; the last of a pass may be smaller."""
    rng = random.Random(seed)
    while True:
        order = rng.sample(range(count), count)
        yield from (order[i : i + size] for i in range(0, count, size))
