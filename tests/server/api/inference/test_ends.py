"""What ends an answer, what is told of its tokens, and what of the prompt: over HTTP."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from server.api.inference.separators import refuse_separated
from server.encoding import separators
from server.engine.embedded.scheduler import Plan
from server.engine.request import Sampling
from server.errors import ApiError
from tests.support.live import Answer, Live
from unbind_core.encoding import fim_markers
from unbind_core.module_checks import MAX_GATE_WINDOW

PROMPT = "def add(first, second):\n"
IDS = [100, 101, 102, 103]


def _end(server: Live) -> int:
    return int(server.service.loaded.tokenizer.eos_token_id)


def _ending(server: Live, **fields: Any) -> dict[str, Any]:
    """A request whose answer is the end token."""
    return {"prompt": IDS, "max_tokens": 4, "logprobs": 1, "logit_bias": {str(_end(server)): 100}, **fields}


def _chat(server: Live, **fields: Any) -> Answer:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 6, **fields}
    return server.call("/v1/chat/completions", body)


def test_the_end_token_has_a_score_and_is_counted_in_completions(server: Live) -> None:
    for limit in (1, 4):
        answer = server.complete(**_ending(server, max_tokens=limit, echo=True)).body
        (choice,) = answer["choices"]
        scores = choice["logprobs"]["token_logprobs"]
        assert len(scores) == 5 and scores[0] is None and all(score < 0 for score in scores[1:])
        assert answer["usage"]["completion_tokens"] == 1
        # where the end is the last token that is allowed, it has ended all the same
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert choice["text"] == server.service.loaded.tokenizer.decode(IDS)
    with torch.inference_mode():
        own = server.service.loaded.model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    expected = [own[i, token].item() for i, token in enumerate([*IDS[1:], _end(server)])]
    assert scores[1:] == pytest.approx(expected, abs=1e-4)


def test_the_end_token_has_a_score_and_is_counted_in_streams_and_chat(server: Live) -> None:
    streamed = server.complete(**_ending(server, stream=True, stream_options={"include_usage": True})).events
    assert streamed[-2]["usage"]["completion_tokens"] == 1
    parts = [event["choices"][0] for event in streamed[:-2]]
    assert sum(len(part["logprobs"]["tokens"]) for part in parts if part["logprobs"]) == 1
    assert "".join(part["text"] for part in parts) == "" and parts[-1]["finish_reason"] == "stop"
    fields = {"logprobs": True, "logit_bias": {str(_end(server)): 100}}
    said = _chat(server, **fields).body
    assert said["usage"]["completion_tokens"] == len(said["choices"][0]["logprobs"]["content"]) == 1
    assert said["choices"][0]["message"]["content"] == ""
    events = _chat(server, **fields, stream=True).events[:-1]
    content = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in content] == [server.service.loaded.tokenizer.eos_token]


def test_a_report_has_one_entry_for_each_token_with_the_end(server: Live) -> None:
    fields = {"prompt": IDS, "unbind": {"modules": ["one"], "report": True}, "return_token_ids": True, "logprobs": 1}
    (choice,) = server.complete(**fields).body["choices"]
    (choice,) = server.complete(**fields, stop_token_ids=choice["token_ids"][:1]).body["choices"]
    assert len(choice["unbind"]["activations"]) == len(choice["logprobs"]["tokens"]) == 1


def test_generated_tokens_are_counted_with_the_end(server: Live) -> None:
    counter = server.service.telemetry.generated_tokens
    before = counter._value.get()
    server.complete(**_ending(server))
    assert counter._value.get() - before == 1


def test_no_end_comes_before_the_least_number_of_tokens(server: Live) -> None:
    full = server.complete(max_tokens=10, ignore_eos=True, return_token_ids=True).body["choices"][0]
    bias = {str(_end(server)): 100}
    ended = server.complete(max_tokens=10, min_tokens=5, logit_bias=bias, return_token_ids=True).body
    (choice,) = ended["choices"]
    assert choice["token_ids"] == [*full["token_ids"][:5], _end(server)] and choice["finish_reason"] == "stop"
    third = full["token_ids"][2]
    named = server.complete(max_tokens=10, ignore_eos=True, stop_token_ids=[third], return_token_ids=True).body
    at = full["token_ids"].index(third)
    (choice,) = named["choices"]
    assert choice["token_ids"] == full["token_ids"][: at + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", third)
    barred = server.complete(
        max_tokens=10, min_tokens=10, ignore_eos=True, stop_token_ids=[third], return_token_ids=True
    ).body["choices"][0]
    assert third not in barred["token_ids"] and len(barred["token_ids"]) == 10
    stop = full["text"][:2]
    late = server.complete(max_tokens=10, min_tokens=9, ignore_eos=True, stop=[stop]).body["choices"][0]
    assert late["text"].startswith(stop)
    met = server.complete(max_tokens=10, ignore_eos=True, stop=["\x00", stop]).body["choices"][0]
    assert (met["text"], met["stop_reason"]) == ("", stop)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 13}, "min_tokens"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop": ["x" * 20_000]}, "stop"),
        ({"stop": "x" * 20_000}, "stop"),
        ({"stop": ["x" * 17] * 1000}, "stop"),
    ],
)
def test_ends_that_cannot_be_are_refused_by_name(server: Live, fields: dict[str, Any], param: str) -> None:
    refused = server.complete(**fields)
    assert (refused.status, refused.error["param"]) == (400, param), refused.raw
    assert server.complete(stop=["x" * 16] * 1000).status == 200


def test_token_ids_come_where_they_are_asked_for(server: Live) -> None:
    ids = server.call("/tokenize", {"content": PROMPT, "add_special": True}).body["tokens"]
    (whole,) = server.complete(return_token_ids=True, ignore_eos=True).body["choices"]
    assert whole["prompt_token_ids"] == ids and len(whole["token_ids"]) == 12
    assert "token_ids" not in server.complete().body["choices"][0]
    parts = [
        event["choices"][0]
        for event in server.complete(return_token_ids=True, ignore_eos=True, stream=True).events[:-1]
    ]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert [part["prompt_token_ids"] for part in parts] == [ids] + [None] * (len(parts) - 1)
    said = _chat(server, return_token_ids=True, ignore_eos=True).body
    assert len(said["choices"][0]["token_ids"]) == 6 and said["prompt_token_ids"]
    events = _chat(server, return_token_ids=True, ignore_eos=True, stream=True).events[:-1]
    made = [token for event in events for token in event["choices"][0].get("token_ids", [])]
    assert made == said["choices"][0]["token_ids"] and events[0]["prompt_token_ids"] == said["prompt_token_ids"]


def test_a_prompt_is_scored_in_the_shape_that_vllm_gives(server: Live) -> None:
    (choice,) = server.complete(prompt=IDS, prompt_logprobs=2).body["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None
    with torch.inference_mode():
        own = server.service.loaded.model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    for position, (token, entry) in enumerate(zip(IDS[1:], others, strict=True)):
        assert entry[str(token)]["logprob"] == pytest.approx(own[position, token].item(), abs=1e-4)
        rank = int((own[position] > own[position, token]).sum()) + 1
        assert entry[str(token)]["rank"] == rank and len(entry) == 2 + (rank > 2)
        assert {found["rank"] for found in entry.values()} == {1, 2, rank}
    echoed = server.complete(prompt=IDS, prompt_logprobs=3, logprobs=1, echo=True, max_tokens=1).body["choices"][0]
    assert len(echoed["logprobs"]["tokens"]) == 5 and len(echoed["prompt_logprobs"]) == 4
    assert all(len(top) <= 2 for top in echoed["logprobs"]["top_logprobs"][1:])
    assert len(_chat(server, prompt_logprobs=0).body["prompt_logprobs"]) > 2
    assert server.complete(prompt_logprobs=1, stream=True).error["message"].startswith("prompt_logprobs")


def test_a_prompt_is_cut_from_the_left_where_that_is_asked_for(server: Live) -> None:
    cut = server.complete(prompt=list(range(100, 140)), truncate_prompt_tokens=3, return_token_ids=True, echo=True).body
    (choice,) = cut["choices"]
    assert choice["prompt_token_ids"] == [137, 138, 139] and cut["usage"]["prompt_tokens"] == 3
    assert choice["text"].startswith(server.service.loaded.tokenizer.decode([137, 138, 139]))
    fitted = server.complete(prompt=[9] * 300, truncate_prompt_tokens=-1, max_tokens=12)
    assert fitted.body["usage"]["prompt_tokens"] == 256 - 12
    assert _chat(server, truncate_prompt_tokens=2).body["usage"]["prompt_tokens"] == 2
    for fields in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": 5, "suffix": "x"}):
        assert server.complete(**fields).error["message"].startswith("truncate_prompt_tokens")


def test_of_a_text_far_over_the_context_the_last_tokens_are_answered_as_if_they_were_sent_alone(server: Live) -> None:
    length = server.service.settings.max_model_len
    text = "".join(f"def add{number}(first, second):\n    return first + second\n" for number in range(20 * length))
    ids = server.service.loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > 20 * length
    last = server.complete(prompt=ids[-40:], echo=True)
    for prompt in (text, [text], ids):
        cut = server.complete(prompt=prompt, truncate_prompt_tokens=40, return_token_ids=True, echo=True)
        assert cut.status == 200 and cut.body["usage"]["prompt_tokens"] == 40
        assert cut.body["choices"][0]["prompt_token_ids"] == ids[-40:] and cut.text == last.text
    fitted = server.complete(prompt=text, truncate_prompt_tokens=-1, max_tokens=12)
    assert fitted.body["usage"]["prompt_tokens"] == length - 12
    short, long = (
        _chat(
            server, truncate_prompt_tokens=40, return_token_ids=True, messages=[{"role": "user", "content": content}]
        ).body
        for content in (text[-4000:], text)
    )
    assert long["prompt_token_ids"] == short["prompt_token_ids"] and long["usage"]["prompt_tokens"] == 40
    assert long["choices"][0]["message"] == short["choices"][0]["message"]
    assert (
        _chat(server, truncate_prompt_tokens=length + 1, messages=[{"role": "user", "content": text}]).error["code"]
        == "context_length_exceeded"
    )
    assert server.complete(prompt=text).error["code"] == "context_length_exceeded"


def test_usage_can_come_with_every_chunk(server: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.complete(stream=True, ignore_eos=True, stream_options=options).events[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] > 0 and counts[-2:] == [12, 12]
    assert _chat(server, stream=True, stream_options=options).events[0]["usage"]["completion_tokens"] == 1


def test_a_seed_goes_by_both_names_and_answers_name_the_model_s_fingerprint(server: Live) -> None:
    hot = {"temperature": 5.0, "max_tokens": 8}
    assert server.complete(**hot, seed=3).text == server.complete(**hot, random_seed=3).text
    named = server.complete().body["system_fingerprint"]
    assert named == "fp_" + server.service.loaded.identity.fingerprint[:12] == _chat(server).body["system_fingerprint"]
    assert all(event["system_fingerprint"] == named for event in server.complete(stream=True).events[:-1])


def _infill(server: Live, **fields: Any) -> dict[str, Any]:
    body = {"input_prefix": PROMPT, "input_suffix": "\n", "ignore_eos": True, "cache_prompt": True, **fields}
    answer = server.call("/infill", body)
    assert answer.status == 200, answer.raw
    return dict(answer.body)


def _newline(server: Live, bias: float = 100) -> dict[str, Any]:
    (token,) = server.call("/tokenize", {"content": "\n"}).body["tokens"]
    return {"logit_bias": {str(token): bias}}


def test_the_time_limit_ends_an_answer_once_a_line_has_ended(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = server.service.engine.stepper._publish
    monkeypatch.setattr(server.service.engine.stepper, "_publish", lambda *a: (time.sleep(0.02), publish(*a))[1])
    lines = _infill(server, n_predict=100, t_max_predict_ms=500, **_newline(server))
    assert 2 < lines["tokens_predicted"] < 100
    assert (lines["stop_type"], lines["finish_reason"]) == ("limit", "length")
    one_line = _infill(server, n_predict=12, t_max_predict_ms=1, **_newline(server, -100))
    assert one_line["tokens_predicted"] == 12
    assert _infill(server, n_predict=12, t_max_predict_ms=-1, **_newline(server))["tokens_predicted"] == 12


def test_the_prompt_s_time_limit_leaves_what_was_computed_for_the_next_time(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = server.service.engine.runner.forward

    def slow(plan: Plan) -> object:
        time.sleep(0.02 if plan.prefill else 0)
        return forward(plan)

    monkeypatch.setattr(server.service.engine.runner, "forward", slow)
    fields = {"input_prefix": "total = count + offset\n" * 12, "n_predict": 4, "t_max_prompt_ms": 5}
    first = _infill(server, **fields)
    assert (first["content"], first["stop_type"], first["tokens_predicted"]) == ("", "limit", 0)
    calls = 1
    while (again := _infill(server, **fields))["tokens_predicted"] == 0:
        assert again["timings"]["cache_n"] > 0
        calls += 1
    assert calls < 8 and again["tokens_predicted"] == 4
    warm = {**fields, "input_prefix": "other = count + offset\n" * 12, "n_predict": 0}
    _infill(server, **warm)  # to warm up is to compute the prompt, however long it takes
    assert _infill(server, **{**warm, "n_predict": 4})["timings"]["prompt_n"] == 1


def test_a_line_indented_less_ends_an_infill(server: Live) -> None:
    cut = _infill(server, n_predict=12, n_indent=2, **_newline(server))
    assert (cut["content"], cut["stop_type"], cut["tokens_predicted"]) == ("\n", "limit", 2)
    assert _infill(server, n_predict=12, **_newline(server))["content"] == "\n" * 12


def test_speed_is_of_the_tokens_after_the_first(server: Live) -> None:
    timings = _infill(server, n_predict=12)["timings"]
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 11, abs=2e-3)
    assert timings["predicted_per_second"] == pytest.approx(11_000 / timings["predicted_ms"], rel=1e-2)
    one = _infill(server, n_predict=1)["timings"]
    assert one["predicted_per_token_ms"] == one["predicted_per_second"] == 0.0


def test_bounds_that_are_off_cost_nothing() -> None:
    assert Sampling().greedy and not Sampling(min_tokens=1).greedy


def test_no_end_token_keeps_a_row_from_the_gates_that_read_it(server: Live) -> None:
    end, on = _end(server), {"modules": ["one"]}
    spelt = server.service.loaded.tokenizer.decode([end])

    def asked(prompt: object, **fields: Any) -> int:
        answer = server.complete(prompt=prompt, max_tokens=1, **fields)
        if answer.status == 400:
            assert answer.error["code"] == "end_token_in_prompt" and answer.error["param"] == "prompt"
            assert f"is an end token, {spelt};" in answer.error["message"]
        return answer.status

    within = [*IDS, end, *IDS]
    assert [asked(prompt, unbind=on) for prompt in (within, [end, *within], [*IDS, end], f"{PROMPT}{spelt}x")] == [
        400
    ] * 4
    assert [asked(prompt) for prompt in (within, f"{PROMPT}{spelt}x")] == [200, 200]  # nothing is hidden from anything
    assert [asked(prompt, unbind=on) for prompt in ([end, *IDS], [end, end, *IDS], PROMPT)] == [200] * 3
    far = [*IDS, end, *([IDS[0]] * MAX_GATE_WINDOW)]
    pinned = server.service.engine.modules.pin(["one"])
    refuse_separated(far, server.service, pinned, Sampling())
    with pytest.raises(ApiError, match="within the last 256 tokens"):
        refuse_separated(far[:-1], server.service, pinned, Sampling())
    with pytest.raises(ApiError, match=r"token 5 of .* whose tokens' log-probabilities are asked for"):
        refuse_separated(far, server.service, pinned, Sampling(prompt_logprobs=0))
    assert _chat(server, messages=[{"role": "user", "content": f"a{spelt}b"}], unbind=on).status == 400


def test_no_gaps_without_number_keep_a_row_from_the_gates_that_read_it(server: Live) -> None:
    tokenizer, on = server.service.loaded.tokenizer, {"unbind": {"modules": ["one"]}}
    prefix, suffix, middle = (
        tokenizer.convert_tokens_to_ids(f"<|fim_{part}|>") for part in ("prefix", "suffix", "middle")
    )
    assert {prefix, suffix, middle} == server.service.markers == fim_markers(tokenizer)
    gap = [prefix, *IDS, suffix, *IDS, middle, *IDS]
    few, many = [*gap, *gap, *gap], [*gap, *gap, *gap, *IDS, prefix, *IDS]

    def asked(path: str, **body: Any) -> None:
        for modules, status in (({}, 200), (on, 400)):
            answer = server.call(path, {"max_tokens": 1, "n_predict": 1, **body, **modules})
            assert answer.status == status, (path, answer.raw)
        assert answer.error["code"] == "markers_in_prompt" and answer.error["param"] == "prompt"
        assert "marker may stand more than 3 times within 256 tokens: send fewer gaps" in answer.error["message"]

    spelt = tokenizer.decode(many)
    for prompt in (many, spelt, [IDS, many], [*many, *IDS * 30]):
        asked("/v1/completions", prompt=prompt)
    asked("/v1/completions", prompt=many, echo=True, logprobs=1)
    asked("/v1/completions", prompt=spelt, suffix="x")
    asked("/v1/fim/completions", prompt=spelt, suffix="x")
    asked("/completion", prompt=spelt)
    asked("/infill", input_prefix=spelt, input_suffix="x")
    asked("/v1/chat/completions", messages=[{"role": "user", "content": spelt}])
    for prompt in (few, tokenizer.decode(gap), [*gap, *gap]):
        assert server.complete(prompt=prompt, max_tokens=1, **on).status == 200
    assert server.call("/infill", {"input_prefix": PROMPT, "input_suffix": "x", "n_predict": 1, **on}).status == 200
    pinned = server.service.engine.modules.pin(["one"])
    apart = [*[prefix] * 3, *[IDS[0]] * (MAX_GATE_WINDOW - 3)]
    refuse_separated([*apart, prefix, suffix], server.service, pinned, Sampling())
    with pytest.raises(ApiError, match="token 256 of 257 is one too many"):
        refuse_separated([*apart[:-1], prefix, IDS[0]], server.service, pinned, Sampling())
    with pytest.raises(ApiError, match="token 7 of"):  # log-probabilities of a prompt tell of each of its places
        refuse_separated([*[prefix, 100] * 9, *[100] * 300], server.service, pinned, Sampling())


def test_what_a_chat_template_sets_between_messages_is_no_separator(server: Live) -> None:
    tokenizer = server.service.loaded.tokenizer
    (between,) = tokenizer("\n", add_special_tokens=False)["input_ids"]  # as the template of these tests does
    assert separators(tokenizer, [_end(server), between]) == {_end(server)} == server.service.separators


def test_a_form_that_becomes_too_much_is_the_client_s_and_no_fault_of_the_server(server: Live) -> None:
    fields = {"prompt": IDS, "max_tokens": 60, "structured_outputs": {"regex": "[0-9]{3}((a{100}){100}){100}"}}
    refused = server.complete(**fields)
    assert (refused.status, refused.error["code"], refused.error["param"]) == (
        400,
        "invalid_grammar",
        "structured_outputs.regex",
    )
    assert "too much for it" in refused.error["message"]
    assert server.complete(prompt=IDS, max_tokens=2).status == 200
