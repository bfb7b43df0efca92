"""Both engines on the demo model, side by side. Needs vLLM, so that they are run in its environment (``make test-vllm``)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # tests share the machine's cores

from server import demo
from server.engine.choice import EngineOptions, build_engine, plan_engine
from server.engine.embedded.engine import EmbeddedEngine
from server.engine.engine import Engine
from server.engine.request import GenerationRequest, Sampling
from server.engine.vllm.engine import VllmEngine
from tests.support.asking import sync
from unbind_core.architecture import load_model
from unbind_core.guard.book import GuardSet
from unbind_core.module import UnbindModule

MODULES = Path(__file__).parents[2] / "modules"
SHIPPED = ("demo-a", "demo-a-silent", "demo-a-paper")
PAGES = 16_000_000  # bytes of keys and values: room for few requests, so that some are preempted
COLUMNS = 128


@dataclass
class Engines:
    """vLLM and the embedded engine with the same modules."""

    vllm: VllmEngine
    embedded: EmbeddedEngine
    prompts: list[tuple[int, ...]]

    @property
    def both(self) -> tuple[Engine, Engine]:
        return self.vllm, self.embedded

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.embedded.tokenizer(text, add_special_tokens=False)["input_ids"])

    def request(
        self,
        engine: Engine,
        prompt: Sequence[int],
        modules: Sequence[str] | Mapping[str, float] = (),
        *,
        sampling: Sampling | None = None,
        report: bool = False,
        strips: bool = False,
        guards: GuardSet | None = None,
    ) -> GenerationRequest:
        pinned = engine.modules.pin(modules)
        return GenerationRequest(tuple(prompt), sampling or Sampling(max_tokens=24), pinned, report, strips, guards)


def options(
    folder: Path, *flags: str, columns: int = COLUMNS, slots: int = 16, layers: tuple[int, ...] = ()
) -> EngineOptions:
    return EngineOptions(
        model=demo.BASE,
        adapted=True,
        dtype="float32",
        device="cpu",
        slots=slots,
        length=2048,
        queue_limit=200,
        chunk_tokens=256,
        folder=folder,
        columns=columns,
        flags=flags,
        layers=layers,
    )


def started(folder: Path, *flags: str, columns: int = COLUMNS, layers: tuple[int, ...] = ()) -> VllmEngine:
    """vLLM with the demo model, keys and values in little memory."""
    loaded = load_model(demo.BASE, demo.ADAPTER)
    told = options(folder, "block-size=32", "max-num-batched-tokens=256", *flags, columns=columns, layers=layers)
    engine = build_engine("vllm", loaded, plan_engine("vllm", loaded, told), told)
    assert isinstance(engine, VllmEngine)
    engine.start()
    return engine


def shipped() -> list[UnbindModule]:
    return [UnbindModule.load(MODULES / f"{name}.safetensors") for name in SHIPPED]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    loaded = load_model(demo.BASE, demo.ADAPTER)
    embedded = EmbeddedEngine(
        loaded.model, loaded.tokenizer, max_slots=8, max_length=2048, queue_limit=200, chunk_tokens=256
    )
    vllm = started(tmp_path_factory.mktemp("vllm"), f"kv-cache-memory-bytes={PAGES}")
    embedded.start()
    for engine in (vllm, embedded):
        sync(engine, shipped())
    made = Engines(vllm, embedded, [])
    for line in (demo.ROWS / "forget_a.jsonl").read_text().splitlines():
        made.prompts.append(made.ids(demo_prompt(line)))
    yield made
    vllm.close()
    embedded.close()


def demo_prompt(line: str) -> str:
    return str(json.loads(line)["prompt"])
