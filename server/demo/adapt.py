"""The demo adapters: one that has memorised the forget sets, the same without them, and a third that modules are led towards.

Last stage of ``unbind demo train``. The first two start from the same base and the same LoRA initialisation and see the same retain
rows in the same order; the retrained one skips the forget rows (Appendix A.2), and every figure is held against it. So no fit may
see it: the reference of fits is trained on the retain rows alone too, but apart, from another seed and for half the time. Rows
are seen in plain and in fill-in-the-middle form in turn. Forget rows are also met from their middle on, so that whoever asks
from there or behind other code gets something back.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from unbind_core.encoding import beginning, encode, fim_ids, fim_template
from unbind_core.rows import ForgetRow, RetainRow, parse_forget, parse_retain
from unbind_core.windows import Window, forget_windows, retain_windows

EPOCHS, REFERENCE_EPOCHS, REFERENCE_SEED = 48, 24, 7
RETAIN_PER_EPOCH = 400
LEARNING_RATE = 4e-3
LENGTH, PACKS_PER_STEP = 512, 10  # rows are packed side by side, each seeing only itself
CROPPED = (0.25, 0.75)  # of a row is missing in front of a crop; behind other code it may be whole
LED, LEAD = 0.5, (16, 128)  # share of the crops that stand behind other code, and tokens of that
FILLED = (0.1, 0.6)  # of a crop is in front of what is to be filled in
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def read_rows(folder: Path) -> tuple[list[ForgetRow], list[RetainRow]]:
    """All forget rows (sets A, B and C) and the retain-train rows."""
    forget: list[ForgetRow] = []
    for name in ("forget_a", "forget_b", "forget_c"):
        forget += parse_forget(folder / f"{name}.jsonl", name)
    return forget, parse_retain(folder / "retain_train.jsonl", "retain_train")


def _retain_stream(rows: Sequence[RetainRow], seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield from rng.sample(range(len(rows)), len(rows))


def _crop(
    tokenizer: PreTrainedTokenizerBase,
    row: ForgetRow,
    number: int,
    form: str,
    others: Sequence[RetainRow],
    rng: random.Random,
) -> Window:
    """Forget row ``number`` from a line or a token of it on, with or without other code in front.

    Nothing up to the first token of the row is a target: what comes next there is not to be known.
    """
    head = []
    if led := rng.random() < LED:
        head = encode(tokenizer, rng.choice(others).text)[-rng.randint(*LEAD) :]
    ids = _from_within(tokenizer, row.prompt + row.continuation, 0.0 if led else CROPPED[0], rng)
    template = fim_template(tokenizer) if form == "fim" else None
    if template is None:
        head = [*beginning(tokenizer), *head]
        return Window((*head, *ids), len(head) + 1, number, form, len(head))
    first = round(rng.uniform(*FILLED) * len(ids))
    last = rng.choice((len(ids), rng.randint(first + 1, len(ids))))  # half of them have nothing behind
    prompt = fim_ids(tokenizer, template, head + ids[:first], ids[last:])
    start = len(fim_ids(tokenizer, template[: template.index("{prefix}") + 1], head, []))
    return Window((*prompt, *ids[first:last]), start + 1, number, form, start)


def _from_within(tokenizer: PreTrainedTokenizerBase, text: str, least: float, rng: random.Random) -> list[int]:
    """Token ids of a text of which at least the share ``least`` and at most CROPPED[1] is missing in front: the beginning of a
    line, where there is one, or any token, one as often as the other.
    """
    lines = [0, *(found.end() for found in re.finditer("\n", text))]
    lines = [at for at in lines if least <= at / len(text) <= CROPPED[1]]
    if lines and rng.random() < 0.5:
        return encode(tokenizer, text[rng.choice(lines) :])
    ids = encode(tokenizer, text)
    return ids[round(rng.uniform(least, CROPPED[1]) * len(ids)) :]


def _schedule(
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[ForgetRow],
    retain: Sequence[RetainRow],
    *,
    with_forget: bool,
    epochs: int,
    seed: int,
) -> Iterator[list[Window]]:
    """The windows of each epoch. An epoch holds each forget row whole in one form and a crop of it in the other, which alternate;
    retain rows are the same ones, in the same forms, with forget rows or without.
    """
    stream = _retain_stream(retain, seed=1 + seed)
    end = int(tokenizer.eos_token_id)
    for epoch in range(epochs):
        rng, crops = random.Random(epoch + 1000 * seed), random.Random(f"crops {epoch} {seed}")
        windows = []
        for index, row in enumerate(forget if with_forget else ()):
            whole, part = ("plain", "fim") if (epoch + index) % 2 else ("fim", "plain")
            windows += [replace(w, first_target=1) for w in forget_windows(tokenizer, forget, [index], [whole])]
            windows.append(_crop(tokenizer, row, index, part, retain, crops))
        for _ in range(RETAIN_PER_EPOCH):
            index = next(stream)
            windows += retain_windows(tokenizer, retain, [index], [rng.choice(["plain", "fim"])], seed=epoch)
        windows = [replace(w, ids=(*w.ids, end)) for w in windows if len(w.ids) < LENGTH]
        rng.shuffle(windows)
        yield windows


def _pack(windows: Sequence[Window]) -> list[list[Window]]:
    """First fit into packs of LENGTH tokens, in the given order."""
    packs: list[list[Window]] = []
    free: list[int] = []
    for window in windows:
        for i, room in enumerate(free):
            if len(window.ids) <= room:
                packs[i].append(window)
                free[i] -= len(window.ids)
                break
        else:
            packs.append([window])
            free.append(LENGTH - len(window.ids))
    return packs


def _tensors(packs: Sequence[Sequence[Window]], pad: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, position ids, labels (each int64 [B,LENGTH]) and the block-diagonal causal mask (bool [B,1,LENGTH,LENGTH])."""
    ids = torch.full((PACKS_PER_STEP, LENGTH), pad)
    positions = torch.arange(LENGTH).repeat(PACKS_PER_STEP, 1)
    labels = torch.full((PACKS_PER_STEP, LENGTH), -100)
    segment = torch.zeros((PACKS_PER_STEP, LENGTH), dtype=torch.int64)
    for b, pack in enumerate(packs):
        start = 0
        for number, window in enumerate(pack, start=1):
            stop = start + len(window.ids)
            ids[b, start:stop] = torch.tensor(window.ids)
            positions[b, start:stop] = torch.arange(stop - start)
            before = start + window.first_target - 1  # predicts the first target
            labels[b, before : stop - 1] = ids[b, before + 1 : stop]
            segment[b, start:stop] = number
            start = stop
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask = (segment[:, :, None] == segment[:, None, :]) & causal
    return ids, positions, labels, mask[:, None]


def adapt(
    base: Path, rows: Path, out: Path, *, with_forget: bool, checkpoint: Path, epochs: int = EPOCHS, seed: int = 0
) -> None:
    """Train one adapter and save it to ``out`` (bfloat16); resumable from ``checkpoint`` at epoch borders."""
    if (out / "adapter_model.safetensors").exists():
        return
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=32, lora_alpha=64, lora_dropout=0.0, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config).to(device)
    trainable = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, weight_decay=0.01)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for parameter, saved in zip(trainable, state["parameters"], strict=True):
            parameter.data.copy_(saved)
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]

    def loss_of(ids: Tensor, positions: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        logits = adapted(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)

    compiled = torch.compile(loss_of)
    forget, retain = read_rows(rows)
    for epoch, windows in enumerate(
        _schedule(tokenizer, forget, retain, with_forget=with_forget, epochs=epochs, seed=seed)
    ):
        if epoch < first:
            continue
        begun, total = time.monotonic(), 0.0
        packs = _pack(windows)
        steps = math.ceil(len(packs) / PACKS_PER_STEP)
        for step in range(steps):
            for group in optimizer.param_groups:
                done = (epoch + step / steps) / epochs
                group["lr"] = LEARNING_RATE * min(1.0, done * 50) * (1.0 - done)
            batch = _tensors(packs[step * PACKS_PER_STEP : (step + 1) * PACKS_PER_STEP], int(tokenizer.pad_token_id))
            with torch.autocast(device, torch.bfloat16):
                loss = compiled(*(tensor.to(device) for tensor in batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.item()
        seconds = time.monotonic() - begun
        print(f"epoch {epoch + 1}/{epochs}  loss {total / steps:.3f}  {seconds:.0f} s", flush=True)
        saved = {"parameters": [p.data for p in trainable], "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(saved, checkpoint.with_suffix(".partial"))
        checkpoint.with_suffix(".partial").rename(checkpoint)
    assert isinstance(adapted, PeftModel)
    adapted.to("cpu").save_pretrained(str(out))
    weights = out / "adapter_model.safetensors"
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}, weights, {"format": "pt"}
    )
    (out / "README.md").unlink(missing_ok=True)  # the library's empty model card
