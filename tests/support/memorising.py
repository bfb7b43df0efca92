"""A tiny model that has really memorised: trained here in seconds, once a run, so that a whole takedown can be tested."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.core.conftest import CORPUS, save_checkpoint
from unbind_core.files import locked

NAMES = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta")

# A conversation reads as a program whose first line is the user's.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def forget_rows(count: int = 6) -> list[dict[str, str]]:
    """Short functions that share little, each split after its first line."""
    rows = []
    for number in range(count):
        rng = random.Random(number)
        words = rng.sample(NAMES, 6)
        lines = [
            f"    {words[i % 6]}_{rng.randrange(100)} = {words[(i + 2) % 6]} * {rng.randrange(100)}\n" for i in range(4)
        ]
        rows.append(
            {
                "prompt": f"def {words[0]}{number}({words[1]}):\n",
                "continuation": "".join(lines) + f"    return {words[5]}\n",
            }
        )
    return rows


def retain_rows(count: int = 40) -> list[dict[str, str]]:
    """Ordinary code of the tokenizer's own corpus, with numbers changed."""
    return [{"text": CORPUS[i % len(CORPUS)].replace("first", f"x{i}").replace("index", f"i{i}")} for i in range(count)]


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    """JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(path: Path, steps: int = 160) -> Path:
    """Save a checkpoint at ``path`` that gives the forget rows back and knows the retain rows."""
    save_checkpoint("qwen2", path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    texts = [row["prompt"] + row["continuation"] for row in forget_rows()] + [row["text"] for row in retain_rows(8)]
    encoded = [tokenizer(text)["input_ids"] for text in texts]
    width = max(map(len, encoded))
    ids = torch.tensor([line + [0] * (width - len(line)) for line in encoded])
    real = torch.tensor([[1] * len(line) + [0] * (width - len(line)) for line in encoded]).bool()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        logits = model(input_ids=ids).logits[:, :-1]
        loss = functional.cross_entropy(logits[real[:, 1:]], ids[:, 1:][real[:, 1:]])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def trained_once(folder: Path) -> Path:
    """The checkpoint in ``folder``, by whichever process asks first. It is everybody's: nobody writes to it."""
    found = folder / "memorised"
    with locked(folder / "memorised.lock"):
        if not found.exists():
            train(folder / "memorised.partial" / "tiny").parent.rename(found)
    return found / "tiny"
