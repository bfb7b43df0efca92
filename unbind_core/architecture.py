"""What the method must know of a model: where its decoder layers are, and how it is loaded.

The only file with model-family knowledge. Fitting, the bank's hooks and the service all start from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from unbind_core.adapters import merged, with_adapter
from unbind_core.encoding import encode
from unbind_core.errors import UnbindError, UnsupportedArchitecture
from unbind_core.identity import ModelIdentity, fingerprint
from unbind_core.packed import is_packed, plain_weights
from unbind_core.quantisation import quantisation_of, remember, require_packages, settings_of
from unbind_core.unreadable import UNLOADABLE, reason, require_alike, require_json

_DECODER_ONLY = (
    "modules work on the states of a decoder-only model: take a causal language model (AutoModelForCausalLM)"
)


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        wrapper: Any = model
        inner: nn.Module = wrapper.get_base_model()
        return inner
    return model


def _remedy(model: nn.Module) -> str:
    lists = [name for name, part in unwrap(model).named_modules() if isinstance(part, nn.ModuleList) and len(part)]
    known = f" (its module lists: {', '.join(lists[:6])})" if lists else ""
    return f'name the list of decoder layers, as in override="model.layers"{known}'


def outermost_lists(model: nn.Module, count: int | None) -> list[tuple[str, nn.ModuleList]]:
    """The lists of so many parts in a model, each behind its path, without those inside of another, as of experts or heads."""
    found = [(path, part) for path, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    found = [(path, part) for path, part in found if count and len(part) == count]
    paths = [f"{path}." for path, _ in found]
    return [(path, part) for path, part in found if not path.startswith(tuple(paths))]


def decoder_stack(model: nn.Module, override: str | None = None) -> tuple[nn.Module, list[nn.Module]]:
    """The module that runs the decoder layers, and the layers in order. Raises as :func:`decoder_layers` does."""
    inner = unwrap(model)
    name = type(inner).__name__
    config = getattr(inner, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(f"{name} is an encoder-decoder model; {_DECODER_ONLY}")
    if override is not None:
        try:
            found = inner.get_submodule(override)
        except AttributeError:
            raise UnsupportedArchitecture(f"{name} has no part '{override}'; {_remedy(model)}") from None
        if not isinstance(found, nn.ModuleList) or not len(found):
            raise UnsupportedArchitecture(f"'{override}' of {name} is not a list of layers; {_remedy(model)}")
        return inner.get_submodule(override.rpartition(".")[0]), list(found)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    outer = outermost_lists(inner, count)
    if len(outer) > 1 and text is not config:  # a model that reads images too may have as many layers for those
        decoder: Any = inner.get_decoder()  # type: ignore[operator]
        inside = {id(part) for part in decoder.modules()}
        outer = [(path, part) for path, part in outer if id(part) in inside]
    if len(outer) != 1:
        what = "no list" if not outer else f"{len(outer)} lists ({', '.join(path for path, _ in outer)})"
        if count is None:  # a wrapper of one's own, or DataParallel
            what, count = "nothing says how many layers it has, and so no list", "its"
        raise UnsupportedArchitecture(f"{name}: {what} of {count} decoder layers found; {_remedy(model)}")
    path, layers = outer[0]
    return inner.get_submodule(path.rpartition(".")[0]), list(layers)


def decoder_layers(model: nn.Module, override: str | None = None) -> list[nn.Module]:
    """The decoder layers of any transformers causal LM, first to last; a PEFT wrapper is looked through.

    ``override`` is the dotted path of the list inside the transformers model, for models that the search does not
    cover. Raises UnsupportedArchitecture, naming the model's class and the remedy.
    """
    return decoder_stack(model, override)[1]


def identify(model: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str = "") -> ModelIdentity:
    """Fingerprint a model with its tokenizer and unmerged adapters: SHA-256 over configuration, tokenizer, every
    weight.

    Floating-point weights enter rounded to bfloat16, so that one checkpoint has one identity in float32 and in
    bfloat16. Paths, storage type and library versions do not enter. Adapters enter as they act at that moment: those that
    are disabled or not active do not. Identify before merging adapters: merged sums differ between machines. Quantised
    weights enter as they are stored, with their scales and all settings of the quantisation. Raises
    UnsupportedArchitecture as :func:`decoder_layers` does.
    """
    inner = unwrap(model)
    layers = decoder_layers(model)
    config: Any = inner.config
    label = name or Path(str(getattr(config, "_name_or_path", "") or type(inner).__name__)).name
    size = int(config.get_text_config().hidden_size)
    found = fingerprint(model, config.to_dict(), tokenizer)
    return ModelIdentity(found, label, size, len(layers), quantisation_of(inner, config))


def numerics(model: nn.Module) -> dict[str, str | None]:
    """What a model computes in, {"dtype", "quantisation"}: the precision, and how its weights are quantised (None: not at all)."""
    inner = unwrap(model)
    floating = (value.dtype for value in model.parameters() if value.is_floating_point())
    return {
        "dtype": str(next(floating, torch.float32)).removeprefix("torch."),
        "quantisation": quantisation_of(inner, getattr(inner, "config", None)),
    }


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve or to fit on: evaluation mode, no parameter wants a gradient."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    identity: ModelIdentity


def _folder(path: str | Path, needed: str, what: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise UnbindError(f"{what}: '{path}' is not a directory; give the path of a downloaded {what} folder")
    if not (folder / needed).is_file():
        raise UnbindError(f"{what}: '{path}' has no {needed}; give the folder that save_pretrained wrote")
    return folder


def _configuration(folder: Path) -> PreTrainedConfig:
    """Raises UnsupportedArchitecture where the library has no such model of its own: code that a checkpoint brings is never run.
    ValueError where a file of settings is damaged.
    """
    require_json(folder)
    settings = PreTrainedConfig.get_config_dict(folder, local_files_only=True)[0]
    kind = settings.get("model_type")
    if kind not in CONFIG_MAPPING:
        brings = "; the code that the checkpoint brings (auto_map) is never run" if "auto_map" in settings else ""
        raise UnsupportedArchitecture(
            f"model: '{folder}' is of model_type '{kind}', which transformers {transformers.__version__} does not have{brings}; "
            "take a checkpoint in transformers' own format, or a release of it that has this architecture"
        )
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config


def _loader(config: PreTrainedConfig) -> Any:
    """The library's class that loads such a model, to answer text alone where it reads images as well.

    Raises UnsupportedArchitecture where it is not a causal decoder.
    """
    named = (config.architectures or [type(config).__name__])[0]
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedArchitecture(f"{named} is an encoder-decoder model; {_DECODER_ONLY}")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:  # Mistral 3, Qwen3-VL
        return AutoModelForImageTextToText
    raise UnsupportedArchitecture(f"{named} is not a causal language model; {_DECODER_ONLY}")


def outline(path: str | Path, *, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A checkpoint folder's architecture without its weights, on the meta device, and its tokenizer.

    Raises UnbindError as :func:`load_model` does.
    """
    folder = _folder(path, "config.json", "model")
    try:
        config = _configuration(folder)
        with torch.device("meta"):
            model: nn.Module = _loader(config).from_config(config, dtype=dtype)
        return model, _tokenizer(folder, path)
    except UNLOADABLE as error:
        said = reason(error, folder)
        raise UnbindError(f"model: '{path}' could not be read as a causal language model: {said}") from error


def _tokenizer(folder: Path, path: str | Path) -> Any:
    """The folder's tokenizer. Raises UnbindError with the remedy: whoever saves a model does not save its tokenizer with it.

    Where the files are missing the library makes an empty one for some families (Qwen2, GPT-2), to which every text is nothing.
    """
    remedy = "put the files there that the tokenizer's save_pretrained writes, tokenizer.json and tokenizer_config.json among them"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        ids = encode(tokenizer, "return 1")
    except UNLOADABLE as error:
        said = reason(error, folder)
        raise UnbindError(f"model: the tokenizer in '{path}' could not be loaded: {said}; {remedy}") from error
    if set(ids) <= {tokenizer.unk_token_id}:
        raise UnbindError(f"model: '{path}' has no tokenizer, or an empty one: it makes no tokens of a text; {remedy}")
    return tokenizer


def _require_device(device: str) -> None:
    """Before weights of many gigabytes are read. Raises UnbindError."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a build of torch without CUDA raises the latter
        told = str(error).splitlines()[0]
        raise UnbindError(
            f"device: '{device}' cannot be used here ({told}); choose cpu, or cuda where there is one"
        ) from None


def load_model(
    path: str | Path,
    adapter: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    merge: bool = True,
) -> LoadedModel:
    """Load a checkpoint folder, and a LoRA (or other PEFT) adapter folder on it, from disk alone.

    The identity is taken before the adapter is merged. ``merge=False`` keeps the PEFT wrapper. Quantised checkpoints are
    loaded as they are; there an adapter is computed beside the weights, as merging would round it. GPTQ and AWQ become
    plain weights (``packed.py``). Raises UnbindError naming the path where something is missing or damaged, or a package
    that the quantisation needs, UnsupportedArchitecture where the model is not a causal decoder.
    """
    _require_device(device)
    folder = _folder(path, "config.json", "model")
    try:
        config = _configuration(folder)
        loader = _loader(config)
        quantised = settings_of(config)
        # PyTorch's fused attention leaves the soft cap on attention scores out without a word (Gemma 2).
        attention = "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None
        common: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "output_loading_info": True}
        common["ignore_mismatched_sizes"] = True  # they are told of below, by name
        if quantised is not None and is_packed(quantised):
            weights = plain_weights(folder, quantised, dtype)
            del config.quantization_config
            loaded: Any = loader._model_mapping[type(config)].from_pretrained(
                None, config=config, state_dict=weights, **common
            )
            if any(isinstance(part, Conv1D) for part in loaded[0].modules()):
                raise ValueError(
                    "its layers keep their weights the other way round; take a checkpoint that is not packed"
                )
        else:
            if quantised is not None:
                require_packages(quantised)
            placed = device if quantised is not None and device != "cpu" else None  # some formats do not move later
            loaded = loader.from_pretrained(folder, config=config, device_map=placed, local_files_only=True, **common)
        model, report = loaded
        require_alike(report, model, decoder_layers(model))
        if dtype is torch.float64 and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # the grouped matrix product has no float64
        if quantised is not None and settings_of(model.config) is None:
            remember(model, quantised)
    except UNLOADABLE as error:
        said = reason(error, folder)
        raise UnbindError(f"model: '{path}' could not be loaded as a causal language model: {said}") from error
    tokenizer = _tokenizer(folder, path)
    if adapter is not None:
        _folder(adapter, "adapter_config.json", "adapter")
        _settle(model, device)
        model = with_adapter(model, adapter, path, merges=merge)
    identity = identify(model, tokenizer, Path(path).resolve().name)
    if adapter is not None and merge:
        model = merged(model, adapter) if settings_of(unwrap(model).config) is None else model.get_base_model()
    model.to(device).eval().requires_grad_(False)
    _settle(model, device)
    return LoadedModel(model, tokenizer, identity)


def _settle(model: nn.Module, device: str) -> None:
    """One pass of a quantised model: some formats have their weights in place from then on."""
    if settings_of(unwrap(model).config) is not None:
        with torch.no_grad():
            model.to(device)(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=False)
