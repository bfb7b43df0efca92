"""States that are more than memory should hold stay in their files, and every trial on them comes out the same."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.core.conftest import LAYER, ROWS, TinyCheckpoint, opening_on_some
from unbind_core.applying.bank import edit_of
from unbind_core.architecture import LoadedModel, load_model
from unbind_core.encoding import pad_id
from unbind_core.errors import Cancelled
from unbind_core.evaluation import kept
from unbind_core.evaluation.replay import Outcome, Replay
from unbind_core.progress import Progress, ProgressCallback, silent
from unbind_core.windows import retain_windows

WIDTH, TOKENS = 32, 256


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: TinyCheckpoint) -> LoadedModel:
    return load_model(tiny_checkpoint("qwen2"))


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_RESIDENT", 0)
    monkeypatch.setattr(kept, "FILE_BYTES", 1 << 17)


def replay(loaded: LoadedModel, cache: Path | None, progress: ProgressCallback = silent) -> Replay:
    every = retain_windows(loaded.tokenizer, ROWS, range(len(ROWS)))
    return Replay(
        loaded.model, every, [LAYER], pad=pad_id(loaded.tokenizer), tokens=TOKENS, cache=cache, progress=progress
    )


def tried(loaded: LoadedModel, one: Replay) -> Outcome:
    selection = edit_of(opening_on_some(loaded, "network"), torch.device("cpu"))[1]
    return one.run(selection, LAYER, kl_budget=float("inf"))


def held() -> int:
    """Bytes of all states [B,T,d] that are in memory."""
    found = [one for one in gc.get_objects() if type(one) is Tensor and one.dim() == 3 and one.shape[-1] == WIDTH]
    return sum(one.numel() * one.element_size() for one in found)


def test_states_in_files_give_what_states_in_memory_give(
    loaded: LoadedModel, tmp_path: Path, little_memory: None
) -> None:
    gc.collect()
    before = held()
    on_disk = replay(loaded, tmp_path / "states.safetensors")
    assert held() == before
    in_memory = replay(loaded, None)  # without a cache there is no other place
    assert held() > before
    assert tried(loaded, on_disk) == tried(loaded, in_memory)
    some = {1, 4, 6}
    assert tried(loaded, on_disk.without(some)) == tried(loaded, in_memory.without(some))


def test_files_are_bounded_and_serve_the_next_time(
    loaded: LoadedModel, tmp_path: Path, little_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replay(loaded, tmp_path / "states.safetensors")
    files = sorted(tmp_path.iterdir())
    assert len(files) > 1 and all(file.stat().st_size < (1 << 17) + (1 << 14) for file in files)
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o600"}
    monkeypatch.setattr(loaded.model, "forward", None)  # so that nothing can be computed
    assert replay(loaded, tmp_path / "states.safetensors").base_nll == first.base_nll


def test_what_was_interrupted_goes_on_after_the_last_whole_file(
    loaded: LoadedModel, tmp_path: Path, little_memory: None
) -> None:
    def cancel(progress: Progress) -> None:
        if progress.done >= progress.total - 1:
            raise Cancelled("enough")

    file = tmp_path / "states.safetensors"
    with pytest.raises(Cancelled):
        replay(loaded, file, cancel)
    left = sorted(tmp_path.iterdir())
    assert left
    steps: list[int] = []
    replay(loaded, file, lambda progress: steps.append(progress.done))
    assert len(list(tmp_path.iterdir())) > len(left) and steps[0] > 0
    left[0].write_bytes(left[0].read_bytes()[:-10])  # a damaged one is made again
    assert tried(loaded, replay(loaded, file)) == tried(loaded, replay(loaded, None))
