"""Adapters of PEFT: how one is loaded and merged; which of those on a model act, and how strongly: others may be there idle."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError
from torch import nn

from unbind_core.errors import UnbindError
from unbind_core.unreadable import reason, require_json

_WRAPPED = "base_model.model."  # in front of a name inside PEFT's wrapper
_DECOMPOSING = (
    "pissa",
    "olora",
    "corda",
    "loftq",
)  # ways to begin that take from a weight what the adapter begins with
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


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


def with_adapter(model: nn.Module, adapter: str | Path, path: str | Path, *, merges: bool) -> Any:
    """``model``, loaded from ``path``, in PEFT's wrapper with the adapter of a folder; ``merges``: it is to be merged later.

    Raises UnbindError naming the folder where the adapter is not whole, does not fit or cannot be merged.
    """
    from peft import PeftModel  # only users of adapters pay for the import

    if not any((Path(adapter) / name).is_file() for name in _WEIGHTS):  # else peft would ask a hub for them
        raise UnbindError(f"adapter: '{adapter}' has no {_WEIGHTS[0]}; give the folder that save_pretrained wrote")
    base: Any = model
    try:
        require_json(Path(adapter))
        with warnings.catch_warnings():  # with keys missing, peft would go on with an adapter that does nothing
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(base, str(adapter), local_files_only=True)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError, UserWarning, UnpicklingError) as error:
        said = reason(error, Path(adapter))
        raise UnbindError(f"adapter: '{adapter}' does not fit the model '{path}': {said}") from error
    except Exception as error:
        raise UnbindError(
            f"adapter: peft makes nothing of the adapter_config.json in '{adapter}' ({type(error).__name__}: {error}); give the "
            "folder as save_pretrained wrote it"
        ) from error
    if merges and not hasattr(adapted, "merge_and_unload"):
        kind = adapted.active_peft_config.peft_type.value
        raise UnbindError(
            f"adapter: '{adapter}' is of kind {kind}, which puts states before a text and merges into no weights; give one "
            "that changes weights, such as LoRA"
        )
    if problem := _unlike_training(adapted):
        raise UnbindError(f"adapter: '{adapter}' {problem}")
    if strange := _left_over(adapted, adapter):
        raise UnbindError(
            f"adapter: '{adapter}' does not fit the model '{path}': of its weights {len(strange)} have no place there "
            f"({strange[0]}), as of an adapter that was trained on another model; give one that was trained on this model"
        )
    return adapted


def _unlike_training(adapted: Any) -> str | None:
    """Why the model would not be what the adapter was trained on, though it was loaded, with the remedy."""
    settings, text = adapted.active_peft_config, adapted.get_base_model().config.get_text_config()
    drawn = str(getattr(settings, "init_lora_weights", None))
    if drawn.startswith(_DECOMPOSING):
        return (
            f"changes the model's own weights as it is loaded (init_lora_weights '{drawn}'), by a decomposition whose last bits "
            "depend on the threads, so that no two processes have the same model; give a checkpoint with it merged "
            "(merge_and_unload, then save_pretrained), or write it as plain LoRA (path_initial_model_for_weight_conversion)"
        )
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and len(kinds) != text.num_hidden_layers:
        return (
            f"repeats layers (layer_replication), and peft leaves this kind of model with {len(kinds)} kinds for "
            f"{text.num_hidden_layers} layers; give a checkpoint that has them repeated, with an adapter on that"
        )
    return None


def _left_over(adapted: Any, adapter: str | Path) -> list[str]:
    """What a file has for layers that the model lacks. As it loads an adapter peft passes over them without a word."""
    if not hasattr(adapted, "merge_and_unload"):  # states before a text: those have no layers
        return []
    read = adapted.load_adapter(str(adapter), adapted.active_adapter, local_files_only=True)
    return sorted(read.unexpected_keys)


def merged(model: Any, adapter: str | Path) -> nn.Module:
    """The model with its adapter, which is of this folder, in its weights. What embeddings and head share, and the adapter changes
    in one of them, becomes a weight of each: merged into the one that both have, it would change the other too, or both twice.

    Raises UnbindError naming the folder where it cannot be merged.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    places = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for layer in list(model.modules()):
        base: Any = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else None
        if places[id(getattr(base, "weight", None))] > 1:
            base.weight = nn.Parameter(base.weight.detach().clone())
            model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    try:
        plain: nn.Module = model.merge_and_unload()
    except RuntimeError as error:  # aLoRA's, which acts behind some tokens alone
        raise UnbindError(
            f"adapter: '{adapter}' does not merge into weights: {error}; give one that does, such as LoRA"
        ) from error
    return plain
