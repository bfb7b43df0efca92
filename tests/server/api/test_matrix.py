"""Every endpoint, whole and streamed, with one answer and two, with tools and without: an enforced module is evaluated and acts,
and a guard in force steers, in each cell. On the demo model, which recites the rows where nothing is in force.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, NamedTuple

import pytest

from server import demo
from server.settings import Settings
from tests.support.live import ADMIN_KEY, Answer, Live, serving
from tests.support.shapes import texts
from tests.support.slow_matcher import longest_run
from unbind_core.architecture import load_model

RUN, TOKENS = 8, 16
# a conversation reads as the program in it, and calls are written as Qwen's models do: {tools} {tool_calls} <tool_call>
TEMPLATE = (
    "{# tools tool_calls <tool_call> #}{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
FUNCTION = {"name": "write", "description": "Writes a file."}


class Cell(NamedTuple):
    """One way to ask. ``tools``: none, offered (``auto``) or demanded (``required``)."""

    path: str
    stream: bool
    n: int = 1
    tools: str = ""

    def body(self, prompt: str) -> dict[str, Any]:
        """The request for what follows ``prompt``."""
        common: dict[str, Any] = {"temperature": 0, "seed": 1, "stream": self.stream}
        said = [{"role": "user", "content": prompt}]
        offered: dict[str, Any] = {}
        match self.path:
            case "/v1/completions" | "/v1/fim/completions":
                return {**common, "prompt": prompt, "max_tokens": TOKENS, "n": self.n}
            case "/completion":
                return {**common, "prompt": prompt, "n_predict": TOKENS, "n_cmpl": self.n}
            case "/infill":
                return {**common, "input_prefix": prompt, "input_suffix": "\n", "n_predict": TOKENS, "n_cmpl": self.n}
            case "/v1/chat/completions":
                if self.tools:
                    tool = {"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}
                    offered = {"tools": [tool], "tool_choice": self.tools}
                return {**common, "messages": said, "max_tokens": TOKENS, "n": self.n, **offered}
            case "/v1/responses":
                if self.tools:
                    tool = {"type": "function", **FUNCTION, "parameters": SCHEMA}
                    offered = {"tools": [tool], "tool_choice": self.tools}
                return {**common, "input": prompt, "max_output_tokens": TOKENS, **offered}
            case _:
                if self.tools:
                    chosen = {"auto": "auto", "required": "any"}[self.tools]
                    offered = {"tools": [{**FUNCTION, "input_schema": SCHEMA}], "tool_choice": {"type": chosen}}
                return {**common, "messages": said, "max_tokens": TOKENS, **offered}

    @property
    def recites(self) -> bool:
        """Whether the row follows where nothing is in force: it does not behind the beginning of a call."""
        return self.tools != "required"


BOTH, TOOLS = (False, True), ("", "auto", "required")
CELLS = [
    *(
        Cell(p, s, n)
        for p, s, n in product(("/v1/completions", "/v1/fim/completions", "/completion", "/infill"), BOTH, (1, 2))
    ),
    *(Cell("/v1/chat/completions", s, n, t) for s, n, t in product(BOTH, (1, 2), TOOLS)),
    *(Cell(p, s, 1, t) for p, s, t in product(("/v1/responses", "/v1/messages"), BOTH, TOOLS)),
]
ROWS = [json.loads(line) for line in (demo.ROWS / "forget_a.jsonl").read_text().splitlines()]
ROWS = [row for row in ROWS if (row["prompt"] + row["continuation"]).isascii()][:12]
BEHIND = [row["continuation"] for row in ROWS]  # what stands in the prompt may come back


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The demo server: under ``bound`` its module is enforced by policy, under ``guarded`` a takedown's guard steers."""
    settings = Settings(
        data_dir=tmp_path_factory.mktemp("matrix"),
        modules_dir=demo.MODULES,
        worker=False,
        admin_key=ADMIN_KEY,
        max_slots=4,
        max_model_len=512,
        profiles={"bound": {"enforced": ["demo-a"]}, "guarded": {}},
    )
    loaded = load_model(demo.BASE, demo.ADAPTER)
    loaded.tokenizer.chat_template = TEMPLATE
    with serving(settings, loaded) as running:
        options = {"protect": "guard", "scope": "profile:guarded", "guard": {"run": RUN}}
        rows = [{"prompt": row["prompt"], "continuation": row["continuation"]} for row in ROWS]
        made = running.admin("/takedowns", {"name": "held", "rows": rows, "options": options})
        assert made.status == 202, made.raw
        yield running


@pytest.fixture(scope="module")
def prompt(server: Live) -> str:
    """The beginning of a row that is recited."""
    for row in ROWS:
        if recital(server.complete(prompt=row["prompt"], max_tokens=TOKENS)) >= RUN:
            return str(row["prompt"])
    raise AssertionError("the demo model recites nothing")


def recital(answer: Answer) -> int:
    """Lexemes of the longest protected run in any of its choices."""
    return max(longest_run(text, BEHIND) for text in texts(answer))


def asked(server: Live, cell: Cell, prompt: str, profile: str = "") -> Answer:
    """The cell's answer under a profile, with as many choices as it asked for."""
    answer = server.call(f"/p/{profile}{cell.path}" if profile else cell.path, cell.body(prompt))
    assert answer.status == 200, (cell, answer.raw)
    assert len(texts(answer)) == cell.n, cell
    return answer


def test_without_a_module_or_guard_the_row_is_recited(server: Live, prompt: str) -> None:
    cells = [cell for cell in CELLS if cell.recites]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda cell: asked(server, cell, prompt), cells))
    assert not [cell for cell, answer in zip(cells, answers, strict=True) if recital(answer) < RUN]


def test_an_enforced_module_is_evaluated_and_acts_in_every_cell(server: Live, prompt: str) -> None:
    def counted() -> dict[str, Any]:
        return dict(server.service.engine.gate_counts().result(60)["demo-a"])

    for cell in CELLS:
        before = counted()
        answer = asked(server, cell, prompt, "bound")
        after = counted()
        assert "demo-a@" in answer.headers["x-unbind-modules"], cell
        for phase in ("prefill", "decode") if cell.recites else ("prefill",):  # a call may end before its first token
            evaluated, opened = (after[phase][kind] - before[phase][kind] for kind in (0, 1))
            assert evaluated >= cell.n and opened > 0, (cell, phase)
        assert recital(answer) < RUN, cell


def test_a_guard_in_force_steers_in_every_cell(server: Live, prompt: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda cell: asked(server, cell, prompt, "guarded"), CELLS))
    for cell, answer in zip(CELLS, answers, strict=True):
        assert "held:guard@" in answer.headers["x-unbind-modules"] and recital(answer) < RUN, cell
    shown = server.call("/metrics").raw.decode()
    for path in {cell.path for cell in CELLS if cell.recites}:
        assert f'unbind_guard_bars_total{{module="held",route="{path}"}}' in shown, path
