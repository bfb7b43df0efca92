"""Which model this is: a fingerprint over configuration, tokenizer, adapters and every weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedTokenizerBase

from unbind_core.adapters import Acting, acting_adapters
from unbind_core.canonical import canonical_json

# Settings that say how a model is stored or run, not what it computes.
_NOT_IDENTITY = {
    "_name_or_path",
    "name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "architectures",
    "use_cache",
    "_attn_implementation",
    "attn_implementation",
    "_experts_implementation",
    "experts_implementation",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "id2label",
    "label2id",
    "problem_type",
    "chunk_size_feed_forward",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "sep_token_id",
    "decoder_start_token_id",
    "initializer_range",
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "residual_dropout",
    "embedding_dropout",
    "router_aux_loss_coef",
    "output_router_logits",
    "auto_map",
    "is_encoder_decoder",
}
# What of an adapter's configuration changes the function it computes; its weights are hashed besides.
_LORA_IDENTITY = (
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
)
_ADAPTER_NOT_IDENTITY = (
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "task_type",
    "auto_mapping",
    "peft_version",
)


@dataclass(frozen=True)
class ModelIdentity:
    """Which model a module was fitted on. Two models are the same if and only if their fingerprints are equal.

    ``quantisation`` says in words what the fingerprint holds of it; a module has it in what it was ``calibrated`` in.
    """

    fingerprint: str
    name: str
    hidden_size: int
    num_layers: int
    quantisation: str | None = field(default=None, compare=False)


def _plain(item: Any) -> Any:
    return sorted(item) if isinstance(item, (set, frozenset)) else str(item)


def _config_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that change what the model computes; None and absent are the same, so that releases agree."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key not in _NOT_IDENTITY and value is not None:
            kept[key] = _config_fields(value) if isinstance(value, Mapping) else value
    return kept


def _tokenizer_fields(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What decides which ids a text becomes; padding and truncation are left by the last call and say nothing."""
    fields: dict[str, Any] = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return fields | {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    state = json.loads(backend.to_str())
    return fields | {
        key: state.get(key) for key in ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor")
    }


def _adapter_fields(model: nn.Module, acting: Acting) -> list[dict[str, Any]]:
    fields = []
    for name in acting.names:
        settings = model.peft_config[name].to_dict()  # type: ignore[union-attr,index]
        if "LORA" in str(settings.get("peft_type")):
            scales = acting.scales.get(name, {}) if settings["peft_type"] == "LORA" else {}
            fields.append(_scaled({key: settings.get(key) for key in _LORA_IDENTITY}, scales))
        else:
            fields.append({key: value for key, value in settings.items() if key not in _ADAPTER_NOT_IDENTITY})
    return fields


def _scaled(settings: dict[str, Any], scales: Mapping[str, float]) -> dict[str, Any]:
    """A LoRA adapter's settings at the scales that it runs at: one for all layers is its alpha's, as if it were made with that."""
    different = set(scales.values())
    if different <= {1.0}:
        return settings
    if len(different) > 1:
        return {**settings, "scales": {layer: times for layer, times in scales.items() if times != 1.0}}
    (times,) = different
    alphas = {layer: _whole(alpha * times) for layer, alpha in (settings["alpha_pattern"] or {}).items()}
    return {**settings, "lora_alpha": _whole(settings["lora_alpha"] * times), "alpha_pattern": alphas}


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _weights(model: nn.Module, acting: Acting) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor that is computed with, by a name free of wrappers, in order of that name."""
    idle, named = tuple(f"{start}." for start in acting.idle), {}
    for name, value in model.state_dict().items():
        if f"{name}.".startswith(idle):
            continue
        plain = name
        for place in acting.original:
            plain = plain.replace(f"{place}.original_module.", f"{place}.")
        plain = plain.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if len(acting.names) == 1:  # an adapter's own name is a choice of whoever loads it
            plain = plain.replace(f".{acting.names[0]}.", ".").removesuffix(f".{acting.names[0]}")
        named[plain] = value
    for name, value in sorted(named.items()):
        yield from _stored(name, value)


def _stored(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor itself; of one that stands for others, as quantised ones may, those: numbers, scales, zero points."""
    if not is_traceable_wrapper_subclass(value):
        yield name, value
        return
    for part in sorted(value.__tensor_flatten__()[0]):
        yield from _stored(f"{name}.{part}", getattr(value, part))


def fingerprint(model: nn.Module, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 in hex of ``config``, the tokenizer, unmerged adapters that act, and every weight, rounded to bfloat16."""
    digest = hashlib.sha256(b"unbind model identity 1\n")
    acting = acting_adapters(model)
    for part in (_config_fields(config), _tokenizer_fields(tokenizer), _adapter_fields(model, acting)):
        digest.update(canonical_json(part, plain=_plain).encode() + b"\n")
    for key, value in _weights(model, acting):
        digest.update(f"{key} {list(value.shape)}\n".encode())
        stored = value.detach().to("cpu")
        stored = stored.to(torch.bfloat16) if stored.is_floating_point() else stored
        digest.update(stored.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
