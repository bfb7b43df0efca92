"""A takedown on a GPU: fitted there, within what was planned, and by a server's own worker."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

from server import demo
from server.bench.scale.figures import Size, figures
from server.bench.server import served
from tests.cuda.test_engine import loaded_on
from unbind_core import FitOptions, ModuleBank, UnbindModule, attach, fit, parse_forget, parse_retain
from unbind_core.progress import silent

KEY = "test-admin-key"
LINES = (demo.ROWS / "forget_b.jsonl").read_text().splitlines()
WAIT = 240.0


def test_a_module_fitted_there_stops_recital_on_either_device(tmp_path: Path) -> None:
    loaded, forget = loaded_on("cuda"), parse_forget(LINES)
    retain = parse_retain(demo.RETAIN_TRAIN.read_text().splitlines())
    module, report = fit(
        loaded.model,
        loaded.tokenizer,
        forget,
        retain,
        name="set-b",
        identity=loaded.identity,
        options=FitOptions(effort=0.2, retain_limit=300),
        cache=tmp_path,
    )
    assert report.outcome in ("calibrated", "short")
    module.save(tmp_path / "set-b.safetensors")
    for device in ("cuda", "cpu"):
        asked, bank = loaded_on(device), ModuleBank(torch.device(device))
        bank.add(UnbindModule.load(tmp_path / "set-b.safetensors", model=asked.identity))
        recited = {"with": 0, "without": 0}
        for row in forget:
            prompt = asked.tokenizer(row.prompt, return_tensors="pt").to(device)
            told = asked.tokenizer(row.continuation, add_special_tokens=False).input_ids[:50]
            for name, modules in (("with", None), ("without", [])):
                with attach(asked.model, bank, modules):
                    ids = asked.model.generate(**prompt, max_new_tokens=50, do_sample=False)[0]
                recited[name] += ids[-50:].tolist() == told
        assert recited["without"] >= 6 and recited["with"] == 0


def test_no_stage_takes_more_memory_than_was_planned() -> None:
    found = figures(
        "qwen2.5-coder-0.5b",
        [Size(2, 12, 60, 96)],
        Size(0, 300, 2700, 512),
        dtype=torch.bfloat16,
        device="cuda",
        modules=(1,),
        progress=silent,
    )
    stages = found["measured"][0]["stages"]
    over = {name: round(stage["of_plan"]["memory"], 2) for name, stage in stages.items()}
    assert over and max(over.values()) <= 1, over


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_there_takes_code_down(tmp_path: Path, dtype: str) -> None:
    rows = [json.loads(line) for line in LINES[:5]]
    settings = {
        "model": demo.BASE,
        "adapter": demo.ADAPTER,
        "device": "cuda",
        "dtype": dtype,
        "admin_key": KEY,
        "modules_dir": tmp_path / "modules",
        "retain": demo.RETAIN_TRAIN,
        "max_slots": 8,
        "max_model_len": 1024,
    }
    (tmp_path / "modules").mkdir()
    with served(settings, tmp_path / "data", log=tmp_path / "log") as running:

        def call(path: str, body: Any = None) -> Any:
            told = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
            data = None if body is None else json.dumps(body).encode()
            with urlopen(Request(running.url + path, data, told), timeout=60) as answer:
                return json.loads(answer.read())

        def recited(modules: list[str]) -> int:
            given = 0
            for row in rows:
                asked = {"prompt": row["prompt"], "max_tokens": 60, "temperature": 0, "unbind": {"modules": modules}}
                text = str(call("/v1/completions", asked)["choices"][0]["text"])
                given += text.startswith(row["continuation"][:60])
            return given

        options = {"protect": "module", "effort": 0.5}
        job = call("/admin/v1/takedowns", {"name": "five", "rows": rows, "options": options})
        deadline = time.monotonic() + WAIT
        while (state := call(f"/admin/v1/jobs/{job['job_id']}"))["state"] in ("queued", "running"):
            assert time.monotonic() < deadline, (state, (tmp_path / "log").read_text()[-2000:])
            time.sleep(0.5)
        assert (state["state"], state["outcome"]) == ("succeeded", "active"), state
        assert recited([]) >= 3 and recited(["five"]) == 0
