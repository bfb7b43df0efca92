"""Completions, chat, infill and tokens: every form of a prompt, what comes back, in one piece and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.api.inference.logprobs import LegacyLogprobs, token_bytes, token_text
from server.api.inference.prompts import infill_prompt
from server.engine.request import TokenLogprob
from server.errors import ApiError
from tests.core.conftest import build_tokenizer, save_checkpoint
from tests.support.live import Live, live
from unbind_core.encoding import encode, fim_prompt

PROMPT = "def add(first, second):\n"
TOKENIZER = build_tokenizer()


def test_prompts_of_every_form_agree(server: Live) -> None:
    ids = server.call("/tokenize", {"content": PROMPT, "add_special": True}).body["tokens"]
    texts = [server.complete(prompt=form).text for form in (PROMPT, [PROMPT], ids, [ids])]
    assert len(set(texts)) == 1
    many = server.complete(prompt=[PROMPT, "class", PROMPT], n=2).body
    assert [choice["index"] for choice in many["choices"]] == list(range(6))
    assert many["choices"][0]["text"] == many["choices"][5]["text"] == texts[0]
    assert many["usage"]["prompt_tokens"] == 2 * len(ids) + len(encode(server.service.loaded.tokenizer, "class"))


def test_a_suffix_fills_the_gap_in_the_model_s_own_order(server: Live) -> None:
    ids = fim_prompt(server.service.loaded.tokenizer, PROMPT, "\n    return third\n")
    assert server.complete(suffix="\n    return third\n").text == server.complete(prompt=ids).text
    assert server.complete(suffix="").status == 200
    two = server.complete(prompt=["a", "b"], suffix="c")
    assert two.status == 400 and "suffix" in two.error["message"]


def test_an_echo_comes_first(server: Live) -> None:
    plain = server.complete()
    assert server.complete(echo=True).text == PROMPT + plain.text
    events = server.complete(echo=True, stream=True).events[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == PROMPT + plain.text


def test_the_length_goes_by_every_name_that_editors_use(server: Live) -> None:
    def made(**fields: Any) -> int:
        answer = server.call("/v1/completions", {"prompt": PROMPT, "ignore_eos": True, **fields})
        return int(answer.body["usage"]["completion_tokens"])

    assert made() == 128
    assert made(max_tokens=3) == made(n_predict=3) == made(options={"num_predict": 3, "num_ctx": 4096}) == 3
    assert made(max_tokens=3, n_predict=5) == made(max_completion_tokens=3, max_tokens=5) == 3
    assert made(n_predict=-1) == 256 - len(encode(server.service.loaded.tokenizer, PROMPT))
    assert made(prompt=[9] * 200) == 56  # the default gives way to what fits


def test_best_of_is_refused_unless_it_changes_nothing(server: Live) -> None:
    assert server.complete(n=2, best_of=2).status == 200
    assert "best_of" in server.complete(n=1, best_of=3).error["message"]


def test_too_many_prompts_at_once_are_a_mistake_and_not_a_full_queue(server: Live) -> None:
    refused = server.complete(prompt=["a"] * 200)
    assert (refused.status, refused.error["param"]) == (400, "prompt")


def test_usage_is_sent_only_where_it_is_asked_for(server: Live) -> None:
    asked = server.complete(stream=True, stream_options={"include_usage": True}).events
    assert asked[-1] == "[DONE]" and asked[-2]["choices"] == [] and asked[-2]["usage"]["completion_tokens"] == 12
    assert all(event["usage"] is None for event in asked[:-2])
    assert all("usage" not in event for event in server.complete(stream=True).events[:-1])


def test_a_stream_says_what_the_whole_answer_says(server: Live) -> None:
    fields = {"n": 3, "temperature": 1.0, "seed": 5}
    whole = [choice["text"] for choice in server.complete(**fields).body["choices"]]
    parts = ["", "", ""]
    for event in server.complete(**fields, stream=True).events[:-1]:
        (choice,) = event["choices"]
        parts[choice["index"]] += choice["text"]
    assert parts == whole and len(set(whole)) == 3


def test_chat_goes_through_the_template(server: Live) -> None:
    def ask(messages: Any, **fields: Any) -> Any:
        return server.call(
            "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_completion_tokens": 8, **fields}
        )

    said = ask([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}])
    (choice,) = said.body["choices"]
    assert choice["message"]["role"] == "assistant" and said.body["object"] == "chat.completion"
    parts = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    assert ask(parts).body["choices"] == said.body["choices"]
    raw = server.complete(prompt="# system\nbe brief\n# user\nhello\n# assistant\n", max_tokens=8)
    assert choice["message"]["content"] == raw.text
    events = ask(parts, stream=True).events[:-1]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == raw.text
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    refused = ask([{"role": "function", "content": "x"}])
    assert (refused.status, refused.error["param"]) == (400, "messages")
    picture = ask([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert picture.status == 400 and "type text" in picture.error["message"]


def test_infill_answers_as_its_clients_read(server: Live) -> None:
    fields = {"input_prefix": PROMPT, "input_suffix": "\n    return third\n", "n_predict": 12}
    whole = server.call("/infill", fields).body
    assert whole["content"] == server.complete(suffix="\n    return third\n").text
    assert whole["stop"] is True and whole["stop_type"] == "limit" and whole["truncated"] is False
    assert whole["tokens_predicted"] == whole["timings"]["predicted_n"] == 12
    assert whole["timings"]["prompt_n"] + whole["timings"]["cache_n"] == whole["tokens_evaluated"]
    streamed = server.call("/infill", {**fields, "stream": True}).events
    assert "".join(event["content"] for event in streamed) == whole["content"]
    assert [event["stop"] for event in streamed] == [False] * (len(streamed) - 1) + [True]
    assert len(server.call("/infill", {**fields, "n_cmpl": 3}).body) == 3
    chosen = server.call("/infill", {**fields, "response_fields": ["content", "timings/prompt_n", "nothing/here"]}).body
    assert chosen.keys() == {"content", "timings/prompt_n"}
    stop = whole["content"][2:4]
    word = server.call("/infill", {**fields, "stop": [stop]}).body
    assert word["stop_type"] == "word" and word["content"] == whole["content"][: whole["content"].index(stop)]
    started = server.call("/infill", {**fields, "prompt": whole["content"][:1]}).body
    assert started["tokens_evaluated"] > whole["tokens_evaluated"]
    nothing = server.call("/infill", {**fields, "input_extra": [{"filename": "lib.py"}]})
    assert (nothing.status, nothing.error["param"]) == (400, "input_extra.0.text")


def test_a_long_file_is_cut_around_the_gap(server: Live) -> None:
    files = [{"filename": "a.py", "text": "import os\n" * 200}]
    cut = server.call(
        "/infill",
        {"input_prefix": "x = 1\n" * 300, "input_suffix": "y = 2\n" * 300, "input_extra": files, "n_predict": 8},
    )
    assert cut.status == 200 and cut.body["truncated"] is True and cut.body["tokens_evaluated"] <= 248
    short = infill_prompt(server.service, "ab", "cd", [("a.py", "import os\n" * 200)], "", 8)
    assert len(short.ids) == 248 and short.truncated
    assert list(short.ids[-7:]) == fim_prompt(server.service.loaded.tokenizer, "ab", "cd")
    alone = infill_prompt(server.service, "ab", "cd", [], "", 8)
    assert alone.ids == fim_prompt(server.service.loaded.tokenizer, "ab", "cd") and not alone.truncated
    prefix = encode(server.service.loaded.tokenizer, "x = 1\n" * 300)
    both = infill_prompt(server.service, "x = 1\n" * 300, "y = 2\n" * 300, [], "", 8)
    at = list(both.ids).index(server.service.loaded.tokenizer.convert_tokens_to_ids("<|fim_suffix|>"))
    assert list(both.ids[1:at]) == prefix[-(at - 1) :] and (at - 1) == (248 - 3) * 3 // 4


def test_a_prompt_that_does_not_fit_says_by_how_much(server: Live) -> None:
    refused = server.complete(prompt=[9] * 250, max_tokens=50)
    assert refused.error["code"] == "context_length_exceeded" and "by 44" in refused.error["message"]


def test_the_fim_route_has_content_in_every_chunk(server: Live) -> None:
    body = {"prompt": PROMPT, "suffix": "\n    return third\n", "max_tokens": 12, "temperature": 0}
    whole = server.call("/v1/fim/completions", body).body
    events = server.call("/fim/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}).events
    assert events[-1] == "[DONE]"
    contents = [event["choices"][0]["delta"]["content"] for event in events[:-1]]
    assert "".join(contents) == whole["choices"][0]["message"]["content"]
    assert events[-2]["usage"]["completion_tokens"] == 12
    assert (
        server.call("/fim/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}).body["choices"][0][
            "message"
        ]["content"]
        == server.complete().text
    )


def test_tokens_go_there_and_back(server: Live) -> None:
    text = "def café():\n    return '€'\n"
    made = server.call("/tokenize", {"prompt": text}).body
    assert made["count"] == len(made["tokens"]) and made["max_model_len"] == 256
    back = server.call("/detokenize", {"tokens": made["tokens"]}).body
    assert back == {"content": text, "prompt": text}
    pieces = server.call("/tokenize", {"content": text, "with_pieces": True}).body["tokens"]
    raw = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert raw.decode() == text
    messages = server.call("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).body["tokens"]
    assert messages == encode(server.service.loaded.tokenizer, "# user\nhi\n# assistant\n")
    for path, body, param in (
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "messages": [{"role": "user", "content": "hi"}]}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ):
        refused = server.call(path, body)
        assert (refused.status, refused.error["param"]) == (400, param), refused.raw


def test_log_probabilities_come_in_the_shape_of_their_route(server: Live) -> None:
    made = server.complete(logprobs=3, echo=True, ignore_eos=True).body
    (choice,) = made["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == made["usage"]["total_tokens"]
    assert logprobs["token_logprobs"][0] is None and all(value <= 0 for value in logprobs["token_logprobs"][1:])
    for token, value, top in list(
        zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert top[token] == value and len(top) <= 4
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    parts = [
        event["choices"][0]["logprobs"]
        for event in server.complete(logprobs=3, echo=True, ignore_eos=True, stream=True).events[:-1]
    ]
    for field, whole in logprobs.items():
        joined = [item for part in parts if part for item in part[field]]
        assert joined == whole if field in ("tokens", "text_offset") else len(joined) == len(whole)
    scored = server.complete(logprobs=0, echo=True, max_tokens=0).body["choices"][0]
    assert scored["text"] == PROMPT and scored["logprobs"]["tokens"] == logprobs["tokens"][:-12]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    content = server.call("/v1/chat/completions", body).body["choices"][0]["logprobs"]["content"]
    assert 0 < len(content) <= 4 and all(len(token["top_logprobs"]) == 2 for token in content)
    assert all(token["logprob"] <= 0 and isinstance(token["bytes"], list) for token in content)
    assert server.call("/v1/chat/completions", {**body, "logprobs": False}).error["message"].startswith("top_logprobs")
    none = server.call(
        "/v1/chat/completions", {**body, "logprobs": False, "top_logprobs": 0}
    )  # as clients send defaults
    assert none.status == 200 and none.body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("template", ["", "<|fim_suffix|>{suffix}<|fim_prefix|>{prefix}<|fim_middle|>"])
def test_what_an_echo_spells_has_its_place_and_what_was_added_has_none(tmp_path: Path, template: str) -> None:
    checkpoint = save_checkpoint("llama", tmp_path / "tiny")
    with live(checkpoint, tmp_path, (), fim_template=template) as server:
        bos = server.service.loaded.tokenizer.bos_token
        ids = server.call("/tokenize", {"content": f"a{bos}b<|pad|>"}).body["tokens"]
        gap = {"prompt": "def add(", "suffix": "\n    return"}
        added = server.complete(**gap, max_tokens=0, logprobs=0, echo=True).body["choices"][0]["logprobs"]["tokens"]
        first = added.index("<|fim_prefix|>") + 1
        spelt = range(first, first + len(server.call("/tokenize", {"content": "def add("}).body["tokens"]))
        for body, shown in (
            ({"prompt": f"a{bos}b<|pad|>c"}, range(1, 99)),
            ({"prompt": f"{bos}a"}, range(1, 99)),
            ({"prompt": ids}, range(99)),
            ({"prompt": f"a{bos}b", "truncate_prompt_tokens": 2}, range(99)),
            (gap, spelt),
        ):
            asked = {**body, "max_tokens": 3, "ignore_eos": True, "logprobs": 0, "echo": True}
            (choice,) = server.complete(**asked).body["choices"]
            scored, place = choice["logprobs"], 0
            for index, (token, offset) in enumerate(zip(scored["tokens"][:-3], scored["text_offset"], strict=False)):
                assert offset == place, (body, index)
                assert index not in shown or choice["text"][offset:].startswith(token)
                place += len(token) if index in shown else 0
            assert scored["text_offset"][-3] == place
            parts = [event["choices"][0]["logprobs"] for event in server.complete(**asked, stream=True).events[:-1]]
            assert [at for part in parts if part for at in part["text_offset"]] == scored["text_offset"]


def test_sampling_parameters_reach_the_sampler(server: Live) -> None:
    greedy = server.complete().text
    hot = {"temperature": 5.0, "seed": 3}
    assert server.complete(**hot).text == server.complete(**hot).text != greedy
    assert server.complete(**hot, top_k=1).text == server.complete(**hot, min_p=1).text == greedy
    first = server.complete(max_tokens=1, ignore_eos=True).text
    (token,) = server.call("/tokenize", {"content": first}).body["tokens"]
    assert server.complete(max_tokens=1, ignore_eos=True, logit_bias={str(token): -100}).text != first
    for penalty in ({"repetition_penalty": 5.0}, {"presence_penalty": 2}):
        assert server.complete(**penalty).text != greedy, penalty
    refused = server.complete(logit_bias={"999999": 1})
    assert (refused.status, refused.error["param"]) == (400, "logit_bias")


def test_log_probabilities_in_the_legacy_shape_know_their_place() -> None:
    ids = encode(TOKENIZER, "a = '€'")
    writer = LegacyLogprobs(TOKENIZER)
    entries = [None, *(TokenLogprob(token, -1.0, ((token, -1.0), (9, -2.0))) for token in ids[1:])]
    shaped = writer.of(entries, ids)
    assert "".join(part for part in shaped["tokens"] if not part.startswith("bytes:")) in ("a = '€'", "a = ''")
    assert shaped["token_logprobs"][0] is None and shaped["top_logprobs"][0] is None
    assert shaped["token_logprobs"][1:] == [-1.0] * (len(ids) - 1)
    assert shaped["text_offset"][0] == 0 and shaped["text_offset"][-1] == len("a = '€")
    later = writer.of([TokenLogprob(ids[0], float("-inf"))])
    assert later["text_offset"] == [len("a = '€'")] and later["token_logprobs"] == [-9999.0]


def test_a_token_is_known_by_its_bytes() -> None:
    for text in ("€", "def", " x", "\n", "<|fim_prefix|>", "\x00"):
        assert b"".join(token_bytes(TOKENIZER, token) for token in encode(TOKENIZER, text)) == text.encode()
    assert token_text(b"\xe2\x82") == "bytes:\\xe2\\x82" and token_bytes(TOKENIZER, 10**7) == b""


def test_a_model_without_a_gap_says_so(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "fim", None)
    assert server.complete(suffix="x").error["param"] == "suffix"
    assert server.call("/infill", {"input_prefix": "x"}).error["code"] == "no_fill_in_the_middle"
    with pytest.raises(ApiError, match="fim_template"):
        infill_prompt(server.service, "a", "b", [], "", 8)
