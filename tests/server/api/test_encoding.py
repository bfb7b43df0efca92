"""Prompts are bounded before they are tokenised, and large ones hold up nobody else."""

from __future__ import annotations

import asyncio
import copy
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from server import encoding
from server.encoding import INLINE, PIECE, THREADS, WAITING, Encoder
from server.errors import ApiError
from tests.support.live import TIMEOUT, Live, live
from tests.support.sentencepiece import sentencepiece
from unbind_core.encoding import encode, encode_behind

LINES = "def add(first, second):\n    return first + second\n\n\n" * 4000  # some 200,000 characters


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many characters the tokenizer was given, call by call."""
    seen: list[int] = []

    def counted(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        seen.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(encoding, "encode", counted)
    return seen


def test_ids_within_bounds_are_those_of_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    encoder = Encoder(tokenizer, 200_000)
    assert len(LINES) > 3 * PIECE
    for text in ("", "a", "é\U0001f600 x", LINES, LINES.replace("\n", " ")):
        assert encoder.ids(text, "prompt") == encode(tokenizer, text)
    encoder.close()


def test_a_token_that_only_the_tokenizer_has_is_refused_by_name(tokenizer: PreTrainedTokenizerBase) -> None:
    size = len(tokenizer)
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["<added>"])
    encoder = Encoder(more, 256, size)
    assert encoder.ids("x = 1", "prompt") == encode(tokenizer, "x = 1")
    for ask in (
        lambda text: encoder.ids(text, "prompt"),
        lambda text: encoder.last(text, 9),
        lambda text: encoder.first(text, 9),
    ):
        with pytest.raises(
            ApiError, match=rf"^prompt: the tokenizer has the token '<added>', .* knows {size}, .*leave it out"
        ):
            ask("x = <added> + 1")
    encoder.close()


def test_a_server_refuses_prompts_and_rows_with_a_token_that_its_model_has_not(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    more = AutoTokenizer.from_pretrained(folder)
    more.add_tokens([f"<added{i}>" for i in range(AutoConfig.from_pretrained(folder).vocab_size)])
    more.save_pretrained(folder)
    foreign = more.convert_ids_to_tokens(len(more) - 1)
    with live(folder, tmp_path) as server:
        refused = server.complete(prompt=f"x = {foreign} + 1", max_tokens=2)
        assert refused.status == 400 and f"the token '{foreign}'" in refused.error["message"], refused.raw
        rows = [{"prompt": "x =", "continuation": f" 1 + {foreign}"}]
        refused = server.admin(
            "/takedowns", {"name": "m", "rows": rows, "options": {"dry_run": True, "protect": "module"}}
        )
        assert refused.status == 400 and refused.error["message"].startswith(
            f"rows.0: the tokenizer has the token '{foreign}'"
        )
        assert server.complete(prompt="x = 1", max_tokens=2).status == 200


def test_a_text_that_cannot_fit_is_refused_unread_and_one_that_hardly_can_after_a_piece(
    tokenizer: PreTrainedTokenizerBase, taken: list[int]
) -> None:
    encoder = Encoder(tokenizer, 256)
    taken.clear()
    with pytest.raises(ApiError, match=r"^This model's maximum context length is 256 tokens") as refused:
        encoder.ids("x" * (256 * encoder.longest + 1), "prompt")
    assert (refused.value.code, refused.value.param, taken) == ("context_length_exceeded", "prompt", [])
    longer = Encoder(tokenizer, 20_000)
    taken.clear()
    with pytest.raises(ApiError) as refused:
        longer.ids("q~" * 5000 * longer.longest, "suffix")
    assert refused.value.param == "suffix" and taken == [PIECE]
    with pytest.raises(ApiError, match=r"content: .* 9 tokens that are taken at once") as refused:
        longer.ids("x" * (9 * longer.longest + 1), "content", 9)
    assert refused.value.code is None
    longer.check([0] * 20_000, "prompt")
    with pytest.raises(ApiError, match="20001 tokens"):
        longer.check([0] * 20_001, "prompt")


def test_the_ends_of_a_text_of_any_length_are_had_without_reading_the_rest(
    tokenizer: PreTrainedTokenizerBase, taken: list[int]
) -> None:
    encoder = Encoder(tokenizer, 256)
    whole = encode(tokenizer, LINES)
    taken.clear()
    assert encoder.last(LINES, 300) == (whole[-300:], False)
    assert encoder.first(LINES, 300) == (whole[:300], False)
    assert sum(taken) <= 2 * PIECE
    for end in (encoder.last, encoder.first):
        assert end(LINES, len(whole)) == (whole, True)
        assert end("one line", 99) == (encode(tokenizer, "one line"), True)
        assert end("", 5) == ([], True) and end("x", 0) == ([], False) and end("x", -3) == ([], False)
    flat = "x" * (2 * PIECE + 7)  # without a line to cut at
    assert len(encoder.last(flat, 10)[0]) == len(encoder.first(flat, 10)[0]) == 10


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "{}"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "{}"]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "{}"}, "suffix"),
        ("/v1/completions", {"prompt": [9] * 300_000}, "prompt"),
        ("/v1/completions", {"prompt": [[9], [9] * 300_000], "echo": True}, "prompt"),
        ("/v1/completions", {"prompt": ["{}"] * 100}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "{}"}]}, "messages"),
        ("/v1/fim/completions", {"prompt": "{}"}, "prompt"),
        ("/v1/fim/completions", {"prompt": "a", "suffix": "{}"}, "suffix"),
        ("/infill", {"prompt": "{}"}, "prompt"),
        ("/tokenize", {"content": "{}"}, "content"),
        ("/tokenize", {"messages": [{"role": "user", "content": "{}"}]}, "messages"),
        ("/detokenize", {"tokens": [9] * 300_000}, "tokens"),
    ],
)
def test_every_route_refuses_what_is_too_long_before_it_is_tokenised(
    server: Live, taken: list[int], path: str, body: dict[str, Any], field: str
) -> None:
    many = 100 if body.get("prompt") == ["{}"] * 100 else 1

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [filled(inner) for inner in value]
        return "x = [1]\n" * (400_000 // many) if value == "{}" else value

    answer = server.call(path, filled(body))
    assert (answer.status, answer.error["param"]) == (400, field), answer.raw[:300]
    assert sum(taken) <= 4 * PIECE


def test_infill_takes_long_files_and_reads_what_is_near_the_gap(server: Live, taken: list[int]) -> None:
    long = "x = [1]\n" * 100_000
    extra = [{"filename": "a.py", "text": long}]
    answer = server.call("/infill", {"input_prefix": long, "input_suffix": long, "input_extra": extra, "n_predict": 4})
    assert answer.status == 200 and answer.body["truncated"] is True
    assert sum(taken) <= 4 * PIECE


def test_health_answers_while_a_large_prompt_is_tokenised(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        if len(text) > INLINE:
            begun.set()
            go_on.wait(TIMEOUT)
        return encode(tokenizer, text)

    monkeypatch.setattr(encoding, "encode", held)
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(server.call, "/tokenize", {"content": "x = 1\n" * 4000})
        assert begun.wait(TIMEOUT)
        assert server.call("/health").status == 200 and server.complete(max_tokens=1).status == 200
        go_on.set()
        assert large.result(TIMEOUT).body["count"] > 4000


def test_few_large_texts_wait_for_a_thread_and_small_ones_never_do(tokenizer: PreTrainedTokenizerBase) -> None:
    async def crowd() -> None:
        encoder, go_on = Encoder(tokenizer, 256), threading.Event()
        held = [asyncio.create_task(encoder.run(INLINE + 1, go_on.wait, TIMEOUT)) for _ in range(THREADS + WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await encoder.run(INLINE + 1, encoder.ids, "a", "prompt")
        assert refused.value.status == 429 and refused.value.headers["Retry-After"]
        assert await encoder.run(INLINE, encoder.ids, "a", "prompt") == encode(tokenizer, "a")
        go_on.set()
        assert all(await asyncio.gather(*held))
        assert await encoder.run(INLINE + 1, encoder.ids, "a", "prompt") == encode(tokenizer, "a")
        encoder.close()

    asyncio.run(crowd())


def test_pieces_of_a_long_text_are_joined_without_blanks_between_them() -> None:
    tokenizer = sentencepiece("normalizer")
    lines = LINES[: 2 * PIECE + 30]
    encoder = Encoder(tokenizer, 10**6)
    assert encoder.last(lines, 10**6) == (encode(tokenizer, lines), True)
    assert encoder.first(lines, 10**6) == (encode_behind(tokenizer, lines), True)
    assert encoder.ids(LINES[4:90], "suffix", behind=True) == encode_behind(tokenizer, LINES[4:90])
    encoder.close()
