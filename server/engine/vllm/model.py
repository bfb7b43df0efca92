"""The model in vLLM's processes: started, told which modules to hold, tried, counted, and put away."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from hashlib import sha256
from typing import Any

import psutil
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from server.engine.vllm.arguments import Arguments
from server.engine.vllm.gates import GateReports, merged, merged_looks
from server.engine.vllm.probe import probe_module
from server.engine.vllm.remote import ByPhase, in_parts
from server.engine.vllm.sockets import fault_file, gather_sockets
from server.engine.vllm.starts import ended
from server.engine.vllm.steps import Steps
from unbind_core.applying.counts import PHASES
from unbind_core.applying.looks import Look
from unbind_core.errors import UnbindError
from unbind_core.identity import ModelIdentity
from unbind_core.module import UnbindModule

log = logging.getLogger("unbind.engine")
PROBE_PROMPT, PROBE_TOKENS = tuple(range(5, 29)), 3  # so that steps of both phases are tried
PROBE_SECONDS = 300.0  # between two trials of the edits
STUCK_SECONDS = 60.0  # requests run and no step ends: the trial is made at once
LOOK_SECONDS = 0.5  # between two looks at whether the processes live
SENT = 256_000_000  # bytes of modules in a message, about
MOST_SETS = 512  # of modules that workers know and nobody uses


class Model:
    """One life of the model's processes, from their start to their end."""

    def __init__(self, llm: AsyncLLM, reports: GateReports, loggers: list[Steps]) -> None:
        self._llm, self.reports, self._loggers = llm, reports, loggers
        self.died = asyncio.Event()
        self.ranks: list[dict[str, Any]] = []
        self.counts: dict[str, ByPhase] = {}  # by key and phase
        self.looks: dict[str, Look] = {}
        self._known: dict[str, frozenset[str]] = {}  # digests of sets -> their keys
        self._held: dict[str, str] = {}
        self._processes: list[psutil.Process] = []  # of the ranks on this machine
        self._changing = asyncio.Lock()
        self._probes: dict[str, UnbindModule] = {}  # by key: one at the first layer of each stage, there for good
        self._trials = itertools.count()

    @classmethod
    async def started(cls, arguments: Arguments, identity: ModelIdentity) -> Model:
        """Start the processes, which hold nothing yet; they may take minutes. Raises UnbindError."""
        loggers: list[Steps] = []

        def logger(config: Any, index: int = 0) -> Steps:
            loggers.append(Steps(config, index))
            return loggers[-1]

        config, reports = arguments.config(), GateReports()
        gather_sockets(reports.folder)
        fault = fault_file(reports.folder)
        try:
            llm = AsyncLLM(
                config, Executor.get_class(config), log_stats=False, log_requests=False, stat_loggers=[logger]
            )
        except Exception as error:
            said = " ".join((fault.read_text() if fault.exists() else str(error)).split())
            await reports.close()
            raise UnbindError(f"vLLM does not start: {said}; its own message stands above") from error
        model = cls(llm, reports, loggers)
        if not arguments.edits:
            return model
        try:
            model.ranks = await model.all("unbind_open", reports.address)
            ours = {child.pid: child for child in psutil.Process().children(recursive=True)}  # others run elsewhere
            model._processes = [ours[rank["process"]] for rank in model.ranks if rank["process"] in ours]
        except BaseException:
            await model.close()
            raise
        reports.stages = frozenset(min(rank["layers"]) for rank in model.ranks if rank["layers"])
        model._probes = {f"probe-{layer}": probe_module(identity, layer) for layer in sorted(reports.stages)}
        return model

    @property
    def steps(self) -> int:
        """Of vLLM's engine cores together, since the start."""
        return sum(logger.steps for logger in self._loggers)

    @property
    def preemptions(self) -> int:
        """Requests that had to give their pages up, and were computed again."""
        return sum(logger.preemptions for logger in self._loggers)

    @property
    def kv_usage(self) -> float | None:
        """The share of the pages that requests hold, the mean of vLLM's engine cores; None before the first step."""
        known = [logger.kv_usage for logger in self._loggers if logger.kv_usage is not None]
        return sum(known) / len(known) if known else None

    def generate(self, prompt: Any, parameters: SamplingParams, name: str) -> AsyncGenerator[Any, None]:
        """vLLM's own stream of outputs; closing it ends the request."""
        outputs: AsyncGenerator[Any, None] = self._llm.generate(prompt, parameters, name)
        return outputs

    async def all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker of every engine core; what each of them gave. Raises EngineDeadError, and UnbindError
        where one of them raises.
        """
        client: Any = self._llm.engine_core
        call = asyncio.gather(
            *(
                client._call_utility_async("collective_rpc", method, None, arguments, None, engine=engine)
                for engine in self._cores
            )
        )
        try:
            while not (await asyncio.wait({call}, timeout=LOOK_SECONDS))[0]:
                if self.dead:  # vLLM lets whoever waits for an answer wait for ever then
                    raise EngineDeadError
            found = call.result()
        except EngineDeadError:
            self.died.set()
            raise
        except Exception as error:
            raise UnbindError(f"the processes of the model did not do {method}: {error}") from error
        finally:
            call.add_done_callback(lambda left: left.cancelled() or left.exception())  # or asyncio calls that a fault
            call.cancel()
        return [one for rank in found for one in rank]

    async def hold(self, modules: Mapping[str, UnbindModule]) -> None:
        """Have exactly these modules, by key, on every rank, and the probes. Raises UnbindError where ranks differ.

        They are sent a part after the other: a thousand modules of a large model are more than one message may hold.
        """
        modules = {**modules, **self._probes}
        async with self._changing:
            removed = [key for key in self._held if key not in modules]
            gone = [digest for digest, keys in self._known.items() if keys & set(removed)]
            if gone:
                await self.all("unbind_sets", {}, gone)
                for digest in gone:
                    del self._known[digest]
            added = {key: module for key, module in modules.items() if key not in self._held}
            for part in itertools.chain([{}] * bool(removed), in_parts(added, SENT)):
                await self._sync(part, modules)

    async def _sync(self, added: Mapping[str, bytes], modules: Mapping[str, UnbindModule]) -> None:
        kept = [key for key in self._held if key in modules]
        wanted = {key: self._held[key] for key in kept} | {key: sha256(data).hexdigest() for key, data in added.items()}
        held = await self.all("unbind_sync", added, kept)
        self._held = dict(held[0])
        if any(dict(one) != wanted for one in held):
            raise UnbindError("the processes of the model hold different modules; restart the server")

    async def know(self, digest: str, strengths: Mapping[str, float], used: Counter[str]) -> None:
        """Have every rank know a set before a request names it; of those that nobody uses MOST_SETS are remembered."""
        if digest in self._known:
            self._known[digest] = self._known.pop(digest)  # used last is forgotten last
            return
        async with self._changing:
            if digest in self._known:
                return
            idle = [one for one in self._known if not used[one] and one not in self._probes]
            idle = idle[: max(0, len(self._known) - MOST_SETS)]
            for one in idle:  # first: who names one from now on has it told again
                del self._known[one]
            await self.all("unbind_sets", {digest: dict(strengths)}, idle)
            self._known[digest] = frozenset(strengths)

    async def count(self) -> None:
        """Hear how many positions were evaluated and how many gates open since the start, and how near gates came."""
        told = await self.all("unbind_counts")
        self.counts, self.looks = merged(told), merged_looks(told)

    async def probe(self) -> None:
        """See that a module whose gate is always open fires on every rank and changes what is predicted. Raises UnbindError."""
        plain = await self._ask_all("")
        await self.all("unbind_check", 2)
        for key, module in self._probes.items():
            await self.know(key, {key: 1.0}, Counter({key: 1}))
            while True:
                preemptions = self.preemptions
                before = await self.all("unbind_counts")
                edited = await self._ask_all(key)
                missed = self._missed(key, module, before, await self.all("unbind_counts"))
                if not missed:
                    break
                for rank, phase, evaluated, opened in missed:
                    # What gives its pages up is computed again as a prompt is: a trial may see no step of decoding then.
                    if evaluated or opened or phase != "decode" or self.preemptions == preemptions:
                        raise UnbindError(
                            f"rank {rank}: a module at layer {module.layer} was evaluated {evaluated} times in {phase}, "
                            f"open {opened}"
                        )
            if any(one == other for one, other in zip(edited, plain, strict=True)):
                raise UnbindError(f"a module at layer {module.layer} changed nothing of what the model predicts")

    def _missed(
        self, key: str, module: UnbindModule, before: list[Any], after: list[Any]
    ) -> list[tuple[int, str, int, int]]:
        """Rank, phase, positions evaluated and gates open wherever not all were open, or there were none."""
        found = []
        for rank, old, new in zip(self.ranks, before, after, strict=True):
            for phase in PHASES if module.layer in rank["layers"] else ():
                evaluated, opened = (b - a for a, b in zip(_of(old, key, phase), _of(new, key, phase), strict=True))
                if not 0 < evaluated == opened:
                    found.append((rank["rank"], phase, evaluated, opened))
        return found

    async def tried(self, seconds: float) -> None:
        """``probe``, waited for while steps end. Raises UnbindError, also where for so long none ends, or a process does."""
        trial = asyncio.ensure_future(self.probe())
        steps, moved = self.steps, time.monotonic()
        try:
            while not (await asyncio.wait({trial}, timeout=LOOK_SECONDS))[0]:
                if self.steps != steps:
                    steps, moved = self.steps, time.monotonic()
                if self.dead:
                    raise UnbindError("a process of the model has ended")
                if time.monotonic() - moved > seconds:
                    raise UnbindError(f"no step has ended for {seconds:g} s")
            trial.result()
        except EngineDeadError as error:  # as where a layer of vLLM's fails on what the trial asks
            raise UnbindError("a process of the model ended at the trial; its own message stands above") from error
        finally:
            trial.cancel()

    @property
    def dead(self) -> bool:
        """Whether a process has ended. vLLM's engine core tells of its workers, unless it hangs itself: so each is looked at."""
        return self.died.is_set() or bool(self._llm.errored) or any(map(ended, self._processes))

    async def until_trial(self, running: Callable[[], int]) -> None:
        """Wait until the processes are to be tried: it is time, or a process has ended, or of so many requests none moves."""
        begun = moved = time.monotonic()
        steps = self.steps
        while time.monotonic() - begun < PROBE_SECONDS and not self.dead:
            await asyncio.sleep(LOOK_SECONDS)
            if self.steps != steps or not running():
                steps, moved = self.steps, time.monotonic()
            elif time.monotonic() - moved > STUCK_SECONDS:
                log.warning("%d requests run and no step has ended for %g s", running(), STUCK_SECONDS)
                return

    @property
    def _cores(self) -> list[Any]:
        """vLLM's engine cores: one, or with data parallelism several."""
        client: Any = self._llm.engine_core
        return list(getattr(client, "core_engines", None) or [client.core_engine])

    async def _ask_all(self, digest: str) -> list[Any]:
        """What each engine core predicts for the probe's prompt."""
        cores = len(self._cores)
        return [await self._ask(digest, core if cores > 1 else None) for core in range(cores)]

    async def _ask(self, digest: str, core: int | None) -> Any:
        name = f"trial-{next(self._trials)}"  # and its salt: nothing of it is taken from an earlier one
        parameters = SamplingParams(
            max_tokens=PROBE_TOKENS,
            temperature=0,
            logprobs=8,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"unbind": digest} if digest else None,
        )
        asked: Any = {"prompt_token_ids": list(PROBE_PROMPT), "cache_salt": name}
        async for output in self._llm.generate(asked, parameters, name, data_parallel_rank=core):
            return {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}
        raise UnbindError("vLLM gave no answer to the probe")

    async def close(self) -> None:
        """End the processes, without the complaint of who listens to them that they have ended."""
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        try:
            await asyncio.to_thread(self._llm.shutdown, 10.0)
        except Exception:
            log.exception("the model's processes did not end as they should")
        await self.reports.close()


def _of(counted: Mapping[str, Any], key: str, phase: str) -> tuple[int, int]:
    evaluated, opened = counted["counts"].get(key, {}).get(phase, (0, 0))
    return int(evaluated), int(opened)
