"""How a checkpoint's weights are quantised: in words, by what packages, and what of it a loaded model still is.

Formats are the library's (transformers); this file knows their names and what stands in their configurations.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers.quantizers.auto import AutoHfQuantizer

# What each format needs beside transformers: (name to import, name to install). A format that is not here needs nothing more; GPTQ
# and AWQ are read in ``packed.py``.
PACKAGES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "bitsandbytes": (("bitsandbytes", "bitsandbytes"),),
    "compressed-tensors": (("compressed_tensors", "compressed-tensors"),),
    "torchao": (("torchao", "torchao"),),
    "hqq": (("hqq", "hqq"),),
    "quanto": (("optimum.quanto", "optimum-quanto"),),
    "auto-round": (("auto_round", "auto-round"),),
}
# The settings that people know a format by, in the order in which they are told. All others are in the fingerprint alone.
_TOLD = (
    "_type",
    "load_in_4bit",
    "load_in_8bit",
    "bnb_4bit_quant_type",
    "bnb_4bit_compute_dtype",
    "format",
    "fmt",
    "bits",
    "nbits",
    "num_bits",
    "group_size",
    "weight_block_size",
    "sym",
    "desc_act",
    "zero_point",
    "activation_scheme",
)
_ONLY_WITH = {"bnb_4bit_quant_type": "load_in_4bit", "bnb_4bit_compute_dtype": "load_in_4bit"}
DEQUANTISED = "dequantised"
_MARK = "unbind_dequantised"  # attribute of a loaded model: what its checkpoint was quantised by


def settings_of(config: Any) -> Mapping[str, Any] | None:
    """A model configuration's quantisation as a mapping; None where there is none."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    return found if isinstance(found, Mapping) else dict(found.to_dict())


def method_of(settings: Mapping[str, Any]) -> str:
    """The format's name."""
    method = settings.get("quant_method")
    return str(getattr(method, "value", method) or "unknown")


def told(settings: Mapping[str, Any]) -> str:
    """A quantisation in words, the format first: "gptq, bits 4, group_size 128, sym"."""
    said = dict.fromkeys(_said(settings))
    return ", ".join([method_of(settings), *said])


def _said(settings: Mapping[str, Any], part: str = "") -> Iterator[str]:
    for name in _TOLD:
        value = settings.get(name)
        if (
            value is None
            or value is False
            or isinstance(value, Mapping)
            or not settings.get(_ONLY_WITH.get(name, name))
        ):
            continue
        word = part + name.removeprefix("bnb_4bit_").strip("_")
        yield word if value is True else f"{word} {'x'.join(map(str, value)) if isinstance(value, list) else value}"
    for name, value in settings.items():
        if isinstance(value, Mapping) and name != "_data":  # torchao's settings of a type, types again
            # of what is told twice, weights and activations, the second is said to be that
            yield from _said(value, "activations " if name == "input_activations" else part)


def require_packages(settings: Mapping[str, Any]) -> None:
    """Raise ImportError, naming what to install, where a package that the format needs is missing.

    ValueError where the library does not know the format: it would take stored numbers for weights and leave their scales out.
    """
    if not AutoHfQuantizer.supports_quant_method(settings):
        raise ValueError(
            f"its weights are quantised ({told(settings)}), a format that transformers does not read; take a checkpoint of the "
            "model that is not quantised, or one in another format (compressed-tensors, FP8, bitsandbytes)"
        )
    missing = [package for module, package in PACKAGES.get(method_of(settings), ()) if not _there(module)]
    if missing:
        raise ImportError(
            f"its weights are quantised ({told(settings)}), which needs {' and '.join(missing)}: "
            f"`pip install {' '.join(missing)}`"
        )


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is a part of
        return False


def remember(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Note on a model what its checkpoint was quantised by, where the library has made plain weights of it."""
    model.__dict__[_MARK] = f"{told(settings)}, {DEQUANTISED}"


def quantisation_of(model: nn.Module, config: Any) -> str | None:
    """How a loaded model's weights are quantised, or were before they were loaded ("..., dequantised"); None: they never were."""
    settings = settings_of(config)
    if settings is not None:
        return told(settings)
    mark: str | None = model.__dict__.get(_MARK)
    return mark


def computed_in(quantisation: str | None) -> str | None:
    """The format that a quantisation in words is computed in; None for plain weights, those that were dequantised too.

    Its details are the fingerprint's to tell apart; a module of before they were told has the format's name alone.
    """
    if quantisation is None or quantisation.endswith(f", {DEQUANTISED}"):
        return None
    return quantisation.partition(",")[0]
