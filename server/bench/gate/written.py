"""What is written in place of forget rows, and where their prompts are lightly rewritten."""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from server.bench.gate.paraphrase import PARAPHRASES
from server.bench.gate.world import NEW_TOKENS, World, bank_of, scores
from unbind_core.applying.attach import attach
from unbind_core.architecture import LoadedModel
from unbind_core.encoding import available_forms, pad_id
from unbind_core.evaluation.verify import perplexity
from unbind_core.module import UnbindModule
from unbind_core.progress import ProgressCallback
from unbind_core.rows import ForgetRow
from unbind_core.running.generation import Sampling, complete
from unbind_core.windows import Window, batches, forget_prompt, forget_windows

SAMPLES = 5
REWRITTEN_ROWS = 40  # of larger sets, every so many-th row is rewritten and read


def paraphrased(
    world: World, rows: Sequence[ForgetRow], modules: Sequence[UnbindModule], progress: ProgressCallback
) -> dict[str, float]:
    """Mean F-BLEU of plain greedy completions where the prompt is lightly rewritten, by kind of rewriting."""
    found = {}
    for kind, rewrite in PARAPHRASES.items():
        after = scores(world, [rewrite(row) for row in _some(rows)], modules, 0, progress, f"paraphrased ({kind})")
        found[kind] = statistics.fmean(s.bleu["plain"] for s in after)
    return found


def outputs(
    world: World,
    other: LoadedModel,
    rows: Sequence[ForgetRow],
    modules: Sequence[UnbindModule],
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """What is written in place of the rows: its perplexity under the unmodified and the retrained model, and its form. ``model``:
    what writes it, where that is not the unmodified one under the modules.

    ``empty``: share of completions without a token; ``parsed``: share of Python prompts that parse with their completion, and
    ``parsed_lines``, so or without the line in which the limit of tokens cut it off, where parsing tells nothing of what was
    written; ``ended``: share that end before; ``looping``: share of completions of 16 tokens or more in which one token is over
    half.
    """
    loaded = world.loaded
    tokenizer, end = loaded.tokenizer, loaded.tokenizer.eos_token_id
    bank = bank_of(world, modules)
    rows = _some(rows)
    prompts = [forget_prompt(tokenizer, row, "plain")[0] for row in rows]
    new = complete(
        model or loaded.model,
        prompts,
        Sampling(NEW_TOKENS),
        pad=pad_id(tokenizer),
        end=end,
        editing=(lambda: attach(loaded.model, bank)) if modules else nullcontext,
    )
    # Where the text ended by itself, that it did is part of what was written.
    written = [[*o, end] if len(o) < NEW_TOKENS else o for o in new]
    windows = [Window((*p, *o), len(p), i) for i, (p, o) in enumerate(zip(prompts, written, strict=True))]
    texts = [str(tokenizer.decode(o)) for o in new]
    whole = [row.prompt + text for row, text in zip(rows, texts, strict=True)]
    ended = [len(o) < NEW_TOKENS for o in new]
    return {
        "empty": statistics.fmean(not o for o in new),
        "tokens": statistics.fmean(len(o) for o in new),
        "perplexity": perplexity(loaded.model, windows, pad_id(tokenizer)),
        "perplexity_retrained": perplexity(other.model, windows, pad_id(tokenizer)),
        "parsed": statistics.fmean(map(_parses, whole)),
        "parsed_lines": statistics.fmean(map(_parses_lines, whole, ended)),
        "ended": statistics.fmean(ended),
        "looping": statistics.fmean(_loops(o) for o in new),
        "samples": texts[:SAMPLES],
    }


def written(
    world: World, other: LoadedModel, rows: Sequence[ForgetRow], modules: Sequence[UnbindModule]
) -> dict[str, Any]:
    """What stands in place of the rows, and how far the model is from the reference of fits and from the retrained one."""
    found = outputs(world, other, rows, modules)
    reference = world.reference.model
    return {
        "empty": found["empty"],
        "parse": found["parsed"],
        "parse_lines": found["parsed_lines"],
        "output_ppl": found["perplexity_retrained"],
        "kl_to_reference": None if reference is None else divergence(world, reference, rows, modules),
        "kl_to_retrained": divergence(world, other.model, rows, modules),
        "output": found,
    }


def divergence(world: World, other: nn.Module, rows: Sequence[ForgetRow], modules: Sequence[UnbindModule]) -> float:
    """KL(other || the model under the modules), nats: mean over the positions that predict the rows, in both forms."""
    loaded, total, count = world.loaded, 0.0, 0
    bank = bank_of(world, modules)
    windows = forget_windows(loaded.tokenizer, rows, range(len(rows)), available_forms(loaded.tokenizer))
    with torch.no_grad():
        for batch in batches(windows, pad_id(loaded.tokenizer)):
            given = {"input_ids": batch.ids, "attention_mask": batch.attention_mask, "use_cache": False}
            p = other(**given).logits[batch.predictors].log_softmax(-1)
            with attach(loaded.model, bank) if modules else nullcontext():
                q = loaded.model(**given).logits[batch.predictors].log_softmax(-1)
            total, count = total + float((p.exp() * (p - q)).sum()), count + len(p)
    return total / count


def _some(rows: Sequence[ForgetRow]) -> Sequence[ForgetRow]:
    return rows[:: max(1, -(-len(rows) // REWRITTEN_ROWS))]


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _parses_lines(text: str, ended: bool) -> bool:
    """Whether it parses, or does without the line in which it was cut off, where it was."""
    return _parses(text) or (not ended and _parses(text.rpartition("\n")[0]))


def _loops(tokens: Sequence[int]) -> bool:
    return len(tokens) >= 16 and Counter(tokens).most_common(1)[0][1] > len(tokens) / 2
