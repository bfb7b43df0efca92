"""The model without its adapter is led to where the adapter leads on retained code, and to nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from tests.support import memorising
from unbind_core import load_model
from unbind_core.encoding import encode
from unbind_core.fitting.adopt import adopt
from unbind_core.fitting.context import Context
from unbind_core.fitting.corrections.leading import leading, led
from unbind_core.fitting.corrections.reference import Kind, Reference, load_reference
from unbind_core.fitting.fit import context_of, fit, prepare_retained
from unbind_core.fitting.options import FitOptions
from unbind_core.rows import ForgetRow, RetainRow

FORGET = [ForgetRow(row["prompt"], row["continuation"]) for row in memorising.forget_rows()]
TEXTS = [row["text"] for row in memorising.retain_rows()]
# Each longer than a span that counts as repeated.
RETAIN = [RetainRow("\n".join(TEXTS[i::20] + TEXTS[i::13])) for i in range(20)]


@pytest.fixture(scope="module")
def folders(memorised: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and an adapter that moves everything it says."""
    adapter, model = tmp_path_factory.mktemp("leading") / "adapter", AutoModelForCausalLM.from_pretrained(memorised)
    torch.manual_seed(1)
    moved = get_peft_model(
        model, LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    )
    for name, parameter in moved.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(2)
    moved.save_pretrained(str(adapter))
    return memorised, adapter


def made(folders: tuple[Path, Path], cache: Path | None = None, forget: list[ForgetRow] = FORGET) -> Context:
    loaded = load_model(*folders)
    return context_of(
        loaded.model,
        loaded.tokenizer,
        forget,
        RETAIN,
        (),
        "m",
        loaded.identity,
        FitOptions(seed=1),
        lambda _: None,
        cache,
    )


def said(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def test_the_base_is_led_nearer_on_retained_code_and_is_as_before_afterwards(folders: tuple[Path, Path]) -> None:
    context, reference = made(folders), load_reference(*folders)
    assert reference.model is not None
    ids = encode(context.tokenizer, RETAIN[3].text)
    plain, wanted = said(reference.model, ids), said(context.model, ids)
    with led(context, reference) as towards:
        nearer = said(reference.model, ids)
        assert towards.led is not None and towards.led[1] < 0.6 * towards.led[0]
        assert towards.to_json()["led"] == dict(zip(("before", "after"), towards.led, strict=True))

    def apart(q: torch.Tensor) -> float:
        return float((wanted.exp() * (wanted - q)).sum(-1)[8:].mean())

    assert apart(nearer) < 0.6 * apart(plain)
    assert torch.equal(said(reference.model, ids), plain) and "led" not in reference.to_json()


def test_another_reference_and_one_that_is_near_already_are_left_alone(folders: tuple[Path, Path]) -> None:
    context, base = made(folders), load_reference(*folders)
    for reference in (Reference(), replace(base, kind=Kind.NAMED)):
        assert leading(context, reference) is None
        with led(context, reference) as towards:
            assert towards is reference
    same = replace(base, model=load_model(*folders).model)  # nothing to learn, so that nothing is gained
    with led(context, same) as towards:
        assert towards is same
    short = replace(context, retain=[RetainRow("x")] * len(RETAIN))
    assert leading(short, base) is None  # no row goes on beyond where its states say whose they are


def test_a_fit_and_who_takes_its_module_over_are_held_to_the_led_reference(folders: tuple[Path, Path]) -> None:
    loaded, reference = load_model(*folders), load_reference(*folders)
    asked = (loaded.model, loaded.tokenizer)
    module, _ = fit(
        *asked,
        FORGET[:3],
        RETAIN,
        name="m",
        identity=loaded.identity,
        reference=reference,
        options=FitOptions(effort=0.05),
    )
    told = module.measured["correction"]["reference"]
    assert told["kind"] == "base" and told["led"]["after"] < told["led"]["before"]
    other = replace(loaded.identity, fingerprint="0" * 64)
    taken = adopt(*asked, replace(module, kappa=1.0), FORGET[:3], RETAIN, identity=other, reference=reference)
    assert taken.measured["correction"]["reference"]["led"]["before"] == pytest.approx(told["led"]["before"], rel=1e-3)


def test_what_was_learned_is_kept_and_depends_on_forget_rows_only_where_retain_rows_repeat_them(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    context, reference = made(folders, tmp_path), load_reference(*folders)
    loaded = load_model(*folders)
    seconds = prepare_retained(
        loaded.model,
        loaded.tokenizer,
        RETAIN,
        cache=tmp_path,
        identity=loaded.identity,
        options=FitOptions(seed=1),
        reference=reference,
    )
    (file,) = tmp_path.glob("leading-*")
    assert "reference" in seconds
    kept = {**load_file(file), "apart": torch.tensor([5.0, 0.25])}
    save_file(kept, tmp_path / "new")
    (tmp_path / "new").replace(file)  # as caches are written: a file that is read from is never written to
    found = leading(context, reference)
    assert found is not None and (found[0], found[1].divergence) == (5.0, 0.25)  # it was taken from there
    file.unlink()
    file.write_bytes(b"damaged")
    again = leading(context, reference)
    assert again is not None and torch.equal(again[1].parts.u, found[1].parts.u)
    row = context.parts.retain_fit[0]
    other = leading(made(folders, tmp_path, [ForgetRow("", RETAIN[row].text)]), reference)
    assert len(list(tmp_path.glob("leading-*"))) == 2
    assert other is not None and not torch.equal(other[1].parts.u, found[1].parts.u)
