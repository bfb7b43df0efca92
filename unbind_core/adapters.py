"""Which adapters act on a model, and how strongly: PEFT keeps beside them others that are loaded and do nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_WRAPPED = "base_model.model."  # in front of a name inside PEFT's wrapper


@dataclass
class Acting:
    """``names`` of the adapters that act anywhere, in order. ``idle``: what names of tensors begin with that change nothing.
    ``original``: modules that an adapter would replace as a whole, and does not. ``scales``: how many times its own scale a LoRA
    adapter acts with, by layer.
    """

    names: list[str]
    idle: tuple[str, ...] = ()
    original: tuple[str, ...] = ()
    scales: dict[str, dict[str, float]] = field(default_factory=dict)


def acting_adapters(model: nn.Module) -> Acting:
    """What of the adapters on ``model`` acts as it is now. Of a kind that has no layers of its own, all that are loaded."""
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}
    idle, original, layered, scales = list[str](), list[str](), set[str](), dict[str, dict[str, float]]()
    for place, layer in _layers(model).items() if configs else ():
        held = {name: [one for one in layer.adapter_layer_names if name in getattr(layer, one, ())] for name in configs}
        here = [name for name in held if held[name] and _acts(layer, name)]
        layered |= {name for name in held if held[name]}
        idle += [f"{place}.{one}.{name}" for name in held if name not in here for one in held[name]]
        if not here and hasattr(layer, "original_module"):
            original.append(place)
        for name in here:
            scales.setdefault(name, {})[place.removeprefix(_WRAPPED)] = _times_its_own(layer, name)
    names = sorted(name for name in configs if name in scales or name not in layered)
    return Acting(names, tuple(idle), tuple(original), scales)


def _layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer  # only users of adapters pay for the import
    from peft.utils.other import ModulesToSaveWrapper

    kinds = (BaseTunerLayer, ModulesToSaveWrapper)
    return {place: layer for place, layer in model.named_modules() if isinstance(layer, kinds)}


def _acts(layer: Any, name: str) -> bool:
    """Whether an adapter changes what a layer computes. One that is merged is in its weights, and no other acts beside it."""
    if layer.disable_adapters or layer.merged_adapters or name not in layer.active_adapters:
        return False
    nothing = vars(layer).get("scaling", {}).get(name) == 0
    return not nothing or bool(vars(layer).get("use_dora", {}).get(name))  # DoRA norms the weights at any scale


def _times_its_own(layer: Any, name: str) -> float:
    alpha, rank = (vars(layer).get(one, {}).get(name) for one in ("lora_alpha", "r"))
    if not alpha or not rank:
        return 1.0
    own = alpha / (math.sqrt(rank) if layer.use_rslora.get(name) else rank)
    return float(f"{layer.scaling[name] / own:.9g}")  # without its rounding
