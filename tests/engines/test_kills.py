"""The process that schedules dies under load: no answer goes without its module. Of the one that computes see ``test_life.py``."""

from __future__ import annotations

import json
from functools import partial

from server import demo
from server.bench.engines.kills import killed
from server.bench.engines.subject import Subject
from tests.engines.both import shipped
from unbind_core.architecture import load_model


def test_no_answer_under_a_module_is_the_plain_model_s_whatever_dies() -> None:
    loader = partial(load_model, demo.BASE, demo.ADAPTER)
    encode = loader().tokenizer
    rows = [json.loads(line)["prompt"] for line in (demo.ROWS / "forget_a.jsonl").read_text().splitlines()]
    prompts = [encode(prompt, add_special_tokens=False)["input_ids"] for prompt in rows[:8]]
    figures = killed(Subject(demo.BASE, demo.ADAPTER, loader, shipped()[:1], prompts), 1, 1, lambda _: None)
    assert figures["kills"] == {"EngineCore": 1} and figures["answers"]["expected"] > 0
    assert (figures["answers"]["plain"], figures["answers"]["other"]) == (0, 0)
