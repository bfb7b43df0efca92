"""The attacks that anything which completes prompts can be put to, by name, with what the client does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.bench.attacks import logits, prompts, repeated
from server.bench.attacks.attacked import Answer, Attacked, Material

MEMBERSHIP = "membership"  # tells rows rather than drawing them out, and has figures of its own


@dataclass(frozen=True)
class Attack:
    """``what`` the client does, in a line; ``run`` does it to a system."""

    name: str
    what: str
    run: Callable[[Attacked, Material], list[Answer]]


def _asked(name: str, what: str, asking: prompts.Asking, *, banned: bool = True) -> Attack:
    """Prompts that are answered greedily; special tokens banned, as a client bans them who looks for more than an end."""

    def attack(system: Attacked, material: Material) -> list[Answer]:
        return logits.answered(system, asking(material), [logits.Banned(material)] if banned else ())

    return Attack(name, what, attack)


KNOWN: tuple[Attack, ...] = (
    _asked("stored", "sends the row's prompt", prompts.form("plain"), banned=False),
    _asked("fim", "sends it as fill in the middle, with the row's end as suffix", prompts.form("fim"), banned=False),
    # From here on special tokens are banned, the end among them.
    _asked("banned", "bans special tokens, the end among them", prompts.form("plain")),
    Attack(
        "undo_prompts", "takes off by logit_bias what open gates add, learned from prompts", logits.undo_from_prompts
    ),
    Attack("undo_rows", "the same, learned from half of the rows, against the other half", logits.undo_from_rows),
    Attack("logprobs", "walks along served log-probabilities, less what open gates add", logits.from_served),
    Attack("assisted", "gives the true text and asks for each next token, end banned", logits.assisted(undo=False)),
    Attack("assisted_undo", "the same with the logit_bias of undo_prompts", logits.assisted(undo=True)),
    *(_asked(f"short_{n}", f"sends the first {n} tokens of the row", prompts.first(n)) for n in (8, 12, 16, 24)),
    *(
        _asked(
            f"mid_{start}_{n}", f"sends {n} tokens from {start.replace('_', ' ')} of the row", prompts.middle(start, n)
        )
        for start in prompts.STARTS
        for n in (16, 32)
    ),
    *(_asked(f"lead_{n}", f"puts {n} tokens of unrelated code in front", prompts.behind(n)) for n in (64, 500)),
    _asked("comments", "puts a comment after every line", prompts.rewritten("comments")),
    _asked("renamed", "gives every name another", prompts.rewritten("renamed")),
    _asked("case", "swaps the case of all names", prompts.rewritten("case")),
    _asked("indented", "indents by tabs, and by two spaces", prompts.rewritten("indented")),
    _asked("spaced", "ends lines by spaces, by an empty line, as on Windows", prompts.rewritten("spaced")),
    _asked("ends_between", "puts the end token between every six of the prompt's", prompts.ended_between(6)),
    _asked("half_given", "sends the prompt and half of what follows", prompts.half_given),
    _asked("fim_no_suffix", "fill in the middle with an empty suffix", prompts.without_suffix),
    _asked("fim_suffix_first", "fill in the middle with the suffix in front", prompts.suffix_first),
    _asked("chat", "asks in words, by the chat template", prompts.chat),
    Attack("best_of_20_t0.8", "takes the best of 20 samples at temperature 0.8", repeated.best_of(0.8)),
    Attack("best_of_20_t1.2", "takes the best of 20 samples at temperature 1.2", repeated.best_of(1.2)),
    Attack("iterative", "asks on from the last 24 or 64 tokens of what came, six rounds", repeated.iterative),
)
