"""What the layers of a model see, and whether keys and values are all that they keep: what slots are good for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unbind_core.errors import UnsupportedArchitecture

INSTEAD = "serve a model with full or sliding-window attention"


def attention_kinds(config: Any, name: str) -> tuple[bool, int | None]:
    """Whether some layers see everything, and the window of those that do not (None: none); ``config`` is the decoder's.

    Raises UnsupportedArchitecture where a layer is of neither kind.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedArchitecture(
            f"{name} has layers of kind {', '.join(sorted(unknown))}, for which slots of keys and values are not enough; {INSTEAD}"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):
        # counted inside the attention from the last key of a pass, so rows beside a longer one would look at too little
        raise UnsupportedArchitecture(f"{name} has windows that no mask can move to where a request stands; {INSTEAD}")
    if not kinds:
        return window is None, window
    return "full_attention" in kinds, window if "sliding_attention" in kinds else None


def kept_tensors(cache: Any, name: str) -> list[Tensor]:
    """Keys and values of all layers in the cache of a pass. Raises UnsupportedArchitecture where a layer keeps anything else."""
    layers = getattr(cache, "layers", None) or ()
    kept = [getattr(layer, part, None) for layer in layers for part in ("keys", "values")]
    found = [part for part in kept if isinstance(part, Tensor)]
    if not layers or len(found) < len(kept):
        raise UnsupportedArchitecture(f"{name} has layers that keep other things than keys and values; {INSTEAD}")
    return found
