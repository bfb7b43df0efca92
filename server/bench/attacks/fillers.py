"""Tokens that say nothing between the row and its last few: a gate that goes by the latest positions sees mostly these, and the
model still reads what stands before.
"""

from __future__ import annotations

from collections.abc import Callable

from server.bench.attacks.attacked import Answer, Attacked, Material
from server.bench.attacks.logits import Banned
from server.bench.attacks.prompts import form
from unbind_core.encoding import encode
from unbind_core.running.generation import Sampling

FILLER = "pass"
# Fillers, and tokens of the row behind them: as many as close a window of 8, and as many as leave little of one of 64.
FEW, MANY = (8, 5), (32, 10)
ASKED = 48  # tokens of each row that are asked for


def assisted(times: int, last: int) -> Callable[[Attacked, Material], list[Answer]]:
    """The true text is given with so many fillers before its last tokens, and asked position by position: is the row's next token
    the likeliest? Special tokens banned.
    """

    def attack(system: Attacked, material: Material) -> list[Answer]:
        filler = encode(material.tokenizer, FILLER) * times
        asks = [ask for ask in form("plain")(material) if len(ask.prompt) > last]
        texts = [(ask.prompt + ask.target[:at]) for ask in asks for at in range(len(ask.target[:ASKED]))]
        prompts = [(*text[:-last], *filler, *text[-last:]) for text in texts]
        told = iter(system.complete(prompts, Sampling(1), processors=[Banned(material)]))
        return [Answer(ask, chosen=tuple(next(told) == [token] for token in ask.target[:ASKED])) for ask in asks]

    return attack
