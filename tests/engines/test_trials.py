"""What is asked of the model's processes ends, whatever becomes of them, and a trial that cannot be made counts as failed."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.v1.engine.exceptions import EngineDeadError

from server.engine.refusals import QueueFull
from server.engine.vllm import model as model_file
from server.engine.vllm.engine import VllmEngine
from server.engine.vllm.gates import GateReports
from server.engine.vllm.model import Model
from server.engine.vllm.sockets import gather_sockets
from server.engine.vllm.worker import GatedWorker
from tests.engines.both import shipped
from unbind_core.applying.bank import ModuleBank
from unbind_core.errors import UnbindError


def tried(work: Callable[[Model, SimpleNamespace], Awaitable[Any]], answer: Callable[[], Awaitable[Any]]) -> Any:
    """``work`` with a model one process of which answers so."""

    async def everything() -> Any:
        async def call(*_: Any, **__: Any) -> Any:
            return await answer()

        client = SimpleNamespace(core_engine=b"0", _call_utility_async=call)
        llm, reports = SimpleNamespace(engine_core=client, errored=False), GateReports()
        try:
            return await asyncio.wait_for(work(Model(llm, reports, []), llm), 10)  # type: ignore[arg-type]
        finally:
            await reports.close()

    return asyncio.run(everything())


async def never() -> None:
    await asyncio.Event().wait()


async def refuses() -> None:
    raise Exception("Call to collective_rpc method failed: no module m5 on rank 0")  # as vLLM does


def test_who_waits_for_a_process_hears_of_its_end() -> None:
    async def work(model: Model, llm: SimpleNamespace) -> None:
        asyncio.get_running_loop().call_later(0.2, setattr, llm, "errored", True)
        with pytest.raises(EngineDeadError):
            await model.count()
        assert model.dead

    tried(work, never)


def test_what_a_process_refuses_is_an_error_of_ours() -> None:
    async def work(model: Model, _: Any) -> None:
        with pytest.raises(UnbindError, match=r"did not do unbind_sync: .*no module m5 on rank 0"):
            await model.all("unbind_sync", {}, [])

    tried(work, refuses)


def test_a_trial_is_waited_for_as_long_as_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(model: Model, llm: SimpleNamespace) -> None:
        steps = SimpleNamespace(steps=0, preemptions=0, kv_usage=None)
        model._loggers.append(steps)  # type: ignore[arg-type]
        begun = time.monotonic()

        async def moves() -> None:
            while time.monotonic() - begun < 2:
                steps.steps += 1
                await asyncio.sleep(0.1)

        monkeypatch.setattr(model, "probe", never)
        moving = asyncio.ensure_future(moves())
        with pytest.raises(UnbindError, match=r"no step has ended for 0\.8 s"):
            await model.tried(0.8)
        assert moving.done() and time.monotonic() - begun > 2.5
        llm.errored = True
        with pytest.raises(UnbindError, match="has ended"):
            await model.tried(60)

    tried(work, never)


def test_a_process_that_ends_at_the_trial_is_told_of_as_an_error_of_ours() -> None:
    async def work(model: Model, llm: SimpleNamespace) -> None:
        async def dead(*_: Any, **__: Any) -> Any:
            raise EngineDeadError
            yield

        llm.generate = dead
        with pytest.raises(
            UnbindError, match="a process of the model ended at the trial; its own message stands above"
        ):
            await model.tried(10)

    tried(work, never)


def test_a_set_that_is_asked_for_while_it_is_forgotten_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the processes end with an error, and every request with them."""
    monkeypatch.setattr(model_file, "MOST_SETS", 2)
    there: set[str] = set()

    async def work(model: Model, llm: SimpleNamespace) -> None:
        async def call(_: str, method: str, __: Any, arguments: Any, *others: Any, **named: Any) -> list[int]:
            await asyncio.sleep(0.05)
            added, removed = arguments
            there.update(added)
            there.difference_update(removed)
            return [len(there)]

        llm.engine_core._call_utility_async = call
        used = Counter[str]()
        for digest in ("a", "b", "c", "b", "a"):
            await model.know(digest, {"m0": 1.0}, used)
        forgets = asyncio.ensure_future(model.know("d", {"m0": 1.0}, used))
        await asyncio.sleep(0.01)
        assert {"a", "b"} <= set(model._known)  # what was asked for the longest ago goes
        for digest in "abc":
            used[digest] += 1
            await model.know(digest, {"m0": 1.0}, used)
        await forgets
        assert {"a", "b", "c"} <= there and set(model._known) <= there

    tried(work, never)


def test_what_a_change_of_modules_that_failed_took_in_is_out_with_the_next() -> None:
    worker: Any = object.__new__(GatedWorker)
    worker.edits, worker._digests = SimpleNamespace(bank=ModuleBank(one_table=True)), {}
    data = [module.to_bytes() for module in shipped()]
    assert set(worker.unbind_sync({"m0": data[0]}, [])) == {"m0"}
    with pytest.raises(UnbindError):
        worker.unbind_sync({"m1": data[1], "m2": b"no module"}, ["m0"])
    assert set(worker.unbind_sync({"m3": data[2]}, ["m0"])) == {"m0", "m3"}
    assert set(worker.unbind_sync({}, [])) == set()


def test_whatever_a_trial_raises_has_the_processes_started_again(
    hollow: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def due(_: Any) -> None:
        await asyncio.sleep(0.01)

    async def fails(_: float) -> None:
        raise ZeroDivisionError

    async def work() -> bool:
        again = asyncio.Event()

        async def restart() -> None:
            again.set()
            await never()

        monkeypatch.setattr(hollow, "_again", restart)
        model: Any = hollow._model
        model.until_trial, model.dead, model.tried = due, False, fails
        watching = asyncio.ensure_future(hollow._watch())
        try:
            await asyncio.wait_for(again.wait(), 5)
        finally:
            watching.cancel()
        return hollow.healthy

    assert not hollow._await(work())


def test_one_key_leaves_room_in_the_queue(hollow: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 slots and 4 places that wait."""
    waiting: list[Any] = [SimpleNamespace(request=SimpleNamespace(owner="a")) for _ in range(5)]
    monkeypatch.setattr(hollow, "_live", waiting)
    hollow._check_admits("b")
    with pytest.raises(QueueFull, match="3 requests of this key wait already"):
        hollow._check_admits("a")
    monkeypatch.undo()


def test_a_trial_forgets_no_set_that_a_request_is_under(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the processes end with an error, and every request with them."""
    monkeypatch.setattr(model_file, "MOST_SETS", 2)
    there: set[str] = set()

    async def work(model: Model, llm: SimpleNamespace) -> None:
        async def call(_: str, method: str, __: Any, arguments: Any, *others: Any, **named: Any) -> list[Any]:
            if method == "unbind_sets":
                added, removed = arguments
                there.update(added)
                there.difference_update(removed)
            return []

        async def asks(digest: str) -> list[str]:
            assert not digest or digest in there
            return [digest]

        llm.engine_core._call_utility_async = call
        monkeypatch.setattr(model, "_ask_all", asks)
        model._probes = {"probe-0": shipped()[0]}
        await model.probe()
        used = Counter("abcdef")
        for digest in used:
            await model.know(digest, {"m0": 1.0}, used)
        await model.probe()
        assert {*"abcdef", "probe-0"} <= there

    tried(work, never)


def test_requests_that_end_while_those_of_a_key_are_counted_fail_nobody(
    hollow: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = set[Any]()

    class Landing:
        @property
        def request(self) -> SimpleNamespace:
            live.discard(self)  # as another thread does at any time
            return SimpleNamespace(owner="a")

    live.update(Landing() for _ in range(3))
    monkeypatch.setattr(hollow, "_live", live)
    hollow._check_admits("a")
    assert not live


def test_sockets_find_a_place_where_the_path_of_temporary_files_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")  # is as it was behind the test

    async def work(model: Model, _: Any) -> None:
        gather_sockets(model.reports.folder)
        place = Path(get_open_zmq_ipc_path().removeprefix("ipc://"))
        assert place.parent == model.reports.folder and len(str(place)) < 108

    tried(work, never)
    assert not list(long.iterdir())
