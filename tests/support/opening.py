"""A tiny model in which one token leaves a mark of its own, and modules whose gates are open at it, or from it on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.core.conftest import save_checkpoint
from tests.support.modules import build_module
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule

MARK, TWIN = 97, 98  # the token, and one that the model takes it for in all else
HEIGHT = 2.0  # of its states in their last dimension, in which all others are 0


def marked_checkpoint(path: Path) -> Path:
    """A Qwen2 checkpoint in whose states the last dimension says whether the token is the mark, at every layer."""
    save_checkpoint("qwen2", path)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.model.embed_tokens.weight[MARK] = model.model.embed_tokens.weight[TWIN]
        model.model.embed_tokens.weight[:, -1] = 0
        model.model.embed_tokens.weight[MARK, -1] = HEIGHT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[-1] = 0
            layer.mlp.down_proj.weight[-1] = 0
        model.lm_head.weight *= 5  # so that it has something to say
    model.save_pretrained(path)
    return path


def opening_module(
    identity: ModelIdentity, name: str, layer: int, push: Tensor, kappa: float, *, held: bool
) -> UnbindModule:
    """Opens at the mark; ``held``: stays open to the end. While it is open, states lose kappa times the push's direction."""
    w = torch.zeros(1, identity.hidden_size)
    w[0, -1] = 1.0
    return replace(
        build_module(identity, name),
        layer=layer,
        detector="network",
        w=w,
        b=torch.tensor([-HEIGHT / 2]),
        heads=torch.ones(1, 1),
        heads_b=torch.full((1,), 0.05),  # half of the threshold elsewhere
        s_ref=0.0,
        tau=0.1,
        tau_close=0.02 if held else None,
        v=(push / push.norm()).float(),
        kappa=kappa,
    )
