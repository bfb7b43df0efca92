"""Context managers that put a bank to work on a model; nothing stays attached after them, exceptions included.

:class:`Intervention` is for an engine that knows its batches; :func:`attach` is for anybody with a model and a bank.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unbind_core.applying.bank import ModuleBank, Record, Selection
from unbind_core.applying.gate_memory import GateMemory, Places
from unbind_core.architecture import decoder_stack
from unbind_core.errors import UnbindError, UnsupportedArchitecture


@dataclass(frozen=True)
class _Step:
    """What one forward pass applies."""

    selection: Selection
    rows: Tensor | None
    phase: str
    real: Tensor | None
    places: Places | None
    counted: Tensor | None
    record: Record | None


class _LayerHook:
    """Forward hook of one decoder layer; returns None, and so leaves the layer alone, unless the step concerns it."""

    def __init__(self, owner: Intervention, layer: int) -> None:
        self._owner = owner
        self._layer = layer

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> Any:
        step = self._owner.current
        if step is None or self._layer not in step.selection.layers:
            return None
        states = output[0] if isinstance(output, tuple) else output
        if not isinstance(states, Tensor) or states.dim() not in (2, 3):
            raise UnsupportedArchitecture(
                f"{type(module).__name__} returns {type(states).__name__} where a tensor of states is needed; "
                "give override= the path of layers that return their hidden states"
            )
        edited = step.selection.edit(
            self._layer, states, step.rows, step.phase, step.real, step.places, step.counted, step.record
        )
        return (edited, *output[1:]) if isinstance(output, tuple) else edited


def _hooks_on(layers: Sequence[nn.Module]) -> int:
    return sum(isinstance(hook, _LayerHook) for layer in layers for hook in layer._forward_hooks.values())


# not kept by the intervention, which a copy of the model copies
_under_way: ContextVar[tuple[Intervention | None, _Step | None]] = ContextVar("step", default=(None, None))


class Intervention:
    """One forward hook on every decoder layer while the ``with`` block runs.

    Nothing is changed outside :meth:`step`, nor inside one at layers for which no row asks; a step is its own thread's, so
    that passes of several threads can run side by side. Raises
    UnsupportedArchitecture where the layers are not found, RuntimeError where the model already carries an
    intervention.
    """

    def __init__(self, model: nn.Module, override: str | None = None) -> None:
        """``override`` is the dotted path of the list of decoder layers where the search does not find it."""
        self.stack, self.layers = decoder_stack(model, override)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        """Attach."""
        if _hooks_on(self.layers):
            raise RuntimeError("an intervention is attached to this model already; leave its `with` block first")
        try:
            for index, layer in enumerate(self.layers):
                self._handles.append(layer.register_forward_hook(_LayerHook(self, index)))
            if _hooks_on(self.layers) != len(self.layers):
                raise RuntimeError(
                    "one layer object stands at several places of the model; such sharing cannot be hooked"
                )
        except BaseException:
            self._detach()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Detach, and make sure of it."""
        self._detach()
        if _hooks_on(self.layers):
            raise RuntimeError("a hook of the intervention is still attached to the model")

    @property
    def current(self) -> _Step | None:
        """What this thread's forward pass applies."""
        owner, step = _under_way.get()
        return step if owner is self else None

    @contextmanager
    def step(
        self,
        selection: Selection | None,
        *,
        rows: Tensor | None = None,
        phase: str = "prefill",
        real: Tensor | None = None,
        places: Places | None = None,
        counted: Tensor | None = None,
        record: Record | None = None,
    ) -> Iterator[None]:
        """Apply a selection to the forward pass inside; None leaves the model alone. Arguments as
        :meth:`Selection.edit`.

        Raises RuntimeError inside another step or outside the ``with`` block of the intervention.
        """
        if self.current is not None:
            raise RuntimeError("a step is under way on this model; one forward pass has one selection")
        if not self._handles:
            raise RuntimeError(
                "the intervention is not attached; use it as `with Intervention(model) as intervention:`"
            )
        step = None if selection is None else _Step(selection, rows, phase, real, places, counted, record)
        token = _under_way.set((self, step))
        try:
            yield
        finally:
            _under_way.reset(token)

    def _detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()


_INPUTS = ("input_ids", "inputs_embeds")
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


def _real_positions(mask: Any, batch: int, length: int, past: Any) -> Tensor | None:
    """bool [B, past and new positions] from a two-dimensional attention mask; None where there is none.

    With a cache of fixed size ``generate`` passes the finished mask [B or 1,1,length,size] instead, by layer type where the
    model mixes them: what the newest position sees of it is real. Raises UnsupportedArchitecture where that is cut by a window.
    """
    if (
        mask is not None
        and getattr(past, "is_compileable", False)
        and not (isinstance(mask, Tensor) and mask.dim() == 2)
    ):
        whole = mask.get("full_attention") if isinstance(mask, Mapping) else mask
        if whole is None and mask.get("sliding_attention") is None:
            return None
        if not isinstance(whole, Tensor) or whole.dim() != 4:
            raise UnsupportedArchitecture(
                f"{type(past).__name__}: its mask does not tell which positions are padding; generate without "
                "cache_implementation"
            )
        seen = whole[:, 0, -1, : int(past.get_seq_length()) + length].expand(batch, -1)
        return seen if seen.dtype == torch.bool else seen == 0
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < length:
        return None
    return mask.bool()


class _Sequences:
    """The memories of gates inside one block: a pass without past begins a new one, its cache of keys and values carries it on."""

    _serial = itertools.count()

    def __init__(self) -> None:
        self._block = next(self._serial)  # columns of another block's bank mean something else
        self._latest: GateMemory | None = None

    def places(self, batch: int, length: int, past: Any, real: Tensor | None, device: torch.device) -> Places:
        """Where the rows of this pass stand; ``real`` bool [B, past and new positions] is false at padding."""
        before = int(past.get_seq_length()) if past is not None else 0
        block, memory = getattr(past, _MEMORY, (None, None))
        if block != self._block or memory is None or not before or memory.slots != batch:
            memory = GateMemory(batch, before + length, device)
        memory.lengthen(before + length)
        if real is None:
            positions = (before + torch.arange(length, device=device)).expand(batch, length)
        else:
            counted = real.cumsum(1)[:, -length:] - 1
            positions = torch.where(real[:, -length:], counted, memory.length)
        starts = positions.min(1).values.clamp(max=memory.length - 1)
        self._latest = memory
        return Places(memory, torch.arange(batch, device=device), positions, starts)

    def keep(self, past: Any, output: Any) -> None:
        """Leave the pass's memory with the cache that was given or made, where the next pass will look for it."""
        if past is None:
            parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
            past = next((part for part in parts if hasattr(part, "get_seq_length")), None)
        if past is None or self._latest is None:
            return
        setattr(past, _MEMORY, (self._block, self._latest))
        if _MEMORY not in vars(past.__class__):
            past.__class__ = _remembering(past.__class__)


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
    row into beams or several sequences keeps each row's modules. Padding that a two-dimensional ``attention_mask``
    marks is not counted. Raises UnknownModule, UnsupportedArchitecture, and UnbindError where rows and batch do not go
    together.
    """
    selection = bank.select(_as_rows(bank, modules))
    with Intervention(model, override) as intervention:
        signature = inspect.signature(intervention.stack.forward)
        under_way: list[Any] = []
        sequences = _Sequences()

        def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = signature.bind_partial(*args, **kwargs).arguments
            given = next((arguments[key] for key in _INPUTS if isinstance(arguments.get(key), Tensor)), None)
            if given is None:  # going on would leave the modules out unnoticed
                raise UnsupportedArchitecture(
                    f"{type(intervention.stack).__name__} is called without {_INPUTS[0]}; use Intervention.step"
                )
            if selection is None:
                return
            batch, length = given.shape[0], given.shape[1]
            rows = None
            if selection.rows not in (1, batch):
                if batch % selection.rows:
                    raise UnbindError(
                        f"modules: {selection.rows} rows given for a batch of {batch}; give one per batch row"
                    )
                rows = torch.arange(batch, device=given.device) // (batch // selection.rows)
            past = arguments.get("past_key_values")
            decoding = length == 1 and past is not None and past.get_seq_length() > 0
            real = _real_positions(arguments.get("attention_mask"), batch, length, past)
            new = None if decoding or real is None else real[:, -length:]
            places = sequences.places(batch, length, past, real, given.device) if selection.remembers else None
            phase = "decode" if decoding else "prefill"
            step = intervention.step(selection, rows=rows, phase=phase, real=new, places=places)
            step.__enter__()
            under_way.append(step)

        def end(_module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if under_way and selection is not None and selection.remembers:
                sequences.keep(signature.bind_partial(*args, **kwargs).arguments.get("past_key_values"), output)
            while under_way:
                under_way.pop().__exit__(None, None, None)

        handles = [
            intervention.stack.register_forward_pre_hook(begin, with_kwargs=True),
            intervention.stack.register_forward_hook(end, with_kwargs=True, always_call=True),
        ]
        try:
            yield intervention
        finally:
            for handle in handles:
                handle.remove()
            end(model, (), {}, None)
