"""vLLM's processes start, are refused, die and come back: nothing is ever answered without the modules it must have."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

from server import demo
from server.engine.choice import plan_engine
from server.engine.refusals import EngineStopped
from server.engine.request import GenerationRequest, Sampling
from server.engine.vllm import engine as engine_file
from server.engine.vllm import model as model_file
from server.engine.vllm.arguments import Arguments, cut
from server.engine.vllm.edits import OPERATOR
from server.engine.vllm.engine import VllmEngine
from server.errors import translate
from tests.engines.both import demo_prompt, options, shipped, started
from tests.support.asking import Answer, ask, sync
from unbind_core.architecture import load_model
from unbind_core.errors import UnbindError
from unbind_core.module import UnbindModule

PROMPTS = [demo_prompt(line) for line in (demo.ROWS / "forget_a.jsonl").read_text().splitlines()[:6]]
OTHERS: set[psutil.Process] = set()  # of engines that other tests have


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    OTHERS.update(psutil.Process().children(recursive=True))
    made = started(tmp_path_factory.mktemp("life"), "kv-cache-memory-bytes=30000000", columns=60, layers=(-1,))
    sync(made, shipped()[:1])
    yield made
    made.close()


def requests(engine: VllmEngine, tokens: int = 24) -> list[GenerationRequest]:
    pinned = engine.modules.pin(["demo-a"])
    ids = [tuple(engine.tokenizer(prompt, add_special_tokens=False)["input_ids"]) for prompt in PROMPTS]
    return [GenerationRequest(prompt, Sampling(max_tokens=tokens), pinned) for prompt in ids]


def answers(engine: VllmEngine) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in ask(engine, requests(engine))]


def answers_again(engine: VllmEngine) -> list[tuple[int, ...]]:
    """The answers once the model's processes run again."""
    deadline = time.monotonic() + 120
    while True:
        try:
            after = answers(engine)
        except EngineStopped as error:
            if translate(error).code != "not_ready" or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            if all(after):
                return after


def process(name: str) -> psutil.Process:
    children = psutil.Process().children(recursive=True)
    return next(child for child in children if child not in OTHERS and name in " ".join(child.cmdline()))


def test_a_module_for_which_the_gates_have_no_room_is_refused_with_the_remedy(engine: VllmEngine) -> None:
    before = answers(engine)
    more = [replace(shipped()[0], name=f"more-{i}", created_at=f"2026-01-0{i}") for i in range(1, 4)]
    with pytest.raises(
        UnbindError, match=r"the gates of the modules need \d+ columns .* there are 60; .*--gate-columns"
    ):
        sync(engine, [*shipped()[:1], *more])
    assert list(engine.modules.current) == ["demo-a"] and answers(engine) == before


def test_modules_are_sent_a_part_after_the_other_and_others_go(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, sent = answers(engine), []
    whole = model_file.Model._sync

    async def counted(model: model_file.Model, added: Mapping[str, bytes], modules: Mapping[str, UnbindModule]) -> None:
        await whole(model, added, modules)
        sent.append((len(added), len(model._held)))

    monkeypatch.setattr(model_file.Model, "_sync", counted)
    monkeypatch.setattr(model_file, "SENT", 1)
    one, other = shipped()[0], replace(shipped()[0], name="another")
    sync(engine, [])
    sync(engine, [one, other])
    probes = sent[0][1]
    assert sent == [(0, probes), (1, probes + 1), (1, probes + 2)]
    assert answers(engine) == before
    sync(engine, [one])
    sync(engine, [one, replace(one, name="one-more")])
    assert sent[3:] == [(0, probes + 1), (1, probes + 2)]
    sync(engine, [one])


def test_a_module_at_a_layer_that_the_engine_was_not_started_for_is_refused_with_the_remedy(
    engine: VllmEngine, tmp_path: Path
) -> None:
    before = answers(engine)
    demo_a, _, paper = shipped()
    assert demo_a.layer == 5 and paper.layer != 5
    assert engine._model is not None and [rank["layers"] for rank in engine._model.ranks] == [[5]]
    with pytest.raises(
        UnbindError, match=rf"at decoder layer {paper.layer}, .* at 5 alone; .*--gate-layers {paper.layer},5,"
    ):
        sync(engine, [demo_a, paper])
    assert list(engine.modules.current) == ["demo-a"] and answers(engine) == before
    loaded = load_model(demo.BASE)
    with pytest.raises(UnbindError, match="gate_layers: the model has 6 decoder layers, from 0 to 5, and no 6"):
        plan_engine("vllm", loaded, options(tmp_path, layers=(6,)))


def test_a_killed_worker_ends_its_requests_with_an_error_and_is_started_again(
    engine: VllmEngine, caplog: pytest.LogCaptureFixture
) -> None:
    before = answers(engine)
    counted = engine.gate_counts().result(60)["demo-a"]["prefill"][0]

    async def meanwhile(pid: int = process("Worker").pid) -> list[Answer]:
        async def one(request: GenerationRequest) -> Answer:
            return Answer([delta async for delta in engine.generate(request)])

        running = [asyncio.create_task(one(request)) for request in requests(engine, 1500)]
        await asyncio.sleep(1)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*running)

    for answer in asyncio.run(meanwhile()):
        assert answer.whole.finish_reason in ("error", "length", "stop")
        assert answer.whole.finish_reason != "error" or "try again" in (answer.whole.error or "")
    after = answers_again(engine)
    assert after == before
    assert "ended and are started again" in caplog.text  # by then those that ran may have ended
    assert engine.gate_counts().result(60)["demo-a"]["prefill"][0] >= counted


def test_a_worker_s_end_is_noticed_where_the_process_that_should_tell_hangs(engine: VllmEngine) -> None:
    before = answers(engine)
    hung, worker = process("EngineCore"), process("Worker")
    hung.suspend()
    worker.kill()
    deadline = time.monotonic() + 10
    while engine.healthy:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert answers_again(engine) == before and not hung.is_running()


def test_processes_that_live_and_do_nothing_are_started_again(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = answers(engine)
    monkeypatch.setattr(model_file, "STUCK_SECONDS", 1.0)
    monkeypatch.setattr(engine_file, "TRIAL_SECONDS", 3.0)
    hung = process("EngineCore")
    hung.suspend()
    told = [answer.whole for answer in ask(engine, requests(engine))]
    assert [one.finish_reason for one in told] == ["error"] * len(told) and "try again" in (told[0].error or "")
    monkeypatch.undo()
    assert answers_again(engine) == before and not hung.is_running()


def test_a_trial_waits_its_turn_where_requests_queue(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started again, and no request dropped, because a trial stands behind long answers."""
    model = engine._model
    assert model is not None
    before = next(model._trials)
    monkeypatch.setattr(model_file, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(engine_file, "TRIAL_SECONDS", 2.0)
    long = [replace(one, sampling=Sampling(max_tokens=300, ignore_eos=True)) for one in requests(engine)]
    told = ask(engine, [*long, *long, *long])
    assert [answer.whole.finish_reason for answer in told] == ["length"] * 18
    assert engine._model is model and engine.healthy and next(model._trials) > before + 1


def test_a_trial_that_gives_its_pages_up_is_made_again(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed again is a prompt's: where that is all of a trial, steps of decoding have not been tried."""
    model = engine._model
    assert model is not None
    whole, asked = model._ask_all, []

    async def counted(digest: str) -> list[object]:
        asked.append(digest)
        return await whole(digest)

    async def again() -> bool:
        asked.clear()
        async with asyncio.timeout(60):  # a model that is started again meanwhile answers neither
            probe = asyncio.ensure_future(model.probe())
            while len(asked) < 3 and not probe.done():
                await model._llm.reset_prefix_cache(reset_running_requests=True)
            await probe
        return len(asked) > 2  # without the edits, and with them

    monkeypatch.setattr(model, "_ask_all", counted)
    assert any(engine._await(again()) for _ in range(20)) and not model.dead


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("no-such-flag=1",), "^vllm_args: vLLM has no --no-such-flag=1"),
        (("device=cuda",), "vLLM has no --device=cuda"),
        (("runn=pooling",), "vLLM has no --runn=pooling"),
        (("max-num-seqs=1",), "^vllm_args: 'max-num-seqs' is what this server says itself; use the setting max_slots$"),
        (("enable-prefix-caching=false",), "'enable-prefix-caching' is what this server says itself; leave it away$"),
        (("reasoning-parser=none",), "vLLM does not take them: .*Reasoning parser 'none' not found"),
        (
            ('speculative-config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}',),
            "speculative decoding",
        ),
        (("tensor-parallel-size=x",), "vLLM does not take"),
        (("kv-sharing-fast-prefill",), "fast prefill"),
        (("prefix-match-unit=16",), "prefixes that end within a page"),
        (('hf-overrides={"rope_theta": 5}',), "'hf-overrides' is what this server says itself; leave it away$"),
        (("hf-config-path=other",), "'hf-config-path' is what this server says itself; leave it away$"),
        (("quantization=fp8",), "quantization fp8 makes other weights"),
        (("kv-cache-dtype=fp8",), "kv-cache-dtype fp8 rounds"),
        (("logprobs-mode=processed_logits",), "'logprobs-mode' is what this server says itself"),
        (("tensor-parallel-size=0",), r"take them: tensor_parallel_size: Input should be greater than or equal to 1$"),
    ],
)
def test_flags_that_do_not_go_with_modules_are_refused(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    arguments = Arguments(str(demo.BASE), "bfloat16", 512, 4, 64, "cpu", flags)
    with pytest.raises(UnbindError, match=says):
        arguments.config()


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE])
@pytest.mark.parametrize("splitting", [None, []])
def test_what_is_compiled_is_cut_at_modules(mode: CUDAGraphMode, splitting: list[str] | None) -> None:
    config = CompilationConfig(cudagraph_mode=mode, mode=CompilationMode.VLLM_COMPILE, splitting_ops=splitting)
    config.set_splitting_ops_for_v1("")
    before, others = config.cudagraph_mode, list(config.splitting_ops or [])
    cut(config)
    assert config.cudagraph_mode == before and config.splitting_ops == [*others, OPERATOR]


def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(UnbindError, match=r"vllm 0\.99\.1 is installed, and the engine was tried with 0\.32\.0 alone"):
        Arguments(str(demo.BASE), "float32", 512, 4, 64, "cpu").config()


def test_a_call_to_the_processes_that_is_given_up_is_not_logged_as_a_fault(engine: VllmEngine) -> None:
    told = []

    async def given_up() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context))
        assert engine._model is not None
        call = asyncio.ensure_future(engine._model.all("unbind_counts"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        del call
        for _ in range(5):
            await asyncio.sleep(0)
        gc.collect()
        loop.set_exception_handler(None)

    engine._await(given_up(), 60)
    assert not told


def test_a_process_that_ends_by_a_signal_leaves_no_sockets_among_the_temporary_files(tmp_path: Path) -> None:
    run = (
        "import os, pathlib, sys; from tests.engines.both import started;"
        "started(pathlib.Path(sys.argv[1]), 'kv-cache-memory-bytes=30000000').close();"
        "os.kill(os.getpid(), 15)"  # as uvicorn does once all is put away
    )
    with TemporaryDirectory() as short:  # a socket's path may have 107 bytes
        ran = subprocess.run([sys.executable, "-c", run, str(tmp_path)], env={**os.environ, "TMPDIR": short})
        assert ran.returncode == -signal.SIGTERM
        assert not [path for path in Path(short).rglob("*") if path.is_socket() or path.name.startswith("unbind-")]
