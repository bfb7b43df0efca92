"""What the layers of a model see: whether slots of keys and values are good for it."""

from __future__ import annotations

from typing import Any

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
