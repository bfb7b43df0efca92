"""A tiny random model, served in this process, modules for it that visibly change its output, and databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from server.bench.fleet.postgres import Postgres, postgres
from server.engine.embedded.engine import EmbeddedEngine
from server.registry.database import connect, upgrade
from server.registry.registry import Registry
from tests.core.conftest import save_checkpoint
from tests.support.databases import KINDS, NOTE
from tests.support.live import Live, live
from tests.support.modules import build_module
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.module import UnbindModule

MakeModule = Callable[..., UnbindModule]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 checkpoint on disk."""
    return save_checkpoint("qwen2", tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> LoadedModel:
    """The checkpoint as the server loads it."""
    return load_model(checkpoint)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    """Its tokenizer."""
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint)
    return made


@pytest.fixture(scope="session")
def make_module(loaded: LoadedModel) -> MakeModule:
    """``build_module`` for the checkpoint of these tests."""
    return partial(build_module, loaded.identity)


@pytest.fixture
def two_lanes() -> Iterator[None]:
    """Passes of a step run side by side, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine(checkpoint: Path, make_module: MakeModule) -> Iterator[EmbeddedEngine]:
    """A running engine with modules ``one`` and ``two``; four slots, small chunks so that long prompts take several."""
    fresh = load_model(checkpoint)
    running = EmbeddedEngine(fresh.model, fresh.tokenizer, max_slots=4, max_length=256, queue_limit=8, chunk_tokens=24)
    running.start()
    modules = [make_module("one"), make_module("two", layer=2, seed=1)]
    running.sync_modules([(module, module.digest) for module in modules]).result(10)
    yield running
    running.close()


def pytest_report_header() -> str:
    """Say on which databases the registry is tested."""
    return NOTE


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Postgres]:
    """A PostgreSQL server, started when a test first needs it."""
    with postgres() as server:
        yield server


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database of each kind there is."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'data' / 'unbind.sqlite'}"
    made: str = request.getfixturevalue("postgresql_server").new_database()
    return made


@pytest.fixture
def registry(database_url: str, tmp_path: Path) -> Iterator[Registry]:
    """A registry on a fresh database of each kind."""
    engine = connect(database_url)
    upgrade(engine)
    made = Registry(engine, tmp_path / "audit.head")
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that anybody may ask, with two modules and two profiles; tests leave it as they found it."""
    profiles = {"safe": {"modules": {"one": 0.5}}, "strict": {"modules": ["one"], "enforced": ["two"]}}
    with live(checkpoint, tmp_path_factory.mktemp("open"), profiles=profiles) as running:
        yield running
