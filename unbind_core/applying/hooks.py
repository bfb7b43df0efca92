"""The hooks that put selections to work on a model, for an engine that knows its batches; ``attach.py`` is for anybody else.

Nothing stays attached after the ``with`` block, exceptions included.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unbind_core.applying.passes import WHOLE, Pass
from unbind_core.applying.selection import Selection
from unbind_core.architecture import decoder_stack
from unbind_core.errors import UnbindError, UnsupportedArchitecture
from unbind_core.running.compiled import begin_uncompiled, end_uncompiled


@dataclass(frozen=True)
class _Step:
    """What one forward pass applies."""

    selection: Selection
    pass_: Pass
    flat: bool


class _LayerHook:
    """Forward hook of one decoder layer; returns None, and so leaves the layer alone, unless the step concerns it."""

    def __init__(self, owner: Intervention, layer: int) -> None:
        self._owner = owner
        self._layer = layer

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> Any:
        step = self._owner.current
        if step is None and self._owner.always:
            raise UnbindError(
                f"{type(module).__name__} {self._layer} runs outside a pass of the model, where modules do not reach it; call the "
                "model, not its layers, from the thread that called it"
            )
        if step is None or self._layer not in step.selection.layers:
            return None
        states = output[0] if isinstance(output, tuple) else output
        if not isinstance(states, Tensor) or states.dim() not in (2, 3):
            raise UnsupportedArchitecture(
                f"{type(module).__name__} returns {type(states).__name__} where a tensor of states is needed; "
                "give override= the path of layers that return their hidden states"
            )
        read = states.reshape(-1, states.shape[-1]) if step.flat else states
        edited = step.selection.edit(self._layer, read, step.pass_).states.view_as(states)
        return (edited, *output[1:]) if isinstance(output, tuple) else edited


def _hooks_on(layers: Sequence[nn.Module]) -> int:
    return sum(isinstance(hook, _LayerHook) for layer in layers for hook in layer._forward_hooks.values())


_attaching = threading.Lock()  # between the look for hooks and the hooks
# not kept by the intervention, which a copy of the model copies
_under_way: ContextVar[tuple[Intervention | None, _Step | None]] = ContextVar("step", default=(None, None))


class Intervention:
    """One forward hook on every decoder layer while the ``with`` block runs.

    Nothing is changed outside :meth:`step`, nor inside one at layers for which no row asks; a step is its own thread's, so
    that passes of several threads can run side by side. Raises UnsupportedArchitecture where the layers are not found or one of
    them stands at several places, UnbindError where the model already carries an intervention.
    """

    def __init__(self, model: nn.Module, override: str | None = None) -> None:
        """``override`` is the dotted path of the list of decoder layers where the search does not find it."""
        self.stack, self.layers = decoder_stack(model, override)
        self.always = False  # whether a layer without a step is a mistake: else it is one that asks for no modules
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        """Attach."""
        with _attaching:
            if _hooks_on(self.layers):
                raise UnbindError(
                    "an intervention is attached to this model already; leave its `with` block first, or run the passes of "
                    "several threads inside one"
                )
            try:
                for index, layer in enumerate(self.layers):
                    self._handles.append(layer.register_forward_hook(_LayerHook(self, index)))
                if _hooks_on(self.layers) != len(self.layers):
                    raise UnsupportedArchitecture(
                        "one layer object stands at several places of the model, and such sharing cannot be hooked; give each "
                        "place a copy of its own"
                    )
                begin_uncompiled()
            except BaseException:
                self._detach()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Detach, and make sure of it."""
        with _attaching:
            end_uncompiled()
            self._detach()
            if _hooks_on(self.layers):
                raise UnbindError("a hook of the intervention is still attached to the model; load the model anew")

    @property
    def current(self) -> _Step | None:
        """What this thread's forward pass applies."""
        owner, step = _under_way.get()
        return step if owner is self else None

    @contextmanager
    def step(self, selection: Selection | None, pass_: Pass = WHOLE, flat: bool = False) -> Iterator[None]:
        """Apply a selection to the forward pass inside; None leaves the model alone. ``flat``: ``pass_`` is of states [N,d], and
        the model's are [B,T,d], B x T being N.

        Raises UnbindError inside another step or outside the ``with`` block of the intervention.
        """
        if self.current is not None:
            raise UnbindError("a step is under way on this model; leave it first, one forward pass has one selection")
        if not self._handles:
            raise UnbindError("the intervention is not attached; use it as `with Intervention(model) as intervention:`")
        step = None if selection is None else _Step(selection, pass_, flat)
        token = _under_way.set((self, step))
        try:
            yield
        finally:
            _under_way.reset(token)

    def _detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
