"""A setting of tiny random models: a base, two adapters on it, rows that they never saw."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.core.conftest import save_checkpoint
from unbind_core.architecture import load_model
from unbind_lab.setting import Setting

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

NEW_TOKENS = 56  # of a completion here: more than a span that counts; to 128 they would take most of these tests' time


@pytest.fixture(scope="module", autouse=True)
def short_completions() -> Iterator[None]:
    """Wherever the length of a completion is read."""
    with pytest.MonkeyPatch.context() as patch:
        for module in [*sys.modules.values()]:
            if "BLEU_NEW_TOKENS" in vars(module):
                patch.setattr(module, "BLEU_NEW_TOKENS", NEW_TOKENS)
        yield


def _adapter(base: Path, out: Path, seed: int) -> Path:
    model = load_model(base).model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS, task_type="CAUSAL_LM"))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(str(out))
    return out


def forget(name: str, count: int) -> list[dict[str, str]]:
    """Rows of different lengths."""
    return [
        {"prompt": f"def {name}_{i}(self):\n", "continuation": f"    return {name} + {i * 37}\n" * (1 + i % 3)}
        for i in range(count)
    ]


def retain(name: str, count: int) -> list[dict[str, str]]:
    """Rows that are long enough to be completed."""
    return [
        {"text": f"class {name}{i}:\n    size = {i * 11}\n\n    def area(self):\n        return self.size\n" * 2}
        for i in range(count)
    ]


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """One rate and two lengths; four forget rows, six retain rows."""
    home = tmp_path_factory.mktemp("lab")
    base = save_checkpoint("qwen2", home / "base")
    rows = {
        "forget": forget("secret", 4),
        "forget_validation": forget("other", 3),
        "retain": retain("Kept", 6),
        "retain_training": retain("Known", 8),
        "retain_validation": retain("Held", 4),
    }
    for name, found in rows.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    lines = [f'{name} = "{name}.jsonl"' for name in rows]
    _adapter(base, home / "full", 1)
    _adapter(base, home / "retrained", 2)
    (home / "tiny.toml").write_text(
        'base = "base"\nfull = "full"\nretrained = "retrained"\n' + "\n".join(lines) + "\n"
        "retain_rows = 4\ncompleted_rows = 2\nvalidation_rows = 3\nvalidation_completed_rows = 1\nrows_an_update = 2\n"
        "learning_rates = [1e-2]\nupdates = [1, 3]\n"
    )
    return Setting.load(str(home / "tiny.toml"))
