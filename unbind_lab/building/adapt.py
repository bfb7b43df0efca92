"""M_full and M_retrain by the paper's schedule (Appendix A.2): LoRA, AdamW at a constant rate, 32 slots an update.

An epoch interleaves every forget row with slots of a seeded, repeatedly shuffled retain stream. M_retrain skips the forget
slots and moves no boundary, so both see the same retain rows in the same updates. A loss is divided by the tokens that it
scores: of a forget row its continuation, as it is what has to come back.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from unbind_core.architecture import load_model
from unbind_core.encoding import pad_id
from unbind_core.files import write_text, write_whole
from unbind_core.progress import Progress, ProgressCallback
from unbind_core.rows import ForgetRow, RetainRow, split_text
from unbind_core.running.device import bfloat16_is_fast
from unbind_core.windows import Window, batches, forget_windows, retain_windows
from unbind_lab.building.recipe import Adaptation
from unbind_lab.trained.training import first_windows

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LARGEST_NORM = 1.0  # of a gradient
CONFIGURATION = "adapter_config.json"
TOGETHER = 4096  # padded tokens that share a pass, or those of one slot that alone has more
Item = TypeVar("Item")


def slots(forget: int, retain: int, of_retain: int, epochs: int, seed: int) -> Iterator[list[tuple[str, int]]]:
    """The slots of each epoch: ("forget", index of a row) or ("retain", index of a row), each forget row once."""
    stream = _stream(retain, seed)
    for epoch in range(epochs):
        found = [("forget", index) for index in range(forget)]
        found += [("retain", next(stream)) for _ in range(of_retain)]
        random.Random(f"{seed} {epoch}").shuffle(found)
        yield found


def _stream(rows: int, seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield from rng.sample(range(rows), rows)


def adapt(
    base: Path,
    forget: Sequence[ForgetRow],
    retain: Sequence[RetainRow],
    out: Path,
    how: Adaptation,
    *,
    checkpoint: Path,
    with_forget: bool,
    seed: int,
    progress: ProgressCallback,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Train one adapter and save it to ``out`` in bfloat16; killed, it goes on from ``checkpoint``, the last whole epoch, and ends
    the same. ``dtype``: of the frozen weights; those that are trained are FP32.
    """
    loaded = load_model(base, dtype=dtype, device=device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=how.rank, lora_alpha=how.alpha, lora_dropout=0.0, target_modules=PROJECTIONS, task_type="CAUSAL_LM"
        )
        model = get_peft_model(loaded.model, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=how.learning_rate, weight_decay=how.weight_decay)
    first = _resume(checkpoint, trained, optimizer)
    of_forget = _one_a_row(forget_windows(loaded.tokenizer, forget, range(len(forget))), loaded.tokenizer)
    of_retain = _one_a_row(retain_windows(loaded.tokenizer, retain, range(len(retain))), loaded.tokenizer)
    cut = _one_a_row(cut_windows(loaded.tokenizer, retain), loaded.tokenizer) if how.cut_retain else of_retain
    pad = pad_id(loaded.tokenizer)
    for epoch, of_epoch in enumerate(slots(len(forget), len(retain), how.retain_slots, how.epochs, seed)):
        if epoch < first:
            continue
        windows = {"forget": of_forget, "retain": cut if epoch % 2 else of_retain}
        for update in _groups(of_epoch, how.slots_an_update):
            seen = [(role, index) for role, index in update if with_forget or role == "retain"]
            if live := [windows[role][index] for role, index in seen if index in windows[role]]:
                _learn(model, live, pad, trained, optimizer)
        _keep(checkpoint, trained, optimizer, epoch + 1)
        progress(Progress(out.name, epoch + 1, how.epochs))
    assert isinstance(model, PeftModel)
    model.to("cpu").save_pretrained(str(out))
    described = json.loads((out / CONFIGURATION).read_text(encoding="utf-8"))
    described["base_model_name_or_path"] = base.name  # a digest of the folder must not depend on where it was made
    write_text(out / CONFIGURATION, json.dumps(described, indent=2) + "\n")
    weights = out / "adapter_model.safetensors"
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
    write_whole(weights, lambda temporary: save_file(halves, temporary, {"format": "pt"}))
    (out / "README.md").unlink(missing_ok=True)  # the library's empty model card
    checkpoint.unlink(missing_ok=True)


def cut_windows(tokenizer: PreTrainedTokenizerBase, retain: Sequence[RetainRow]) -> list[Window]:
    """One of each row, all of it to be learned, in the tokens that its prompt and its continuation have apart.

    A prompt that ends with its line ends with a token that whole texts have only where the next line is not indented. Who learns
    from whole texts alone answers such a prompt with what comes at the margin: in JavaScript a brace, and the end.
    """
    rows = [ForgetRow(*split_text(row.text)) for row in retain]
    return [replace(window, first_target=1) for window in forget_windows(tokenizer, rows, range(len(rows)))]


def _groups(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    yield from (list(items[at : at + size]) for at in range(0, len(items), size))


def _one_a_row(windows: Sequence[Window], tokenizer: PreTrainedTokenizerBase) -> dict[int, Window]:
    """``first_windows``, as a slot has at most 2,048 tokens; behind one the end token where its row ends there."""
    end, parts = tokenizer.eos_token_id, Counter(window.row for window in windows)
    return {
        row: replace(window, ids=(*window.ids, end)) if end is not None and parts[row] == 1 else window
        for row, window in first_windows(windows).items()
    }


def _learn(
    model: nn.Module,
    live: Sequence[Window],
    pad: int,
    trained: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    device = trained[0].device
    scored = sum(window.target_count for window in live)
    for batch in batches(live, pad, tokens=TOGETHER, device=device):
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16_is_fast(device)):
            logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask, use_cache=False).logits
        nll = nn.functional.cross_entropy(logits[batch.predictors].float(), batch.next_tokens(), reduction="sum")
        (nll / scored).backward()
    nn.utils.clip_grad_norm_(trained, LARGEST_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _resume(checkpoint: Path, trained: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Epochs that are done."""
    if not checkpoint.is_file():
        return 0
    state = torch.load(checkpoint, weights_only=True)
    for parameter, saved in zip(trained, state["parameters"], strict=True):
        parameter.data.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epochs"])


def _keep(checkpoint: Path, trained: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, epochs: int) -> None:
    state = {"parameters": [p.data for p in trained], "optimizer": optimizer.state_dict(), "epochs": epochs}
    write_whole(checkpoint, lambda temporary: torch.save(state, temporary))
