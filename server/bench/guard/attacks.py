"""The attacks of ``unbind bench attack`` on what may be offered: nothing, the guard, the module, both, and a filter of prompts.

Each attack is run once without a module and once with it; what guard and filter leave of the answers is read off them. Where the
guard steers, or holds the module's gate open, the answers become others, so these attacks are run again through the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from server import demo
from server.bench.attacks.attacked import Answer, Material, System
from server.bench.attacks.figures import fitted_on
from server.bench.attacks.known import Attack
from server.bench.attacks.outcome import outcome
from server.bench.attacks.registry import chosen
from server.bench.gate.world import World
from server.bench.guard.matcher import Judge
from server.bench.guard.prompt_filter import PromptFilter
from server.bench.guard.rows import SECRET
from server.bench.guard.steered import Steered
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.evaluation.completions import retain_prompts
from unbind_core.guard.book import GuardBook, GuardSet
from unbind_core.guard.index import RUN, Action, build_index
from unbind_core.guard.textguard import TextGuard
from unbind_core.module import UnbindModule
from unbind_core.progress import Progress, ProgressCallback
from unbind_core.rows import ForgetRow, spread
from unbind_core.running.generation import Sampling

NEW_TOKENS = 128
COLUMNS = ("nothing", "filter", "guard", "steered", "module", "both", "together")


def attack_figures(
    loaded: LoadedModel,
    module: UnbindModule,
    *,
    attacks: Sequence[str] | None,
    rows: int | None,
    progress: ProgressCallback,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """By attack and column what a client gets (``outcome``, and ``runs``: rows of which an answer holds a run of N lexemes), and
    by column the share of ordinary completions that are changed. ``both``: what a stopping guard lets out of the module's answers;
    ``together``: module and steering guard in one engine, as a takedown has them.
    """
    world = World.load(loaded)
    whole = fitted_on(world, module)
    some = [whole[at] for at in spread(range(len(whole)), rows or len(whole))]
    material = Material(loaded.tokenizer, some, world.test)
    ways = [attack for attack in chosen(attacks)[0] if not attack.name.startswith("strength")]
    compared = Compared(loaded, module, material, whole)
    found = {}
    with (
        closing(Steered.over(load_model(demo.BASE, demo.ADAPTER), compared.guards("steer"))) as steered,
        closing(Steered.over(load_model(demo.BASE, demo.ADAPTER), compared.guards("steer"), module)) as together,
    ):
        for done, attack in enumerate(ways, start=1):
            found[attack.name] = each = compared.attacked(attack, steered, together)
            report(f"{attack.name:22} " + ", ".join(f"{name} {_short(one)}" for name, one in each.items() if one))
            progress(Progress("attacks", done, len(ways)))
        changed = compared.ordinary(together)
    return {
        "rows": len(some),
        "run": RUN,
        "module": module.name,
        "by_attack": found,
        "ordinary_changed": changed,
    }


def _short(one: dict[str, Any]) -> str:
    recovery = one["mean_recovery"]
    return f"{one['runs']}/{one['spans_50']}/{'-' if recovery is None else round(recovery, 1)}"


class Compared:
    """What each offer leaves of answers."""

    def __init__(
        self, loaded: LoadedModel, module: UnbindModule, material: Material, whole: Sequence[ForgetRow]
    ) -> None:
        """``material`` has those rows that are attacked, of the ``whole`` that everything on offer protects."""
        self._material = material
        self._rows = [_text(row) for row in whole]
        self._judges = [Judge([_text(row)], RUN) for row in material.rows]
        self._name = module.name
        self._none, self._module = System("none", loaded), System("module", loaded, (module,))
        self._stop = self.guards("stop")
        self._filter = PromptFilter(self._rows)

    def guards(self, action: Action) -> GuardSet:
        """A guard over all rows."""
        index = build_index(self._rows, name=self._name, secret=SECRET, action=action)
        found = GuardBook.of(SECRET, [index]).select([self._name])
        assert found is not None
        return found

    def attacked(self, attack: Attack, steered: Steered, together: Steered) -> dict[str, dict[str, Any] | None]:
        """What one attack gets of each."""
        plain, under = attack.run(self._none, self._material), attack.run(self._module, self._material)
        answers: dict[str, list[Answer] | None] = {
            "nothing": plain,
            "filter": [self._refused(answer) for answer in plain],
            "guard": [self._stopped(answer) for answer in plain],
            "steered": steered.attacked(attack, self._material),
            "module": under,
            "both": [self._stopped(answer) for answer in under],
            "together": together.attacked(attack, self._material),
        }
        return {name: self._outcome(answers[name]) for name in COLUMNS}

    def ordinary(self, together: Steered) -> dict[str, float]:
        """The share of the held-out rows' greedy completions that are not what they are without anything."""
        tokenizer, rows = self._material.tokenizer, self._material.ordinary
        prompts, _ = retain_prompts(tokenizer, rows, range(len(rows)))
        plain, under = (system.complete(prompts, Sampling(NEW_TOKENS)) for system in (self._none, self._module))
        pairs = list(zip(prompts, plain, under, strict=True))
        beside = together.complete(prompts, Sampling(NEW_TOKENS))
        changed = {
            "filter": sum(self._filter.refuses(self._decoded(prompt)) for prompt, _, _ in pairs),
            "guard": sum(len(self._kept(prompt, output)) < len(output) for prompt, output, _ in pairs),
            "module": sum(one != other for _, one, other in pairs),
            "both": sum(list(self._kept(prompt, other)) != one for prompt, one, other in pairs),
            "together": sum(one != other for one, other in zip(plain, beside, strict=True)),
        }
        return {name: count / len(prompts) for name, count in changed.items()}

    def _refused(self, answer: Answer) -> Answer:
        if not self._filter.refuses(self._decoded(answer.ask.prompt)):
            return answer
        return replace(answer, output=(), chosen=None if answer.chosen is None else (False,) * len(answer.chosen))

    def _stopped(self, answer: Answer) -> Answer:
        return (
            answer
            if answer.chosen is not None
            else replace(answer, output=self._kept(answer.ask.prompt, answer.output))
        )

    def _kept(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[int, ...]:
        """The tokens whose text a stopping guard lets out."""
        guard = TextGuard(self._stop, lambda: self._decoded(prompt))
        whole = self._decoded(output)
        sent = guard.push(whole) + guard.flush()
        kept = tuple(output)
        while len(sent) < len(whole) and len(self._decoded(kept)) > len(sent):
            kept = kept[:-1]
        return kept

    def _outcome(self, answers: Sequence[Answer] | None) -> dict[str, Any] | None:
        if answers is None:
            return None
        held = {
            answer.ask.row
            for answer in answers
            if (judge := self._judges[answer.ask.row]).found(
                self._decoded(answer.output), judge.own(self._decoded(answer.ask.prompt))
            )
        }
        told = any(answer.chosen is not None for answer in answers)  # nothing is written then
        return {"runs": None if told else len(held), **outcome(answers)}

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._material.tokenizer.decode(list(ids), skip_special_tokens=True))


def _text(row: ForgetRow) -> str:
    return row.prompt + row.continuation
