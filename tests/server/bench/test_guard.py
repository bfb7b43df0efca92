"""What ``unbind bench guard`` asks and how it judges, on small samples: nothing gets out, nothing ordinary is barred, and the bench
would see it if it did.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from typer.testing import CliRunner

from server import demo
from server.bench.attacks.attacked import System
from server.bench.guard import ordinary, rows
from server.bench.guard.adversary import Telling
from server.bench.guard.asking import Asking, parts
from server.bench.guard.attacks import SECRET
from server.bench.guard.cost import build
from server.bench.guard.disguise import DISGUISES, Spelling
from server.bench.guard.figures import guard_figures
from server.bench.guard.http import http_figures
from server.bench.guard.matcher import Judge
from server.bench.guard.opening import Beside
from server.bench.guard.prompt_filter import PromptFilter
from server.bench.guard.script import Desk
from server.bench.guard.tries import Arm, Client, Tally, Tries, guards_of
from server.cli import build as command
from server.engine.forcing import PIECE
from server.engine.guarding import Guarded
from server.engine.request import Delta, GenerationRequest, Sampling
from unbind_core.architecture import load_model
from unbind_core.errors import UnbindError
from unbind_core.guard.book import GuardBook
from unbind_core.guard.follower import Follower
from unbind_core.guard.index import build_index
from unbind_core.module import UnbindModule
from unbind_core.progress import silent

ROW = (
    "def weigh(items, scale):\n    total = 0\n    for item in items:\n        total += item.weight * scale[item.kind]\n"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The demo's."""
    return AutoTokenizer.from_pretrained(demo.BASE)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def spelling(tokenizer: PreTrainedTokenizerBase) -> Spelling:
    """How texts are written in its tokens."""
    return Spelling(tokenizer)


@pytest.fixture(scope="module")
def protected() -> list[str]:
    """The demo's rows."""
    return rows.forget_texts("ab")


def test_no_try_gets_a_run_out(tokenizer: PreTrainedTokenizerBase, protected: list[str]) -> None:
    """And many would without a guard, or there would be nothing to see."""
    found = Tries(tokenizer, protected, 3).run(300, silent)
    assert (found["violations"], found["tries"]) == (0, 300), found["found"]
    assert found["tries_that_met_a_run"] > 50


def test_what_gets_out_is_seen(
    tokenizer: PreTrainedTokenizerBase, protected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where guards let everything pass, the same tries hold runs."""
    monkeypatch.setattr("server.engine.guarding.Guarding.accepts", lambda *_: True)
    assert Tries(tokenizer, protected, 3).run(100, silent)["violations"] > 10


def test_what_the_client_sent_of_one_row_is_its_own_for_every_guard(spelling: Spelling) -> None:
    """Two rows go on alike; the prompt holds the beginning of the one, and the guard of the other lets it be repeated."""
    first, second = "alpha beta gamma delta one two three four", "gamma delta five six seven eight nine ten"
    guards = guards_of(([first], 8, "steer", 3), ([second], 8, "stop", 3))
    arm = Arm("two", [first, second], guards, (Judge([first], 8), Judge([second], 8)))

    def held(prompt: str) -> bool:
        tally = Tally()
        said = Delta("alpha beta " + second, (), "stop")
        Client(0, arm, True, prompt, [], tally).hear(spelling, said)
        follower = Follower(guards, lambda: prompt)
        assert bool(follower.take(said.text + "\n").sure) == bool(tally.violations)
        return bool(tally.violations)

    assert held("") and held("alpha beta")
    assert not held("alpha beta gamma delta")


def test_a_try_is_the_same_for_its_seed(tokenizer: PreTrainedTokenizerBase, protected: list[str]) -> None:
    def said() -> list[str]:
        tries = Tries(tokenizer, protected, 5)
        texts: list[str] = []
        ask = tries.desk.ask

        def heard(request: GenerationRequest, script: Any, hear: Callable[[Delta], None]) -> None:
            def both(delta: Delta) -> None:
                texts.append(f"{request.sampling.seed} {delta.text}")
                hear(delta)

            ask(request, script, both)

        tries.desk.ask = heard  # type: ignore[method-assign]
        tries.run(12, silent)
        return sorted(texts)

    assert said() == said()


def test_likeliest_tokens_are_told_where_nobody_guards(tokenizer: PreTrainedTokenizerBase) -> None:
    """Or tries by log-probabilities would try nothing."""
    desk, spelling, told = Desk(tokenizer, 4), Spelling(tokenizer), []
    tokens = spelling.spelt(random.Random(0), ROW)
    space = spelling.token(" ")
    sampling = Sampling(max_tokens=len(tokens), logprobs=1, logit_bias={space: 100.0})
    desk.ask(GenerationRequest((space,), sampling), Telling(tokens, [space], 1, False), told.append)
    desk.run()
    assert "".join(delta.text for delta in told).strip() == ""
    assert spelling.text([entry.top[0][0] for delta in told for entry in delta.logprobs]) == ROW


@pytest.mark.parametrize("name", sorted(set(DISGUISES) - {"littered", "boxed", "remarked", "parted"}))
def test_a_disguise_changes_the_writing_and_not_what_the_judge_reads(name: str) -> None:
    judge = Judge([ROW], 20)
    for seed in range(5):
        assert judge.found(DISGUISES[name](random.Random(seed), ROW))


def test_any_text_can_be_spelt_in_many_ways(tokenizer: PreTrainedTokenizerBase) -> None:
    spelling, text = Spelling(tokenizer), ROW + "é\u200b “ｗ”"
    ways = {tuple(spelling.spelt(random.Random(seed), text, 0.5)) for seed in range(5)}
    assert len(ways) == 5 and {spelling.text(way) for way in ways} == {text}


def test_ordinary_code_passes_and_own_code_is_repeated(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PACKAGES", ())
    monkeypatch.setattr(ordinary, "PROTECTED_ROWS", 20)
    few, held_out = rows.forget_texts("b"), rows.retain_test()[:20]
    monkeypatch.setattr(rows, "forget_texts", lambda: few)
    monkeypatch.setattr(rows, "retain_test", lambda: held_out)
    found = ordinary.Ordinary(tokenizer, 0).run(150, silent)
    assert (found["false_bars"], found["ordinary_completions"], found["missed"]) == (0, 150, 0)
    assert found["own_code"] == {"completions": 64, "false_bars": 0, "changed": {}}
    assert found["retain_test"]["completions"] == 20


def test_a_bar_is_false_where_no_run_is_complete_at_any_token(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PACKAGES", ())
    monkeypatch.setattr(ordinary, "PROTECTED_ROWS", 1)
    monkeypatch.setattr(rows, "forget_texts", lambda: [ROW * 4])
    bench, judges = ordinary.Ordinary(tokenizer, 0), {"run 16": Judge([ROW], 16)}

    def tallied(*parts: str) -> ordinary.Tally:
        tally = ordinary.Tally()
        ids = [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
        bench._count(tally, judges, "", ids, Guarded({"run 16": 1}))
        return tally

    kept, other = tallied(ROW), tallied("x = 1\n")
    assert (kept.held["run 16"], kept.barred["run 16"], len(kept.false)) == (1, 1, 0)
    assert (other.held["run 16"], other.barred["run 16"], len(other.false)) == (0, 1, 1)
    beginning = ROW[ROW.index("weigh") : ROW.index("total +=")] + "total"
    assert (within := tallied(beginning, "led")).mid_word == 1 and not within.held and not within.false


def test_parts_of_every_kind_of_answer_are_read() -> None:
    scored = {
        "content": [{"token": "a", "top_logprobs": [{"token": "b", "logprob": -1}, {"token": "a", "logprob": -2}]}]
    }
    chat = {"choices": [{"index": 1, "message": {"content": "a"}, "logprobs": scored, "finish_reason": "stop"}]}
    (part,) = parts(chat)
    assert (part.index, part.text, part.spelt, part.likeliest, part.finish) == (1, "a", ("a",), ("b",), "stop")
    (part,) = parts({"choices": [{"index": 0, "text": "x", "token_ids": [4], "finish_reason": None}]})
    assert (part.text, part.ids, part.spelt) == ("x", (4,), ())
    assert [(part.index, part.text) for part in parts([{"content": "x"}, {"content": "y"}])] == [(0, "x"), (1, "y")]
    said = {"object": "response", "output": [{"content": [{"text": "x"}]}], "status": "completed"}
    events = [
        said,
        {"type": "response.output_text.delta", "delta": "y"},
        {"type": "response.completed", "response": said},
    ]
    events += [{"type": "message", "content": [{"text": "z"}], "stop_reason": "end_turn"}, {"type": "ping"}]
    events += [{"type": "content_block_delta", "delta": {"text": "w"}}]
    found = [(part.text, part.spelt, part.finish) for event in events for part in parts(event)]
    last = [("z", (), "end_turn"), ("", (), None), ("w", (), None)]
    assert found == [("x", (), "completed"), ("y", (), None), ("", ("x",), "completed"), *last]


def test_clients_ask_on_every_route(tokenizer: PreTrainedTokenizerBase) -> None:
    asking = Asking(tokenizer, [(row["prompt"], row["continuation"]) for row in rows.json_rows("a")])
    calls = [asking.draw(random.Random(number)) for number in range(200)]
    paths = {"/v1/completions", "/v1/chat/completions", "/v1/fim/completions", "/infill", "/completion"}
    paths |= {"/v1/responses", "/v1/messages"}
    assert {call.path for call in calls} == paths
    assert {call.streams for call in calls} == {True, False}
    assert any(call.echoed for call in calls) and any("logit_bias" in call.body for call in calls)
    assert json.dumps(calls[0].body)


def test_the_filter_refuses_what_holds_a_row_or_is_near_one() -> None:
    refuses = PromptFilter([ROW]).refuses
    assert refuses(ROW) and refuses("x = 1\n" + ROW[:60]) and refuses("def weigh(items, scale):")
    assert not refuses("def read(path):\n    with open(path) as file:\n        return file.read()\n")


def test_what_an_index_costs_is_told() -> None:
    texts = [f"{ROW * 3}\nlast = {number}\n" for number in range(20)]
    book, facts = build(texts)
    assert book.names == {"g0"} and facts["rows"] == 20
    assert facts["bytes_per_lexeme"] > 0 and facts["build_seconds_a_row"] > 0


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UnbindError, match=r"--parts: 'try' is unknown; choose from tries, http"):
        guard_figures(["try"], progress=silent)
    ended = CliRunner().invoke(command(), ["bench", "guard", "--sizes", "0"])
    assert ended.exit_code and "--sizes" in ended.output


@pytest.mark.slow
def test_no_request_gets_a_run_out_of_a_server() -> None:
    found = http_figures(80, 1, silent)
    assert found["violations"] == 0, found["found"]
    assert found["statuses"]["200"] > 60 and found["tries"] == 76


def test_where_a_gate_opens_is_measured_as_the_engine_moves_it(protected: list[str]) -> None:
    """Under a module that never opens by itself: on pieces of rows that hold a stretch, and on no other."""
    loaded = load_model(demo.BASE, demo.ADAPTER)
    module = UnbindModule.load(demo.MODULE)
    shut = replace(module, tau=1e6, tau_close=None)
    half = replace(module, tau=6 * module.tau, tau_close=module.tau_close)
    index = build_index(protected, name=module.name, secret=SECRET)
    guards = GuardBook.of(SECRET, [index]).select([module.name])
    whole = [loaded.tokenizer(row, add_special_tokens=False)["input_ids"] for row in protected[:6]]
    texts = [*whole, *(ids[40:][:24] for ids in whole), loaded.tokenizer("import os\nimport sys\n")["input_ids"]]
    for one, some in ((shut, 6), (half, 9)):
        alone = [bool(gates.any()) for gates in System("alone", loaded, (one,)).gates(texts)]
        moved = [bool(gates.any()) for gates in Beside("beside", loaded, (one,), guards=guards).gates(texts)]
        assert not any(alone) and all(moved[:6]) and not moved[-1] and sum(moved) >= some
        beside = Beside("beside", loaded, (one,), guards=guards)
        read, ended = (
            [int(gates.nonzero()[0]) for gates in system.gates(whole)]
            for system in (beside, replace(beside, ends=True))
        )
        assert all((at + 1) % PIECE == 0 for at in read)
        assert all(at - PIECE < sooner <= at for at, sooner in zip(read, ended, strict=True)) and read != ended
