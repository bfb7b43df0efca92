"""The canaries of a server by the clock: of each active module a few prompts, one at a time, where clients leave a slot."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from server.engine.refusals import EngineStopped, PromptTooLong, QueueFull
from server.errors import ApiError
from server.probing.asking import Answer, Displaced, ask, room
from server.probing.results import Outcome, Probe
from server.probing.texts import Row, Texts
from server.registry.store import StoredModule
from server.service import Service

log = logging.getLogger("unbind.canary")
TICK_SECONDS = 1.0  # between two looks at what is due
NOT_KEPT = "its forget rows are not kept here"
NO_RETAIN = "this server has no retain rows (retain_test)"
NOT_APPLIED = "the module was not applied"
# what is wrong with the answers to the prompts so far: "" for nothing, None where more must be asked to tell, if there is more
Judge = Callable[[Sequence[str], Sequence[Answer], bool], str | None]
_Asked = tuple[list[str], Judge, str]  # prompts, the judge of their answers, and why there are none


class Rounds:
    """Runs as long as the server does. A version that was not tried yet is due at once."""

    def __init__(self, served: Service) -> None:
        self._served, self._every = served, served.settings.canary_seconds
        self._texts = Texts(served.settings)
        self._due: dict[tuple[str, str], float] = {}  # name and digest -> when it is tried again
        served.canaries.pending = True

    async def run(self) -> None:
        """Try what is due, over and over, until the server ends."""
        while not await self._served.ends_within(TICK_SECONDS):
            if self._served.ready:
                with suppress(_Ending):
                    await self.once()
                    self._served.canaries.pending = False

    async def once(self) -> None:
        """Try each module that is due."""
        active = {
            (name, stored.digest): stored
            for name, stored in self._served.offer.scan.modules.items()
            if not stored.shadow
        }
        self._due = {version: due for version, due in self._due.items() if version in active}
        self._served.canaries.keep([name for name, _ in active])
        for version, stored in active.items():
            if self._due.get(version, 0.0) <= time.monotonic():
                self._due[version] = time.monotonic() + self._every
                await self._try(stored)

    async def _try(self, stored: StoredModule) -> None:
        name, digest, found = stored.module.name, stored.digest, self._served.canaries
        probes: tuple[tuple[Probe, Callable[[StoredModule], _Asked]], ...] = (
            ("extraction", self._extraction),
            ("short", self._short),
            ("control", self._control),
        )
        for probe, read in probes:
            try:
                prompts, judge, missing = await asyncio.to_thread(read, stored)
            except Exception as error:  # noqa: BLE001 - of these rows; what it says may hold pieces of them
                self._tell(stored, probe, Outcome("error", 0.0, time.time(), f"its rows: {type(error).__name__}"))
                continue
            if not prompts:
                found.left_out(name, digest, probe, missing)
                continue
            self._tell(stored, probe, await self._outcome(stored, prompts, judge))

    def _extraction(self, stored: StoredModule) -> _Asked:
        rows = self._texts.rows(stored.module)
        return [row.prompt for row in rows], Held(rows, gate=True), NOT_KEPT

    def _short(self, stored: StoredModule) -> _Asked:
        rows = self._texts.rows(stored.module)
        return [row.short for row in rows], Held(rows, gate=False), NOT_KEPT

    def _control(self, _: StoredModule) -> _Asked:
        return self._texts.controls(), left_alone, NO_RETAIN

    async def _outcome(self, stored: StoredModule, prompts: Sequence[str], judge: Judge) -> Outcome:
        seconds, answers = 0.0, list[Answer]()
        wrong: str | None = None
        for number, prompt in enumerate(prompts, start=1):
            try:
                answer, took = await self._answered(stored, prompt)
            except _Ending:
                raise
            except Exception as error:  # noqa: BLE001 - what a client would be refused with; a canary must not end the others
                if not self._served.ready:
                    raise _Ending from None
                return Outcome("error", seconds, time.time(), _refusal(error))
            seconds += took
            answers.append(answer)
            wrong = judge(prompts, answers, number == len(prompts))
            if wrong is not None:
                break
        return Outcome("miss" if wrong else "hit", seconds, time.time(), wrong or "")

    async def _answered(self, stored: StoredModule, prompt: str) -> tuple[Answer, float]:
        """The answer and its seconds, once there is room; begun again where a client took it. Raises TimeoutError after a while."""
        until = time.monotonic() + self._every
        while time.monotonic() < until:
            if room(self._served):
                begun = time.monotonic()
                with suppress(Displaced):
                    return await ask(self._served, stored, prompt), time.monotonic() - begun
            if await self._served.ends_within(TICK_SECONDS):
                raise _Ending
        raise TimeoutError(f"clients had every slot for {self._every:g} s")

    def _tell(self, stored: StoredModule, probe: Probe, outcome: Outcome) -> None:
        name = stored.module.name
        before = self._served.canaries.found(name, stored.digest, probe, outcome)
        if outcome.result == "miss" and before != "miss":
            log.error("module '%s': its canary misses (%s: %s)", name, probe, outcome.reason)
        elif outcome.result == "error" and before != "error":
            log.warning("module '%s': its canary could not be run (%s: %s)", name, probe, outcome.reason)
        elif outcome.result == "hit" and before not in (None, "hit"):
            log.info("module '%s': its canary hits again (%s)", name, probe)


class _Ending(Exception):
    """The server ends."""


class Held:
    """That none of the rows comes back; with ``gate``, that the gate opened on one of them at least."""

    def __init__(self, rows: Sequence[Row], *, gate: bool) -> None:
        self._rows, self._gate = rows, gate

    def __call__(self, prompts: Sequence[str], answers: Sequence[Answer], last: bool) -> str | None:
        place, answer = len(answers) - 1, answers[-1]
        if not answer.applied:
            return NOT_APPLIED
        if answer.guarded:
            return "its guard had to hold what the module let through"
        if self._rows[place].recited(prompts[place], answer.text):
            return "an answer recites a row" + ("" if answer.opened else " under a closed gate")
        if not last:
            return None
        return "its gate stayed closed" if self._gate and not any(each.opened for each in answers) else ""


def left_alone(_: Sequence[str], answers: Sequence[Answer], last: bool) -> str | None:
    """That one answer came about under a closed gate, which changes no bit of it."""
    if not answers[-1].applied:
        return NOT_APPLIED
    if not answers[-1].opened:
        return ""
    return "its gate opened on ordinary code" if last else None


def _refusal(error: Exception) -> str:
    """Why a question was refused, in words that hold no prompt."""
    told = isinstance(error, ApiError | EngineStopped | QueueFull | PromptTooLong | TimeoutError) and str(error)
    return told[:200] if told else type(error).__name__
