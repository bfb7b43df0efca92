"""Quantised checkpoints under vLLM, whose kernels take them as they are stored: the model that modules are fitted on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.backends import cpu

from server import demo
from server.engine.choice import build_engine, plan_engine
from server.engine.embedded.engine import EmbeddedEngine
from server.engine.request import Sampling
from server.engine.vllm.engine import VllmEngine
from tests.engines.both import Engines, demo_prompt, options
from tests.support.asking import ask, sync
from tests.support.modules import build_module
from tests.support.quantised import compressed, packed, said_to_be
from unbind_core.architecture import load_model, numerics
from unbind_core.errors import UnbindError

SCORED = Sampling(max_tokens=1, prompt_logprobs=0)


@pytest.fixture(scope="module", params=["gptq", "awq", "compressed-tensors"])
def quantised_engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines | None]:
    """None where the processor has no kernels for such weights, and that is told."""
    folder, name = tmp_path_factory.mktemp("quantised") / "it", request.param
    if name == "compressed-tensors":
        compressed(demo.BASE, folder)
    else:
        packed(demo.BASE, folder, name, group=32, sym=name == "gptq")
    loaded = load_model(folder, dtype=torch.bfloat16)
    quantised = numerics(loaded.model)["quantisation"]
    module = build_module(
        loaded.identity, "often", layer=3, calibrated={"dtype": "bfloat16", "quantisation": quantised}
    )
    embedded = EmbeddedEngine(
        loaded.model, loaded.tokenizer, max_slots=4, max_length=2048, queue_limit=50, chunk_tokens=256
    )
    told = replace(options(folder, "block-size=32"), model=folder, adapted=False, dtype="bfloat16")
    given = load_model(folder, dtype=torch.bfloat16)
    if cpu.get_cpu_capability() == "AVX2":
        with pytest.raises(UnbindError, match=r"^engine vllm: the model is quantised .* with AVX-512 alone"):
            plan_engine("vllm", given, told)
        yield None
        return
    vllm = build_engine("vllm", given, plan_engine("vllm", given, told), told)
    assert isinstance(vllm, VllmEngine)
    made = Engines(vllm, embedded, [])
    for engine in made.both:
        engine.start()
        sync(engine, [module])
    rows = (demo.ROWS / "forget_b.jsonl").read_text().splitlines()
    made.prompts.extend(made.ids(demo_prompt(row))[:64] for row in rows)
    yield made
    vllm.close()
    embedded.close()


def _scores(engines: Engines, modules: tuple[str, ...]) -> list[torch.Tensor]:
    """Of each engine the log-probabilities of all prompt tokens but the first ones."""
    found = []
    for engine in engines.both:
        answers = ask(engine, [engines.request(engine, ids, modules, sampling=SCORED) for ids in engines.prompts])
        found.append(torch.tensor([one.logprob for answer in answers for one in answer.whole.prompt_logprobs[1:]]))
    return found


def test_vllm_computes_what_quantised_weights_stand_for_with_and_without_a_module(
    quantised_engines: Engines | None,
) -> None:
    if quantised_engines is None:
        return
    plain = _scores(quantised_engines, ())
    edited = _scores(quantised_engines, ("often",))
    for vllm, embedded in (plain, edited):
        assert (vllm - embedded).abs().mean() < 0.06  # what bfloat16 leaves open
    assert (plain[0] - edited[0]).abs().mean() > 0.5


def test_quantised_weights_are_served_in_the_precision_that_vllm_computes_them_in(tmp_path: Path) -> None:
    folder = packed(demo.BASE, tmp_path / "it", "gptq", sym=True)
    told = replace(options(folder), model=folder, adapted=False)
    with pytest.raises(
        UnbindError, match=r"^dtype: the model is quantised \(gptq, bits 4.*start with --dtype bfloat16"
    ):
        plan_engine("vllm", load_model(folder), told)


def test_an_adapter_acts_on_compressed_tensors_and_its_checkpoint_is_another_model(tmp_path: Path) -> None:
    folder, ids = compressed(demo.BASE, tmp_path / "it"), torch.arange(100, 140)[None]
    alone, adapted = load_model(folder), load_model(folder, demo.ADAPTER)
    assert (alone.model(ids).logits - adapted.model(ids).logits).abs().mean() > 0.5
    assert alone.identity.fingerprint != adapted.identity.fingerprint


def test_settings_that_the_library_cannot_read_are_told_with_the_folder(tmp_path: Path) -> None:
    folder = said_to_be(compressed(demo.BASE, tmp_path / "it"), {"quant_method": "compressed-tensors"})
    with pytest.raises(UnbindError, match=rf"^model: '{folder}' could not be loaded as a causal language model: "):
        load_model(folder)
