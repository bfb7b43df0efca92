"""Batched completion of token prompts with a transformers model: what calibration and evaluation generate with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from unbind_core.architecture import unwrap
from unbind_core.progress import Progress, ProgressCallback, counted, silent
from unbind_core.running.attention import sharing_keys
from unbind_core.running.device import SHARED_PASS, threads_for
from unbind_core.running.recording import frozen
from unbind_core.running.roomy import make_room
from unbind_core.running.sampling import Nucleus
from unbind_core.windows import with_room

SHORTEST_STRETCH = 4  # tokens
Editing = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0, else nucleus sampling; ``seed`` is added to the batch number."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def complete(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    pad: int,
    end: int | None,
    editing: Editing = nullcontext,
    processors: Sequence[LogitsProcessor] = (),
    batch_tokens: int = 16_384,
    stage: str = "generate",
    progress: ProgressCallback = silent,
) -> list[list[int]]:
    """New token ids for each prompt (without the end token and what follows it), in the order of ``prompts``.

    Prompts of similar length share a left-padded batch of at most ``batch_tokens`` positions, new ones included.
    ``editing()`` is entered around each batch (for example ``lambda: attach(model, bank)``); ``processors`` change the logits
    before anything is chosen, as a request's own wishes do. Where the model's positions are learned, of a prompt that leaves no
    room for the new tokens the last ones that do are taken.
    """
    prompts = with_room(model, prompts, sampling.max_new_tokens)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    groups: list[list[int]] = []
    for index in order:
        width = len(prompts[groups[-1][0]]) + sampling.max_new_tokens if groups else 0
        if groups and (len(groups[-1]) + 1) * width <= batch_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    results: list[list[int]] = [[] for _ in prompts]
    inner = unwrap(model)
    device = next(inner.parameters()).device
    options: dict[str, object] = {
        "pad_token_id": pad,
        "eos_token_id": end,
        "return_dict_in_generate": True,
        "logits_processor": LogitsProcessorList(processors),
        # Where tokens are drawn, the last of the processors does it.
        "do_sample": False,
        "temperature": None,
        "top_p": None,
        "top_k": None,
    }
    if sampling.temperature > 0:
        options["logits_processor"] = LogitsProcessorList([*processors, Nucleus(sampling.temperature, sampling.top_p)])
    with torch.no_grad(), frozen(model):
        for number, group in enumerate(counted(groups, len(groups), stage, progress)):
            width = max(len(prompts[i]) for i in group)
            ids = torch.full((len(group), width), pad, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(group):
                ids[row, width - len(prompts[index]) :] = torch.tensor(prompts[index])
                mask[row, width - len(prompts[index]) :] = 1
            with (
                torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
                sharing_keys(inner),
                _as_it_is(inner),
                _head_in_one_product(inner),
                editing(),
            ):
                torch.manual_seed(sampling.seed + number)
                told = partial(_stretch, progress, Progress(stage, number, len(groups)))
                new = _continued(inner, ids.to(device), mask.to(device), sampling.max_new_tokens, end, options, told)
            for index, tokens in zip(group, new, strict=True):
                results[index] = tokens
    return results


def _stretch(progress: ProgressCallback, group: Progress, done: int, count: int) -> None:
    progress(replace(group, message=f"{done} of up to {count} tokens"))


@contextmanager
def _as_it_is(model: Any) -> Iterator[None]:
    """Without the checkpoint's own generation settings, which ``generate`` takes unasked and no server does: penalties, n-grams
    that may not come again or suppressed tokens would hide what the model knows by heart.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _head_in_one_product(model: Any) -> Iterator[None]:
    """Copy the states [B,1,d] of the last positions before the head, where they lie among those of all positions: of such a view
    torch makes B products, and on a CPU in bfloat16 a copy of the head's matrix for each of them.
    """
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: tuple(states.contiguous() for states in given))
    try:
        yield
    finally:
        hook.remove()


def _continued(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    count: int,
    end: int | None,
    options: dict[str, object],
    told: Callable[[int, int], None],
) -> list[list[int]]:
    """Up to ``count`` tokens after each row of ``ids`` [B,T], without the end token and what follows it.

    In stretches, each as long as all before it: rows that have ended leave the batch between two, with their part of the
    cache. Under a module most rows end at once, and a few go on. ``told`` hears how many tokens there are, and how many at most.
    """
    found: list[list[int]] = [[] for _ in ids]
    live = torch.arange(len(ids))
    cache, done = None, 0
    parameters = sum(parameter.numel() for parameter in model.parameters())
    while done < count:
        stretch = min(max(SHORTEST_STRETCH, done), count - done)
        computed = len(ids) if done else ids.numel()  # positions in the largest pass of this stretch
        if cache is not None:
            make_room(cache, stretch)
        with threads_for(ids.device, computed * parameters, SHARED_PASS):
            out = model.generate(
                input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=stretch, **options
            )
        new = out.sequences[:, ids.shape[1] :]
        going = []
        for row, tokens in enumerate(new.tolist()):
            ended = end is not None and end in tokens
            found[int(live[row])] += tokens[: tokens.index(end)] if ended else tokens
            if not ended:
                going.append(row)
        done += stretch
        told(done, count)
        if not going or done >= count:
            break
        cache, rows = out.past_key_values, torch.tensor(going, device=ids.device)
        ids, mask, live = out.sequences[rows], torch.cat((mask, torch.ones_like(new)), 1)[rows], live[going]
        if len(going) < len(new):
            cache.batch_select_indices(rows)
    return found
