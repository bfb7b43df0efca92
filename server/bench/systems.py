"""What ``unbind bench serve`` sets against each other: each takes prompts with arrival times and makes all the tokens.

The engine, the library's static batch, the library's continuous batching, vLLM, and the engine behind HTTP.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.pinned import NOTHING, PinnedSet
from server.engine.request import GenerationRequest, Sampling
from unbind_core.architecture import LoadedModel
from unbind_core.cpu.speedups import EVERY, Speedups
from unbind_core.errors import UnbindError

Prompts = Sequence[Sequence[int]]
PAGE = 32


class System(Protocol):
    """Something that generates ``new`` greedy tokens for each prompt, prompt i not before ``arrivals[i]`` seconds."""

    def generate(self, prompts: Prompts, new: int, arrivals: Sequence[float]) -> None:
        """All of it; returns when the last token is there."""


class EngineSystem:
    """The embedded engine, read through its public streams."""

    def __init__(self, loaded: LoadedModel, slots: int, length: int, speedups: Speedups = EVERY) -> None:
        self.engine = EmbeddedEngine(
            loaded.model,
            loaded.tokenizer,
            max_slots=slots,
            max_length=length,
            queue_limit=max(64, slots),
            speedups=speedups,
        )
        self.engine.start()

    def generate(
        self, prompts: Prompts, new: int, arrivals: Sequence[float], modules: Sequence[PinnedSet] | None = None
    ) -> None:
        """As the protocol says; ``modules``: which apply to each prompt."""

        async def one(i: int) -> int:
            await asyncio.sleep(arrivals[i])
            pinned = modules[i] if modules else NOTHING
            request = GenerationRequest(tuple(prompts[i]), Sampling(max_tokens=new, ignore_eos=True), pinned)
            return sum([len(delta.tokens) async for delta in self.engine.generate(request)])

        async def everything() -> list[int]:
            return list(await asyncio.gather(*(one(i) for i in range(len(prompts)))))

        _complete(asyncio.run(everything()), new, "the engine")

    def first_token(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token of one request alone."""

        async def one() -> float:
            begun = time.perf_counter()
            request = GenerationRequest(tuple(prompt), Sampling(max_tokens=4, ignore_eos=True))
            seconds = 0.0
            async for _ in self.engine.generate(request):
                seconds = seconds or time.perf_counter() - begun
            return seconds

        return asyncio.run(one())

    def close(self) -> None:
        """Give the model back."""
        self.engine.close()


class StaticBatch:
    """Plain ``generate`` on one batch: it begins when the last prompt is there."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model: Any = loaded.model

    def generate(self, prompts: Prompts, new: int, arrivals: Sequence[float]) -> None:
        """As the protocol says; all prompts have one length, so nothing is padded."""
        time.sleep(max(arrivals))
        ids = torch.tensor(prompts, device=self._model.device)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )
        _complete([out.shape[1] - ids.shape[1]] * len(out), new, "static generate")


class LibraryBatching:
    """The library's continuous batching, on a copy of the model, as it changes how a model attends."""

    def __init__(self, loaded: LoadedModel, requests: int, length: int) -> None:
        model: Any = copy.deepcopy(loaded.model)
        self._model = model
        self._model.set_attn_implementation("sdpa")  # an engine on the model may have put its own there
        blocks = requests * (length // PAGE + 2) + 4
        self._batching = ContinuousBatchingConfig(page_size=PAGE, num_blocks=blocks, max_batch_tokens=512)

    def generate(self, prompts: Prompts, new: int, arrivals: Sequence[float]) -> None:
        """As the protocol says."""
        settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        begun = time.perf_counter()
        order = sorted(range(len(prompts)), key=arrivals.__getitem__)
        made: list[int] = []
        with self._model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=self._batching, block=True, timeout=30, warmup=False
        ) as manager:
            for i in order:
                time.sleep(max(0.0, begun + arrivals[i] - time.perf_counter()))
                manager.add_request(list(prompts[i]), max_new_tokens=new)
            while len(made) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    made.append(len(result.generated_tokens))
                elif result is None and not manager.is_running():
                    raise UnbindError("the library's continuous batching ended before its requests did")
        _complete(made, new, "the library's continuous batching")


class Vllm:
    """vLLM on the same weights, eagerly, in a process of the Python given (``bench/vllm.py``)."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, asked: Mapping[str, object]) -> dict[str, Any]:
        """One line there, one line back."""
        assert self._process.stdin is not None and self._process.stdout is not None
        answer = ""
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise UnbindError("--vllm: that Python could not run vLLM; its reason is above")
        found: dict[str, Any] = json.loads(answer)
        return found

    def generate(self, prompts: Prompts, new: int, arrivals: Sequence[float]) -> None:
        """As the protocol says; like the static batch it begins when the last prompt is there."""
        time.sleep(max(arrivals))
        _complete(self.ask({"prompts": prompts, "new": new})["made"], new, "vLLM")


@contextmanager
def vllm_system(python: Path, loaded: LoadedModel, requests: int, length: int) -> Iterator[Vllm]:
    """vLLM under ``python`` on ``loaded``, saved with its adapter merged into a folder that goes with the block.

    Raises UnbindError where there is no such Python or it cannot run vLLM.
    """
    script = Path(__file__).with_name("vllm.py")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    # in one process, with as many threads as the others have and no core of its own
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        model: Any = loaded.model
        model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        try:
            process = subprocess.Popen(
                [str(python), "-I", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=folder,
            )
        except OSError as error:
            raise UnbindError(f"--vllm: '{python}' is not a Python that runs ({error.strerror})") from None
        with process:
            try:
                started = Vllm(process)
                dtype = str(model.dtype).removeprefix("torch.")
                started.ask({"model": folder, "length": length, "requests": requests, "dtype": dtype})
                yield started
            finally:
                process.kill()


class HttpSystem:
    """The engine behind HTTP, in a server process of its own: a streaming client for each prompt."""

    def __init__(self, url: str, *, every_module: bool = False) -> None:
        """``every_module``: all that are loaded apply to each request."""
        parts, self._modules = urlsplit(url), list[str]()
        if every_module:
            with urllib.request.urlopen(f"{url}/ready") as answer:  # noqa: S310 - a server of our own
                self._modules = json.load(answer)["modules"]
        self._host, self._port = str(parts.hostname), int(parts.port or 80)

    def generate(self, prompts: Prompts, new: int, arrivals: Sequence[float]) -> None:
        """As the protocol says."""

        async def one(i: int) -> int:
            await asyncio.sleep(arrivals[i])
            fields = {"prompt": list(prompts[i]), "max_tokens": new, "temperature": 0, "stream": True}
            options = {"ignore_eos": True, "stream_options": {"include_usage": True}}
            named = {"unbind": {"modules": self._modules}} if self._modules else {}
            body = json.dumps(fields | options | named).encode()
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            tokens = 0
            async for line in reader:
                if b'"usage":{' in line:
                    tokens = json.loads(line[line.index(b"{") :])["usage"]["completion_tokens"]
                elif line.startswith(b"data: [DONE]"):
                    break
            writer.close()
            return tokens

        async def everything() -> list[int]:
            return list(await asyncio.gather(*(one(i) for i in range(len(prompts)))))

        _complete(asyncio.run(everything()), new, "the server")


def _complete(made: Sequence[int], new: int, who: str) -> None:
    """A figure for fewer tokens than asked would flatter."""
    if any(count != new for count in made):
        raise UnbindError(f"{who} made {min(made)} to {max(made)} tokens a request instead of {new}")
