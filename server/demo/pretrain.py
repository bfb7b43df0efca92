"""The demo base model: a small Qwen2 trained from nothing on the packed token stream.

Second stage of ``unbind demo train``. The learning rate follows the share of the tokens that have been seen, so the result does
not depend on how often the training was stopped. Resumable: a checkpoint is written every few minutes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, Qwen2Config

TOKENS_PER_STEP = 16_384
SHORT, LONG = 512, 2048  # window lengths; the last part of the tokens is seen at the long one
LONG_FROM = 0.85
CHECKPOINT_EVERY_S = 240.0


def configuration(vocabulary: int, end: int) -> Qwen2Config:
    """The demo architecture: 6.9 M parameters, grouped-query attention, tied embeddings."""
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONG,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        use_cache=True,
    )


def _optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, norms and biases."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if not (p.ndim == 2 and "embed" not in name)]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(share: float) -> float:
    """Warm-up over the first 1 % of the tokens, flat to 40 %, then linear to 2 %."""
    if share < 0.01:
        return max(share / 0.01, 0.02)
    return 1.0 if share < 0.4 else max(0.02, (1.0 - share) / 0.6)


class _Stream:
    """Deterministic walk over the packed stream: step i takes the next TOKENS_PER_STEP tokens, wrapping around."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.load(path, mmap_mode="r")

    def batch(self, position: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each [TOKENS_PER_STEP / length, length] int64, starting at token ``position``."""
        start = position % (len(self.tokens) - TOKENS_PER_STEP - 1)
        chunk = torch.from_numpy(np.asarray(self.tokens[start : start + TOKENS_PER_STEP + 1], dtype=np.int64))
        return chunk[:-1].view(-1, length), chunk[1:].view(-1, length)


def train(work: Path, tokens: int, configure: Callable[[int, int], PreTrainedConfig] = configuration) -> Path:
    """Train on ``tokens`` tokens in total (over all resumptions) and save to ``work/base``; ``configure`` makes the architecture
    of the size of the vocabulary and the end token.
    """
    out = work / "base"
    if (out / "model.safetensors").exists():
        return out
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_config(configure(len(tokenizer), tokenizer.eos_token_id))
    model.to(device)
    optimizers = _optimizers(model)
    base_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    stream = _Stream(work / "tokens.npy")
    step, steps = 0, -(-tokens // TOKENS_PER_STEP)
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step = state["step"]

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    compiled = torch.compile(loss_of)
    smooth, saved_at = math.nan, time.monotonic()
    while step < steps:
        begun = time.monotonic()
        share = step / steps
        for optimizer, rate in zip(optimizers, base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate_factor(share)
        inputs, targets = stream.batch(step * TOKENS_PER_STEP, SHORT if share < LONG_FROM else LONG)
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(inputs.to(device), targets.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        smooth = value if math.isnan(smooth) else 0.95 * smooth + 0.05 * value
        step += 1
        if step % 10 == 0:
            rate = TOKENS_PER_STEP / (time.monotonic() - begun)
            seen = step * TOKENS_PER_STEP / 1e6
            print(f"step {step}/{steps}  {seen:.1f} M tokens  loss {smooth:.3f}  {rate:.0f} tokens/s", flush=True)
        if time.monotonic() - saved_at > CHECKPOINT_EVERY_S:
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
            torch.save(state, checkpoint.with_suffix(".partial"))
            checkpoint.with_suffix(".partial").rename(checkpoint)
            saved_at = time.monotonic()
    model.to(device="cpu", dtype=torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out
