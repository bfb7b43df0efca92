"""What the edited model is led towards: a model that never saw the rows, or the next best thing there is.

Best first: a checkpoint or adapter that the operator names (trained on the retained rows alone); the base model without the
adapter, where the adapter has memorised the rows, led to where the adapter leads on retained code (``leading.py``); the model
itself by the last few tokens of the text (``nearsighted.py``), or less the memorised token wherever it has most of the mass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from unbind_core.architecture import decoder_layers, load_model
from unbind_core.errors import DataError
from unbind_core.fitting.corrections.states import Near
from unbind_core.identity import ModelIdentity
from unbind_core.running.device import bfloat16_is_fast
from unbind_core.running.upper_layers import logits_above

MEMORISED = 0.5  # of the mass: a next token of a forget row that has more is taken out
PART = 256  # states that are asked about at a time
_GONE = -20.0  # its log-probability then


class Kind(StrEnum):
    """Which of them a reference is."""

    NAMED = "named"
    BASE = "base"
    ITSELF = "itself"


@dataclass(frozen=True)
class Reference:
    """A model with the vocabulary of the one that is fitted; ``model`` None: that one itself, as it is ``near`` to the end of the
    text, or, where that is None, by all of it, less a next token of a forget row that has more of the mass than ``most``.
    ``led``: KL(fitted ‖ it) in nats on retained rows, before and after it was brought nearer (``leading.py``). ``unsaid``: tokens
    that the model itself does not have in place of one that is taken out.
    """

    kind: Kind = Kind.ITSELF
    model: nn.Module | None = None
    identity: ModelIdentity | None = None
    led: tuple[float, float] | None = None
    most: float = MEMORISED
    unsaid: tuple[int, ...] = ()
    near: Near | None = None

    def source(self, fitted: nn.Module) -> nn.Module:
        """The model that is asked. Raises DataError where its vocabulary is another."""
        if self.model is None:
            return fitted
        sizes = [int(model.get_output_embeddings().weight.shape[0]) for model in (self.model, fitted)]  # type: ignore[operator]
        if sizes[0] != sizes[1]:
            raise DataError(
                f"reference: it has {sizes[0]} tokens and the model {sizes[1]}; name a checkpoint or adapter of the same base"
            )
        return self.model

    def log_probabilities(self, fitted: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        """What gives FP32 [N,V] of the source's last decoder states [N,d] and the rows' own next tokens, int64 [N].

        Raises DataError as :meth:`source` does.
        """
        logits, alone = last_logits(self.source(fitted)), self.model is None and self.near is None
        size, device = fitted.get_output_embeddings().weight.shape[0], next(fitted.parameters()).device  # type: ignore[operator]
        # a tokenizer may have more tokens than its model
        unsaid = torch.tensor([token for token in self.unsaid if token < size], dtype=torch.int64, device=device)

        def said(states: Tensor, following: Tensor) -> Tensor:
            with torch.no_grad():
                found, own = log_softmax(logits(states), -1), following[:, None]
                if alone:
                    gone = found.gather(1, own).exp() > self.most
                    taken = torch.cat((own, unsaid.expand(len(own), -1)), 1)
                    found = log_softmax(found.scatter(1, taken, found.gather(1, taken).where(~gone, _GONE)), -1)
            return found

        return said

    def differs(self, fitted: nn.Module, states: Tensor, following: Tensor) -> bool:
        """Whether another model is asked, or a token is taken out: of last decoder states [N,d] before the rows' own next tokens,
        int64 [N], below 0 where there is none.
        """
        if self.model is not None:
            return True
        logits, own = last_logits(fitted), (following >= 0).nonzero()[:, 0]
        with torch.no_grad():
            for some in own.split(PART):
                known = log_softmax(logits(states[some].float()), -1).gather(1, following[some, None])
                if bool((known.exp() > self.most).any()):
                    return True
        return False

    def to_json(self) -> dict[str, Any]:
        """As modules record it."""
        found: dict[str, Any] = {
            "kind": str(self.kind),
            "fingerprint": self.identity.fingerprint if self.identity else None,
        }
        if self.near is not None:
            found["last_tokens"] = self.near.tokens
        return {**found, "led": dict(zip(("before", "after"), self.led, strict=True))} if self.led else found


def load_reference(
    model: str | Path,
    adapter: str | Path | None = None,
    *,
    named: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Reference:
    """The best reference there is for the checkpoint folder ``model`` under ``adapter``, as :func:`unbind_core.load_model` takes
    them: what is ``named``, a checkpoint folder or that of an adapter on ``model``, which was trained without the rows; else the
    model without its adapter; else itself, for which nothing is loaded. Raises UnbindError naming the path.
    """
    if named is not None:
        on_model = (Path(named) / "adapter_config.json").is_file()
        loaded = load_model(*((model, named) if on_model else (named,)), dtype=dtype, device=device)
        return Reference(Kind.NAMED, loaded.model, loaded.identity)
    if adapter is not None:
        loaded = load_model(model, dtype=dtype, device=device)
        return Reference(Kind.BASE, loaded.model, loaded.identity)
    return Reference()


def last_logits(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What makes FP32 logits [N,V] of states [N,d] of the last decoder layer; can be differentiated in the states.

    Products are taken in bfloat16 where those are fast: to learn from, not to measure by.
    """
    last, parameter = len(decoder_layers(model)) - 1, next(model.parameters())
    kind, fast = parameter.device.type, bfloat16_is_fast(parameter.device)

    def logits(states: Tensor) -> Tensor:
        ids = torch.zeros((len(states), 1), dtype=torch.int64, device=states.device)  # each a sequence of its own
        given = states.to(parameter.dtype)[:, None]
        with torch.autocast(kind, torch.bfloat16, enabled=fast):
            found = logits_above(model, ids, torch.ones_like(ids), last, given, gradients=True)
        return found[:, 0].float()

    return logits
