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


def _adapter_fields(model: nn.Module) -> list[dict[str, Any]]:
    fields = []
    for _, config in sorted(getattr(model, "peft_config", {}).items()):
        settings = config.to_dict()
        if "LORA" in str(settings.get("peft_type")):
            fields.append({key: settings.get(key) for key in _LORA_IDENTITY})
        else:
            fields.append({key: value for key, value in settings.items() if key not in _ADAPTER_NOT_IDENTITY})
    return fields


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor by a name free of wrappers, in order of that name."""
    adapters = tuple(getattr(model, "peft_config", {}))
    named = {}
    for name, value in model.state_dict().items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if len(adapters) == 1:  # an adapter's own name is a choice of whoever loads it
            plain = plain.replace(f".{adapters[0]}.", ".").removesuffix(f".{adapters[0]}")
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
    """SHA-256 in hex of ``config``, the tokenizer, unmerged adapters, and every weight of ``model`` rounded to bfloat16."""
    digest = hashlib.sha256(b"unbind model identity 1\n")
    for part in (_config_fields(config), _tokenizer_fields(tokenizer), _adapter_fields(model)):
        digest.update(canonical_json(part, plain=_plain).encode() + b"\n")
    for key, value in _weights(model):
        digest.update(f"{key} {list(value.shape)}\n".encode())
        stored = value.detach().to("cpu")
        stored = stored.to(torch.bfloat16) if stored.is_floating_point() else stored
        digest.update(stored.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
