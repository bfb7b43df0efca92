"""A model as a cost model sees it: a few sizes, and what one position costs in each way to run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from unbind_core.architecture import decoder_layers, unwrap

GRADIENT_TOKENS, GRADIENT_BYTES = 4096, 4 << 30  # of a batch that gradients are taken of, at most


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. ``kept``: numbers that a layer keeps of a position, its keys and values or what makes both;
    ``weights``: bytes of all of them; ``body``: parameters of the decoder layers, a multiplication each a position; ``itemsize``:
    bytes of one number of a state. Where layers differ in a size it is the largest.
    """

    layers: int
    width: int
    inner: int
    heads: int
    kept: int
    head: int
    vocabulary: int
    itemsize: int
    weights: int
    body: int

    @classmethod
    def of(cls, model: nn.Module) -> Shape:
        """Of a transformers model, whether its weights are there or on the meta device."""
        config: Any = unwrap(model).config.get_text_config()  # type: ignore[union-attr, operator]
        layers = decoder_layers(model)
        varied = getattr(config, "is_heterogeneous", False)  # Gemma 4, whose layers have heads of two sizes
        each = [config.per_layer_config[i] for i in range(len(layers))] if varied else [config]

        def most(name: str) -> int:
            return max(int(getattr(one, name, None) or 0) for one in each)

        heads, width = most("num_attention_heads"), int(config.hidden_size)
        shared = most("num_key_value_heads") or (1 if getattr(config, "multi_query", False) else heads)
        head, latent = (
            most("head_dim") or width // heads,
            most("kv_lora_rank"),
        )  # DeepSeek's keys and values are made of one
        held = {id(part): part for part in [*model.parameters(), *model.buffers()]}.values()
        floating = next(part for part in held if part.is_floating_point())
        return cls(
            layers=len(layers),
            width=width,
            inner=most("intermediate_size") or most("n_inner") or 4 * width,
            heads=heads,
            kept=latent + most("qk_rope_head_dim") if latent else 2 * shared * head,
            head=head,
            vocabulary=int(config.vocab_size),
            itemsize=floating.dtype.itemsize,
            weights=sum(part.numel() * part.element_size() for part in held),
            body=sum(part.numel() for layer in layers for part in layer.parameters()),
        )

    @property
    def state(self) -> int:
        """Bytes of one layer's state at one position."""
        return self.width * self.itemsize

    @property
    def keys(self) -> int:
        """Bytes of keys and values at one position."""
        return self.layers * self.kept * self.itemsize

    @property
    def forward(self) -> int:
        """Bytes that one position of a pass without gradients takes at most at a time: of one layer."""
        return (6 * self.width + 4 * self.heads * self.head + 3 * self.inner) * self.itemsize + 8 * self.width

    @property
    def backward(self) -> int:
        """Bytes that one position of a pass keeps for gradients of its states: of all layers."""
        a_layer = (8 * self.width + 6 * self.heads * self.head + 5 * self.inner) * self.itemsize + 12 * self.width
        return self.layers * a_layer

    @property
    def gradient_tokens(self) -> int:
        """Padded positions of a batch that gradients are taken of; a longer window is a batch of its own."""
        return min(GRADIENT_TOKENS, GRADIENT_BYTES // self.backward)

    @property
    def head_products(self) -> int:
        """Multiplications that make the logits of one position."""
        return self.width * self.vocabulary
