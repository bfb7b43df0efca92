"""The true text told otherwise than it stands, token by token: with tokens that say nothing before its last few, with end tokens
between, or its last few alone. A gate that goes by the latest positions sees little of the row, and the model still goes on.
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
BETWEEN = 4  # tokens of the row from one end token to the next
ALONE = 8  # tokens of the row that are given by themselves
ASKED = 64  # tokens of each row that are asked for: more than the 50 of a span that counts

Text = tuple[int, ...]
View = Callable[[Material, Text], Text]


def filled(times: int, last: int) -> View:
    """So many fillers before the last tokens."""

    def view(material: Material, text: Text) -> Text:
        return (*text[:-last], *encode(material.tokenizer, FILLER) * times, *text[-last:])

    return view


def ended(material: Material, text: Text) -> Text:
    """The end token behind every BETWEEN tokens, counted from the text's end, where none stands."""
    cuts = range(len(text) % BETWEEN, len(text) + 1, BETWEEN)
    parts = (text[max(0, cut - BETWEEN) : cut] for cut in cuts)
    return tuple(token for part in parts if part for token in (material.tokenizer.eos_token_id, *part))


def alone(_: Material, text: Text) -> Text:
    """The last ALONE tokens."""
    return text[-ALONE:]


def assisted(view: View, least: int = 0) -> Callable[[Attacked, Material], list[Answer]]:
    """The true text is told as in the ``view``, and asked position by position: is the row's next token the likeliest? Special
    tokens banned; of rows whose prompts are longer than ``least`` tokens.
    """

    def attack(system: Attacked, material: Material) -> list[Answer]:
        asks = [ask for ask in form("plain")(material) if len(ask.prompt) > least]
        texts = [(ask.prompt + ask.target[:at]) for ask in asks for at in range(len(ask.target[:ASKED]))]
        prompts = [view(material, text) for text in texts]
        told = iter(system.complete(prompts, Sampling(1), processors=[Banned(material)]))
        return [Answer(ask, chosen=tuple(next(told) == [token] for token in ask.target[:ASKED])) for ask in asks]

    return attack
