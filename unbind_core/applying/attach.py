"""Modules on every forward pass of a model, ``generate`` with beams and sampling included: for anybody with a model and a bank."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from unbind_core.applying.bank import ModuleBank
from unbind_core.applying.gate_memory import GateMemory, SlotPlaces
from unbind_core.applying.hooks import Intervention
from unbind_core.applying.masks import real_positions
from unbind_core.applying.passes import Pass
from unbind_core.architecture import unwrap
from unbind_core.errors import UnbindError, UnsupportedArchitecture

_INPUTS = ("input_ids", "inputs_embeds")
_STATES = ("cache_params", "state", "past_buckets_states")  # of Mamba, RWKV, Reformer: in place of past_key_values
Modules = Sequence[str] | Mapping[str, float] | Sequence[Mapping[str, float]]


def _as_rows(bank: ModuleBank, modules: Modules | None) -> list[Mapping[str, float]]:
    if modules is None:
        return [dict.fromkeys(bank.names, 1.0)]
    if isinstance(modules, Mapping):
        return [modules]
    if isinstance(modules, str):
        raise UnbindError(f"modules: give a list of names, ['{modules}']")
    rows = [row for row in modules if isinstance(row, Mapping)]
    if rows and len(rows) == len(modules):
        return list(rows)
    return [dict.fromkeys([str(name) for name in modules], 1.0)]


def _require_shape(bank: ModuleBank, rows: Sequence[Mapping[str, float]], model: nn.Module, layers: int) -> None:
    """Raise ModelMismatch where a module is of a model of another size: none of its layers might ever be edited, unnoticed."""
    config: Any = getattr(unwrap(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in sorted({name for row in rows for name in row}):
        bank[name].require_shape(getattr(text, "hidden_size", None), layers)


def _computed_again(layer: nn.Module) -> bool:
    """Whether a backward pass computes the layer a second time: gradients would be those of a model without modules."""
    return layer.training and bool(getattr(layer, "gradient_checkpointing", False))


def _packed(arguments: Mapping[str, Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a row holds several texts, which the library keeps apart by their lengths, or where positions begin anew."""
    if kwargs.get("cu_seq_lens_q") is not None:
        return True
    positions = arguments.get("position_ids")
    if arguments.get("attention_mask") is not None or not isinstance(positions, Tensor) or positions.dim() != 2:
        return False
    return bool((positions.diff() != 1).any())


class _Sequences:
    """The memories of gates inside one block: a pass without past begins a new one, its cache of keys and values carries it on."""

    _serial = itertools.count()

    def __init__(self) -> None:
        self._block = next(self._serial)  # columns of another block's bank mean something else

    def places(
        self, batch: int, length: int, past: Any, real: Tensor | None, device: torch.device
    ) -> tuple[GateMemory, SlotPlaces]:
        """The memory that this pass writes, and where its rows stand there; ``real`` bool [B, past and new positions] is false
        at padding. Raises UnbindError where the gates do not know what is in the cache: a gate that began in the middle of a
        protected row would stay shut.
        """
        before = int(past.get_seq_length()) if past is not None else 0
        block, memory = getattr(past, _MEMORY, (None, None))
        if not before:
            memory = GateMemory(batch, length, device)
        elif block != self._block or memory is None:
            raise UnbindError(
                f"past_key_values: the cache holds {before} positions that were not computed in this attach block, and its "
                "gates go by what they saw of a text before; keep a cache within one block, or compute the prompt again in this one"
            )
        elif memory.slots != batch:
            raise UnbindError(
                f"past_key_values: the gates saw {memory.slots} rows in this cache, and the batch has {batch}; change its rows "
                "with its own batch_select_indices, batch_repeat_interleave or reorder_cache, or compute the prompt again"
            )
        memory.lengthen(before + length)
        if real is None:
            positions = (before + torch.arange(length, device=device)).expand(batch, length)
        else:
            counted = real.cumsum(1)[:, -length:] - 1
            positions = torch.where(real[:, -length:], counted, memory.length)
        starts = positions.min(1).values.clamp(max=memory.length - 1)
        return memory, SlotPlaces(memory, torch.arange(batch, device=device), positions, starts)

    def keep(self, memory: GateMemory, past: Any, output: Any) -> None:
        """Leave a pass's memory with the cache that was given or made, where the next pass will look for it."""
        if past is None:
            parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
            past = next((part for part in parts if hasattr(part, "get_seq_length")), None)
        if past is None:
            return
        setattr(past, _MEMORY, (self._block, memory))
        if _MEMORY not in vars(past.__class__):
            past.__class__ = _remembering(past.__class__)


class _UnderWay(threading.local):
    """The pass that the calling thread is in: its step, and the memory that its gates write."""

    step: AbstractContextManager[None] | None = None
    memory: GateMemory | None = None


_MEMORY = "_unbind_memory"


@cache
def _remembering(kind: Any) -> Any:
    """The same class of cache, but the memory of gates goes along where beam search and its like move the rows.

    A class, as a copy of such a cache must move its own rows.
    """

    def moved(self: Any, rows: Tensor) -> None:
        getattr(self, _MEMORY)[1].reorder(rows)

    def reorder_cache(self: Any, beam_idx: Tensor) -> None:
        kind.reorder_cache(self, beam_idx)
        moved(self, beam_idx)

    def batch_select_indices(self: Any, indices: Tensor) -> None:
        kind.batch_select_indices(self, indices)
        moved(self, indices)

    def batch_repeat_interleave(self: Any, repeats: int) -> None:
        kind.batch_repeat_interleave(self, repeats)
        moved(self, torch.arange(getattr(self, _MEMORY)[1].slots).repeat_interleave(repeats))

    methods = (reorder_cache, batch_select_indices, batch_repeat_interleave)
    return type(kind.__name__, (kind,), {_MEMORY: (None, None)} | {method.__name__: method for method in methods})


@contextmanager
def attach(
    model: nn.Module, bank: ModuleBank, modules: Modules | None = None, override: str | None = None
) -> Iterator[Intervention]:
    """Apply modules to every forward pass inside, ``generate`` with beams and sampling included.

        with attach(model, bank):
            model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)

    ``modules``: None for every module of the bank on every row; names; name -> strength; or a list with one such
    mapping per batch row (an empty one leaves its row alone). They are pinned on entry. A generation that expands each
    row into beams or several sequences keeps each row's modules. Padding that the ``attention_mask`` marks is not
    counted. Several threads may run passes inside one block, which is left when all have ended. Raises
    UnknownModule, UnsupportedArchitecture, ModelMismatch where the model has another width or number of layers than that of
    the modules, and UnbindError where rows and batch do not go together, where the model carries an intervention already or is
    a copy that was made in a block, where a gate with a memory meets a cache that was filled outside the block, or where it
    trains with gradient checkpointing. A layer that runs outside a pass of the model raises UnbindError, as does, where gates
    have a memory, a pass with several texts packed in one row or a mask that hides anything else than padding.
    """
    asked = _as_rows(bank, modules)
    selection = bank.select(asked)
    with Intervention(model, override) as intervention:
        _require_shape(bank, asked, model, len(intervention.layers))
        intervention.always = selection is not None
        signature = inspect.signature(intervention.stack.forward)
        under_way = _UnderWay()
        sequences = _Sequences()

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is not intervention.stack:  # its layers carry copies of the hooks, which no step reaches
                raise UnbindError(
                    "this copy of a model was made in an attach block, and modules do not apply to it; copy the model outside"
                )
            arguments = signature.bind_partial(*args, **kwargs).arguments
            tokens = next((arguments[key] for key in _INPUTS if isinstance(arguments.get(key), Tensor)), None)
            if tokens is None:  # going on would leave the modules out unnoticed
                raise UnsupportedArchitecture(
                    f"{type(intervention.stack).__name__} is called without {_INPUTS[0]}; use Intervention.step"
                )
            if selection is None:
                return
            if torch.is_grad_enabled() and any(_computed_again(layer) for layer in intervention.layers):
                raise UnbindError(
                    "gradient checkpointing computes layers again behind the pass, without their modules; call "
                    "model.gradient_checkpointing_disable() first, or model.eval() where nothing is trained"
                )
            batch, length = tokens.shape[0], tokens.shape[1]
            rows = None
            if selection.rows not in (1, batch):
                if batch % selection.rows:
                    raise UnbindError(
                        f"modules: {selection.rows} rows given for a batch of {batch}; give one per batch row"
                    )
                rows = torch.arange(batch, device=tokens.device) // (batch // selection.rows)
            state = next((key for key in _STATES if arguments.get(key) is not None), None)
            if selection.remembers and state is not None:
                raise UnsupportedArchitecture(
                    f"{type(intervention.stack).__name__}: {state} does not tell how many positions it holds, which gates go by "
                    "that remember them; generate with use_cache=False"
                )
            if selection.remembers and _packed(arguments, kwargs):
                raise UnsupportedArchitecture(
                    f"{type(intervention.stack).__name__}: several texts stand packed in one row (generate_batch, or a "
                    "collator that flattens), and gates would take them for one; give each text a row of its own, as generate does"
                )
            past = arguments.get("past_key_values")
            decoding = length == 1 and past is not None and past.get_seq_length() > 0
            real = real_positions(arguments.get("attention_mask"), batch, length, past, needed=selection.remembers)
            new = None if decoding or real is None else real[:, -length:]
            memory, places = None, None
            if selection.remembers:
                memory, places = sequences.places(batch, length, past, real, tokens.device)
            phase = "decode" if decoding else "prefill"
            step = intervention.step(selection, Pass(rows, places, phase, new))
            step.__enter__()
            under_way.step, under_way.memory = step, memory

        def leave() -> None:
            step, under_way.step, under_way.memory = under_way.step, None, None
            if step is not None:
                step.__exit__(None, None, None)

        def end(_module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if under_way.memory is not None and output is not None:  # None where the pass failed
                past = signature.bind_partial(*args, **kwargs).arguments.get("past_key_values")
                sequences.keep(under_way.memory, past, output)
            leave()

        handles = [
            intervention.stack.register_forward_pre_hook(begin, with_kwargs=True),
            intervention.stack.register_forward_hook(end, with_kwargs=True, always_call=True),
        ]
        try:
            yield intervention
        finally:
            for handle in handles:
                handle.remove()
            leave()
