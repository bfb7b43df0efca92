"""A worker begins no fit that its device has no room for, and says so before it has loaded anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from server.registry.files import forget_file, save_forget
from server.registry.tables import JobKind
from server.service import load_served
from server.settings import Settings
from server.worker import context as working
from server.worker.plan import Task
from server.worker.stages import STAGES
from unbind_core.architecture import load_model
from unbind_core.encoding import fim_prompt
from unbind_core.errors import DataError, TooLarge, UnbindError
from unbind_core.planning import room
from unbind_core.progress import silent
from unbind_core.rows import ForgetRow

ROWS = [ForgetRow(f"def f{i}():\n", f"    return {i} + secret_{i}\n" * 4) for i in range(4)]


@pytest.fixture
def context(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> working.Context:
    def unloadable(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(working, "load_model", unloadable)
    settings = Settings(model=checkpoint, data_dir=tmp_path)
    digest = save_forget(tmp_path, ROWS)
    rows = str(forget_file(tmp_path, digest))
    task = Task("job_1", JobKind.TAKEDOWN, "a", digest, {}, str(tmp_path), {}, rows=rows)
    return working.Context(settings, task, silent)


def test_a_fit_without_room_is_refused_before_the_model_is_loaded(
    context: working.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda _: 2**27)
    with pytest.raises(TooLarge, match=r"stage .* would take .* GiB on cpu .* and 0\.1 GiB are free"):
        context.require_room()
    monkeypatch.undo()
    context.require_room()
    monkeypatch.setattr(room, "free_bytes", lambda _: 2**27)
    context.require_room()  # its own model is what takes the room by now


def test_a_disk_without_room_is_told_of_too(context: working.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.Room, "at", classmethod(lambda cls, device, _: cls(device, 2**40, 10)))
    with pytest.raises(TooLarge, match=r"cache would take .* give data_dir a larger disk"):
        context.require_room()


def test_a_job_whose_fit_is_done_needs_no_room_for_it(
    context: working.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda _: 0)
    done = {"fit": {"folder": "a", "result": {"outcome": "calibrated"}}}
    task = Task(**{**vars(context.task), "done": done})
    working.Context(context.settings, task, silent).require_room()


def test_a_worker_fits_on_a_device_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    shared = Settings(model=checkpoint, data_dir=tmp_path, device="cuda:0")
    apart = shared.model_copy(update={"worker_device": "cpu"})
    assert (shared.fitting_device, apart.fitting_device) == ("cuda:0", "cpu")
    task = Task("job_1", JobKind.TAKEDOWN, "a", "", {}, str(tmp_path), {})
    loaded = working.Context(apart, task, silent).loaded
    assert next(loaded.model.parameters()).device.type == "cpu"  # cuda:0 is not even looked for


@pytest.mark.parametrize(
    ("device", "said"), [("cuda:64", "worker_device: 'cuda:64' is not there"), ("gpu", "'gpu' is no torch device")]
)
def test_a_device_that_is_not_there_is_named_before_the_model_is_loaded(
    context: working.Context, device: str, said: str
) -> None:
    elsewhere = context.settings.model_copy(update={"worker_device": device})
    with pytest.raises(UnbindError, match=said):
        working.Context(elsewhere, context.task, silent).require_room()


def test_a_worker_that_computes_otherwise_than_the_server_makes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    own = load_model(checkpoint).identity.fingerprint

    def require(dtype: str, fingerprint: str) -> None:
        served = {"served": {"dtype": dtype, "fingerprint": fingerprint}}
        task = Task("job_1", JobKind.TAKEDOWN, "a", "", served, str(tmp_path), {})
        working.Context(Settings(model=checkpoint, data_dir=tmp_path), task, silent).require_served()

    require("float32", own)
    with pytest.raises(DataError, match=r"dtype: this worker computes in float32, .* in bfloat16, .* --dtype bfloat16"):
        require("bfloat16", own)
    with pytest.raises(DataError, match=f"this worker has the model {own[:12]}, .* 012345678901;"):
        require("float32", "0123456789012345")


def test_what_another_attempt_found_on_another_model_is_not_gone_on_with(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unasked(*_: object, **__: object) -> None:
        raise AssertionError("it was fitted")

    monkeypatch.setattr("server.worker.stages.fit", unasked)
    monkeypatch.setenv("UNBIND_MODEL", str(checkpoint))
    monkeypatch.setenv("UNBIND_DATA_DIR", str(tmp_path))
    options = {"served": {"dtype": "float32", "fingerprint": "0123456789012345"}}
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "attempt-1" / working.SCORES_FILE).write_text("[]", encoding="utf-8")
    done = {"check": {"folder": "attempt-1", "files": [working.SCORES_FILE], "result": {"memorised": True}}}
    rows = str(forget_file(tmp_path, save_forget(tmp_path, ROWS)))
    task = Task("job_1", JobKind.TAKEDOWN, "a", "", options, str(tmp_path / "attempt-2"), done, rows=rows)
    with pytest.raises(DataError, match=r"this worker has the model .* 012345678901; start the worker on"):
        STAGES["fit"](task, silent)


@pytest.mark.parametrize("setting", ["data_dir", "private_store"])
def test_rows_that_a_worker_with_other_settings_does_not_find_were_not_purged(
    context: working.Context, tmp_path: Path, setting: str
) -> None:
    settings = Settings.model_validate({"model": context.settings.model, setting: str(tmp_path / "other")})
    elsewhere = working.Context(settings, replace(context.task, rows=str(tmp_path / "other" / "forget.jsonl")), silent)
    with pytest.raises(
        DataError, match=f"^{setting}: .*start the worker with the server's and retry the job"
    ) as raised:
        _ = elsewhere.forget
    assert "purged" not in str(raised.value)


def test_a_fit_asks_in_the_form_that_the_server_fills_gaps_in(checkpoint: Path, tmp_path: Path) -> None:
    told = "<|fim_suffix|>{suffix}<|fim_prefix|>{prefix}<|fim_middle|>"
    settings = Settings(model=checkpoint, data_dir=tmp_path, fim_template=told)
    served, task = load_served(settings), Task("job_1", JobKind.TAKEDOWN, "a", "", {}, str(tmp_path), {}, rows="")
    fitted = working.Context(settings, task, silent).loaded
    prompts = {tuple(fim_prompt(loaded.tokenizer, "a", "b") or ()) for loaded in (served, fitted)}
    assert len(prompts) == 1 and prompts != {tuple(fim_prompt(load_model(checkpoint).tokenizer, "a", "b") or ())}
