"""Where edits stand in a model, the memory beside its pages, and that a selection lasts as long as what it was made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from server.bench.filter import random_module
from server.engine.vllm import edits as edits_file
from server.engine.vllm.batch import Batch
from server.engine.vllm.edits import Edits, _edited, _takes_residual, decoder_layers
from server.engine.vllm.worker import GatedWorker
from tests.core.conftest import make_network_module
from unbind_core.applying.selection import Selection
from unbind_core.errors import UnbindError
from unbind_core.identity import ModelIdentity

CPU = torch.device("cpu")
MODEL = ModelIdentity("f" * 64, "tiny", 24, 4)


def test_a_selection_lasts_until_the_batch_or_the_bank_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = Edits(SimpleNamespace(device=CPU, max_num_reqs=4, dtype=torch.float32), columns=8)
    module = make_network_module(MODEL, "m", 1, seed=0)
    edits.bank.add(module)
    edits.sets["digest"] = {"m": 1.0}
    looked_up: list[int] = []
    select = edits.bank.select

    def counting(rows: Sequence[Mapping[str, float]]) -> Selection | None:
        looked_up.append(len(rows))
        return select(rows)

    monkeypatch.setattr(edits.bank, "select", counting)
    batch = Batch.of(["r"], [{"unbind": "digest"}], CPU)
    first = edits._selection_of(batch)
    assert first is not None and edits._selection_of(batch) is first and looked_up == [1]
    edits.bank.add(replace(module, kappa=2 * module.kappa))
    second = edits._selection_of(batch)
    assert second is not None and second is not first and edits._selection_of(batch) is second and looked_up == [1, 1]
    assert edits._selection_of(Batch.of(["r", "s"], [{"unbind": "digest"}, {}], CPU)) is not second
    assert looked_up == [1, 1, 2]
    edits.bank.remove("m")
    assert edits._selection_of(Batch.of(["s"], [{}], CPU)) is None


@pytest.mark.parametrize(("full", "windows"), [(12, 0), (6, 6), (4, 22), (3, 9), (1, 7)])
def test_pages_and_gates_fit_the_memory_that_is_planned(full: int, windows: int) -> None:
    edits = Edits(SimpleNamespace(device=CPU, max_num_reqs=4, dtype=torch.float32), columns=500)
    heads: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    kinds: list[KVCacheSpec] = [FullAttentionSpec(**heads)] * full + [
        SlidingWindowSpec(**heads, sliding_window=32)
    ] * windows
    config, memory = VllmConfig(), 10**9
    config.cache_config.kv_cache_layout = "LBNHC"
    groups = get_kv_cache_groups(config, {f"layer.{number}": kind for number, kind in enumerate(kinds)})
    planned = get_kv_cache_config_from_groups(config, groups, int(memory * edits.share_of_pages(kinds)))
    a_block = sum(tensor.size for tensor in planned.kv_cache_tensors[:1]) / planned.num_blocks
    taken = planned.num_blocks * (a_block + 4 * edits.columns * heads["block_size"])
    assert 0.6 * memory < taken <= memory


@pytest.mark.parametrize("width", [256, 3584])
@pytest.mark.parametrize("count", [1, 3])
def test_the_room_for_modules_is_what_modules_take(width: int, count: int) -> None:
    module = random_module(ModelIdentity("f" * 64, "wide", width, 4), 0, 1, "network network")
    assert module.heads is not None
    columns = count * (len(module.heads) + 1)
    room = Edits(SimpleNamespace(device=CPU, max_num_reqs=4, dtype=torch.float32), columns).room_for_modules(width)
    taken = count * sum(tensor.numel() * tensor.element_size() for tensor in module.tensors.values())
    assert taken <= room <= 1.2 * taken


@pytest.mark.parametrize("said", [None, 10**9])
def test_room_is_left_for_modules_unless_keys_and_values_have_a_size_of_their_own(
    monkeypatch: pytest.MonkeyPatch, said: int | None
) -> None:
    monkeypatch.setattr(GatedWorker.__base__, "determine_available_memory", lambda _: 10**9)
    worker = object.__new__(GatedWorker)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    worker.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=said))
    worker.model_config = SimpleNamespace(get_hidden_size=lambda: 3584)
    worker.model_runner = SimpleNamespace(get_kv_cache_spec=lambda: {"layer": spec})
    worker.edits = Edits(SimpleNamespace(device=CPU, max_num_reqs=4, dtype=torch.float32), columns=100)
    room = 0 if said else worker.edits.room_for_modules(3584)
    assert worker.determine_available_memory() == int((10**9 - room) * worker.edits.share_of_pages([spec]))


@pytest.mark.parametrize(
    ("layer", "in_parts"),
    [
        ("qwen2.Qwen2DecoderLayer", True),
        ("qwen3_moe.Qwen3MoeDecoderLayer", True),
        ("llama.LlamaDecoderLayer", True),
        ("mixtral.MixtralDecoderLayer", True),
        ("gemma3.Gemma3DecoderLayer", True),
        ("deepseek_v2.DeepseekV2DecoderLayer", True),
        ("gpt_oss.TransformerBlock", True),
        ("commandr.CohereDecoderLayer", False),
        ("stablelm.StablelmDecoderLayer", False),
        ("phimoe.PhiMoEDecoderLayer", False),
        ("exaone4.Exaone4DecoderLayer", False),
        ("granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer", False),
    ],
)
def test_it_is_known_whether_a_layers_second_output_is_a_part_of_its_state(layer: str, in_parts: bool) -> None:
    name, _, kind = layer.partition(".")
    assert _takes_residual(getattr(import_module(f"vllm.model_executor.models.{name}"), kind)) is in_parts


class _InParts(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        return 2 * residual, residual


class _Whole(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = hidden
        return 3 * residual, residual


class _Batched(nn.Module):
    def forward(self, hidden: Tensor, _: None) -> Tensor:
        return 3 * hidden[None]


@pytest.mark.parametrize("kind", [_InParts, _Whole, _Batched])
def test_modules_read_and_change_the_state_that_the_next_layer_goes_on_from(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Tensor] = []

    class Reading(Edits):
        def apply(self, hidden: Tensor, residual: Tensor | None, layer: int) -> None:
            read.append(hidden.clone() if residual is None else hidden + residual)
            hidden += 1

    edits = Reading(SimpleNamespace(device=CPU, max_num_reqs=4, dtype=torch.float32), columns=8)
    monkeypatch.setattr(edits_file, "_edits", edits)
    states = torch.arange(12.0).reshape(3, 4)
    output = _edited(kind(), 0)(states, None)
    assert torch.equal(read[0], 3 * states)
    changed = sum(output) if kind is _InParts else output[0]
    assert torch.equal(changed, 3 * states + 1)


def test_decoder_layers_are_found_whatever_they_are_called() -> None:
    """As of GPT-J and GPT-2 (``transformer.h``), of GPT-BigCode through transformers (``model.h``), of DBRX, of most."""
    for path in ("transformer.h", "model.h", "transformer.blocks", "model.layers", "model.decoder.layers"):
        layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(1, 1)] * 4)}) for _ in range(4))
        whole: nn.Module = layers
        for part in reversed(path.split(".")):
            whole = nn.ModuleDict({part: whole})
        assert decoder_layers(whole, 4) is layers
        with pytest.raises(UnbindError, match="decoder layers are not found; use the embedded engine"):
            decoder_layers(whole, 5)


def test_a_model_of_windows_alone_is_refused_before_vllm_asks_for_more_memory() -> None:
    edits = Edits(SimpleNamespace(device=CPU, max_num_reqs=4, dtype=torch.float32), columns=500)
    windows = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=32)
    for layers in ([windows] * 4, []):  # the latter of a model without attention
        with pytest.raises(UnbindError, match="no layer of this model keeps keys and values of full attention"):
            edits.share_of_pages(layers)
