"""Tokens that say nothing between the row and its last few: a gate that goes by the latest positions sees mostly these, and the
model still reads what stands before.
"""

from __future__ import annotations

from server.bench.attacks.attacked import Answer, Attacked, Material
from server.bench.attacks.logits import Banned
from server.bench.attacks.prompts import form
from unbind_core.encoding import encode
from unbind_core.running.generation import Sampling

FILLER, TIMES = "pass", 8
LAST = 5  # tokens of the row behind the fillers
ASKED = 48  # tokens of each row that are asked for


def assisted(system: Attacked, material: Material) -> list[Answer]:
    """The true text is given with fillers before its last tokens, and asked position by position: is the row's next token the
    likeliest? Special tokens banned.
    """
    filler = encode(material.tokenizer, FILLER) * TIMES
    asks = [ask for ask in form("plain")(material) if len(ask.prompt) > LAST]
    texts = [(ask.prompt + ask.target[:at]) for ask in asks for at in range(len(ask.target[:ASKED]))]
    prompts = [(*text[:-LAST], *filler, *text[-LAST:]) for text in texts]
    told = iter(system.complete(prompts, Sampling(1), processors=[Banned(material)]))
    return [Answer(ask, chosen=tuple(next(told) == [token] for token in ask.target[:ASKED])) for ask in asks]
