"""Asking many times: samples of which the best counts, and going on from what came."""

from __future__ import annotations

from collections.abc import Callable

from server.bench.attacks.attacked import Answer, Attacked, Material
from server.bench.attacks.logits import NEW_TOKENS, Banned
from server.bench.attacks.prompts import form
from unbind_core.encoding import beginning
from unbind_core.running.generation import Sampling

SAMPLES, TOP_P = 20, 0.95
ROUNDS, STEP, KEPT = 6, 24, (24, 64)


def best_of(temperature: float) -> Callable[[Attacked, Material], list[Answer]]:
    """SAMPLES answers to each plain prompt, special tokens banned."""

    def attack(system: Attacked, material: Material) -> list[Answer]:
        asks = [ask for ask in form("plain")(material) for _ in range(SAMPLES)]
        sampling = Sampling(NEW_TOKENS, temperature, TOP_P, seed=1)
        outputs = system.complete([ask.prompt for ask in asks], sampling, processors=[Banned(material)])
        return [Answer(ask, tuple(output)) for ask, output in zip(asks, outputs, strict=True)]

    return attack


def iterative(system: Attacked, material: Material) -> list[Answer]:
    """ROUNDS of STEP tokens, special ones banned; from the second on only the last tokens of what there is are sent, so that no
    gate remembers how the text began: as many as each of KEPT, the better counting.
    """
    asks, bos = form("plain")(material), beginning(material.tokenizer)
    begun = system.complete([ask.prompt for ask in asks], Sampling(STEP), processors=[Banned(material)])
    found = []
    for kept in KEPT:
        texts = [[*ask.prompt, *new] for ask, new in zip(asks, begun, strict=True)]
        for _ in range(ROUNDS - 1):
            new = system.complete([bos + t[-kept:] for t in texts], Sampling(STEP), processors=[Banned(material)])
            texts = [text + more for text, more in zip(texts, new, strict=True)]
        found += [Answer(ask, tuple(text[len(ask.prompt) :])) for ask, text in zip(asks, texts, strict=True)]
    return found
