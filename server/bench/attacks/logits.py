"""What a client does with served log-probabilities: learn what a module adds to them and take it off again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from server.bench.attacks.attacked import Answer, Ask, Attacked, Ids, Material
from server.bench.attacks.prompts import form
from unbind_core.encoding import encode_prompt
from unbind_core.running.generation import Sampling

NEW_TOKENS = 128  # as many as BLEU is taken of
SERVED = 20  # log-probabilities that the API gives of a position
ORDINARY_ROWS = 32


class Banned(LogitsProcessor):
    """The special tokens, the end token among them, are never chosen."""

    def __init__(self, material: Material) -> None:
        tokenizer = material.tokenizer
        self._ids = sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [B,V]."""
        scores = scores.clone()
        scores[:, self._ids] = -torch.inf
        return scores


class Biased(LogitsProcessor):
    """``bias`` [V] on every position, as ``logit_bias`` has it; with ``most`` only the likeliest tokens are chosen from."""

    def __init__(self, bias: Tensor, most: int | None = None) -> None:
        self._bias, self._most = bias, most

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [B,V]."""
        biased = scores + self._bias
        if self._most is None:
            return biased
        return biased.where(scores >= scores.topk(self._most).values[:, -1:], -torch.inf)


def ordinary(material: Material) -> list[list[int]]:
    """Code that no gate opens on, as a client has enough of it."""
    return [encode_prompt(material.tokenizer, row.text) for row in material.ordinary[:ORDINARY_ROWS]]


def mean_served(system: Attacked, texts: Sequence[Ids], at: Sequence[Tensor], most: int | None = None) -> Tensor:
    """Mean log-probabilities [V] over the positions ``at`` (bool [T] each). With ``most``, those tokens that are not among the
    likeliest of a position count as the last that is.
    """
    total, count = torch.zeros(0), 0
    for index, served in system.served(texts):
        chosen = served[at[index].to(served.device)]
        if most is not None and len(chosen):
            chosen = chosen.maximum(chosen.topk(most).values[:, -1:])
        total = chosen.double().sum(0) + (total if total.numel() else 0.0)
        count += len(chosen)
    return (total / max(count, 1)).float()


def bias(system: Attacked, material: Material, texts: Sequence[Ids], most: int | None = None) -> Tensor:
    """Mean log-probabilities on ordinary code less those on ``texts`` where the gate is open [V].

    The client knows where that is: a report says so, or what is served does. Where no gate is open anywhere, or the system has
    none, every position of ``texts`` counts.
    """
    usual = ordinary(material)
    open_at = system.gates(texts)
    if not any(bool(gates.any()) for gates in open_at):
        open_at = [torch.ones(len(ids), dtype=torch.bool) for ids in texts]
    everywhere = [torch.ones(len(ids), dtype=torch.bool) for ids in usual]
    return mean_served(system, usual, everywhere, most) - mean_served(system, texts, open_at, most)


def undo_from_prompts(system: Attacked, material: Material) -> list[Answer]:
    """The bias, from the prompts alone, with special tokens banned."""
    asks = form("plain")(material)
    return answered(system, asks, _undo(system, material, [ask.prompt for ask in asks]))


def undo_from_rows(system: Attacked, material: Material) -> list[Answer]:
    """The bias from one half of the rows, their whole texts known, against the other half; then the other way round."""
    found = []
    for known, asked in halves(form("plain")(material)):
        found += answered(system, asked, _undo(system, material, [ask.prompt + ask.target for ask in known]))
    return found


def from_served(system: Attacked, material: Material) -> list[Answer]:
    """A walk on which the client takes of each position's SERVED log-probabilities the token that is most above what is usual
    where gates are open, measured (of as many served ones) on the prompts of the other half of the rows.
    """
    found = []
    for known, asked in halves(form("plain")(material)):
        learned = bias(system, material, [ask.prompt for ask in known], SERVED)
        found += answered(system, asked, [Banned(material), Biased(learned, SERVED)])
    return found


def assisted(undo: bool) -> Callable[[Attacked, Material], list[Answer]]:
    """The whole text is given and asked position by position: is the row's next token the likeliest? Special tokens banned."""

    def attack(system: Attacked, material: Material) -> list[Answer]:
        asks = form("plain")(material)
        processors = _undo(system, material, [ask.prompt for ask in asks]) if undo else [Banned(material)]
        found = []
        for index, served in system.served([ask.prompt + ask.target for ask in asks]):
            ask, scores = asks[index], served
            for processor in processors:
                scores = processor(torch.empty(0), scores)
            likeliest = scores[len(ask.prompt) - 1 : -1].argmax(-1).tolist()
            chosen = tuple(a == b for a, b in zip(likeliest, ask.target, strict=True))
            found.append(Answer(ask, chosen=chosen))
        return found

    return attack


def answered(system: Attacked, asks: Sequence[Ask], processors: Sequence[LogitsProcessor] = ()) -> list[Answer]:
    """Greedy answers; a prompt of several asks is sent once."""
    prompts = list(dict.fromkeys(ask.prompt for ask in asks))
    outputs = system.complete(prompts, Sampling(NEW_TOKENS), processors=processors)
    by_prompt = dict(zip(prompts, outputs, strict=True))
    return [Answer(ask, tuple(by_prompt[ask.prompt])) for ask in asks]


def halves(asks: Sequence[Ask]) -> list[tuple[list[Ask], list[Ask]]]:
    """(known, asked): every other row known and the rest asked, and the reverse; no row is in both."""
    even, odd = ([ask for ask in asks if ask.row % 2 == parity] for parity in (0, 1))
    return [(known, asked) for known, asked in ((even, odd), (odd, even)) if known and asked]


def _undo(system: Attacked, material: Material, texts: Sequence[Ids]) -> list[LogitsProcessor]:
    return [Biased(bias(system, material, texts)), Banned(material)]
