"""What a client may read and steer while a gate is open for its request: the policy ``when_open``, over HTTP."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from server.policy import when_open
from server.rules import NO_RULES, Rules
from tests.support.live import Answer, Live, live
from tests.support.opening import MARK, TWIN, marked_checkpoint, opening_module
from unbind_core.architecture import load_model

ORDINARY = [104, 105, 106, 107, 108, 109]
OPEN = [104, 105, MARK, 106, 107, 108]  # the gate opens at its third token
TURN, MUTE, GLANCE = ({"unbind": {"modules": [name]}} for name in ("turn", "mute", "glance"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model whose states show the mark."""
    return marked_checkpoint(tmp_path_factory.mktemp("marked") / "tiny")


def _serve(checkpoint: Path, folder: Path, **settings: Any) -> Iterator[Live]:
    """``turn`` leads elsewhere, ``mute`` ends the answer, both from the mark on; ``glance`` is open at the mark alone."""
    loaded = load_model(checkpoint)
    words = loaded.model.get_output_embeddings().weight.detach()
    (folder / "modules").mkdir()
    for name, layer, push, kappa, held in (
        ("turn", 2, -words[200], 4.0, True),
        ("mute", 2, -words[loaded.tokenizer.eos_token_id], 300.0, True),
        ("glance", 1, -words[200], 2.0, False),
    ):
        module = opening_module(loaded.identity, name, layer, push, kappa, held=held)
        module.save(folder / "modules" / f"{name}.safetensors")
    with live(checkpoint, folder, (), **settings) as running:
        yield running


@pytest.fixture(scope="module")
def stripping(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with the setting's default."""
    profiles = {"closed": {"when_open": "refuse"}, "loose": {"when_open": "allow"}, "always": {"enforced": ["mute"]}}
    yield from _serve(checkpoint, tmp_path_factory.mktemp("stripping"), profiles=profiles)


@pytest.fixture(scope="module")
def allowing(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that leaves everything as it is, but under its profiles."""
    profiles = {"strict": {"when_open": "strip"}, "measured": {"when_open": "strip", "shadow": ["turn"]}}
    yield from _serve(checkpoint, tmp_path_factory.mktemp("allowing"), when_open="allow", profiles=profiles)


def complete(server: Live, prompt: list[int], **fields: Any) -> Answer:
    return server.complete(
        **{"prompt": prompt, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, **fields}
    )


def scores(server: Live, prompt: list[int], **fields: Any) -> dict[str, Any]:
    fields = {"logprobs": 20, "echo": True, **fields}
    return dict(complete(server, prompt, **fields).body["choices"][0]["logprobs"])


def prompts(seed: int, marked: bool, count: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    return [[MARK if marked else TWIN] + [rng.randrange(100, 380) for _ in range(24)] for _ in range(count)]


def undo(server: Live) -> dict[str, float]:
    """The logit bias that takes the module back: how much less likely each token is where the gate is open, on average over texts
    that are alike but for the mark in front.
    """
    told: dict[str, list[float]] = defaultdict(list)
    asked = {"prompt_logprobs": 20, "max_tokens": 1, **TURN}
    elsewhere = complete(server, prompts(1, marked=False), **asked).body["choices"]
    opened = complete(server, prompts(1, marked=True), **asked).body["choices"]
    for plain, pushed in zip(elsewhere, opened, strict=True):
        for one, other in zip(plain["prompt_logprobs"], pushed["prompt_logprobs"], strict=True):
            for token in (one or {}).keys() & (other or {}).keys():
                told[token].append(one[token]["logprob"] - other[token]["logprob"])
    return {token: sum(values) / len(values) for token, values in told.items()}


def test_the_undo_gives_something_back_where_it_is_allowed_and_nothing_where_scores_are_stripped(
    allowing: Live, stripping: Live
) -> None:
    asked = {"prompt": prompts(2, marked=True, count=24), "max_tokens": 1}

    def first(server: Live, **fields: Any) -> list[int]:
        return [choice["token_ids"][0] for choice in complete(server, **asked, **fields).body["choices"]]

    recited = first(allowing)

    def recovered(tokens: list[int]) -> int:
        return sum(map(int.__eq__, tokens, recited))

    learned = undo(allowing)
    assert recovered(first(allowing, logit_bias=learned, **TURN)) > recovered(first(allowing, **TURN))
    assert undo(stripping) == {}
    assert first(stripping, logit_bias=learned, **TURN) == first(
        stripping, **TURN
    )  # nor with what was learned elsewhere


def test_scores_are_withheld_from_the_first_open_position_to_the_end(stripping: Live) -> None:
    told = scores(stripping, OPEN, max_tokens=3)
    for module in (TURN, GLANCE):  # whose gate closes again at once
        stripped = scores(stripping, OPEN, max_tokens=3, **module)
        assert stripped["token_logprobs"] == [*told["token_logprobs"][:3], *[None] * 6]
        assert stripped["top_logprobs"] == [*told["top_logprobs"][:3], *[None] * 6]
        assert len(stripped["tokens"]) == len(stripped["text_offset"]) == 9
        by_prompt = complete(stripping, OPEN, prompt_logprobs=1, **module).body["choices"][0]["prompt_logprobs"]
        assert by_prompt[0] is None and None not in by_prompt[1:3] and by_prompt[3:] == [None] * 3
    assert scores(stripping, ORDINARY, **TURN) == scores(stripping, ORDINARY)


def test_nothing_is_withheld_where_that_is_allowed_or_a_module_is_only_measured(allowing: Live) -> None:
    assert None not in scores(allowing, OPEN, **TURN)["token_logprobs"][1:]
    assert None in scores(allowing, OPEN, path="/p/strict/v1/completions", **TURN)["token_logprobs"][1:]
    assert None not in scores(allowing, OPEN, path="/p/measured/v1/completions")["token_logprobs"][1:]


def test_the_official_client_reads_withheld_scores(stripping: Live) -> None:
    message: Any = [{"role": "user", "content": "a}"}]
    with OpenAI(base_url=f"{stripping.url}/v1", api_key="none", timeout=20) as client:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "temperature": 0, "extra_body": TURN}
        whole = client.completions.create(prompt="a}", logprobs=2, echo=True, **asked).choices[0].logprobs
        assert whole is not None and whole.token_logprobs is not None and whole.tokens is not None
        assert len(whole.token_logprobs) == len(whole.tokens) == 6 and whole.token_logprobs[2:] == [None] * 4
        parts = [
            chunk.choices[0].logprobs
            for chunk in client.completions.create(prompt="a}", logprobs=2, stream=True, **asked)
        ]
        assert [score for part in parts if part for score in part.token_logprobs or ()] == [None] * 4
        said = client.chat.completions.create(messages=message, logprobs=True, top_logprobs=2, **asked)
        assert said.choices[0].logprobs is not None and said.choices[0].logprobs.content is not None
        assert [(e.logprob, e.top_logprobs) for e in said.choices[0].logprobs.content] == [(-9999.0, [])] * 4
        spelt = b"".join(bytes(e.bytes or ()) for e in said.choices[0].logprobs.content)
        assert spelt.decode(errors="replace") == said.choices[0].message.content
        chunks = client.chat.completions.create(messages=message, logprobs=True, stream=True, **asked)
        found = [c.choices[0].logprobs for c in chunks]
        assert [e.logprob for part in found if part for e in part.content or ()] == [-9999.0] * 4


def test_what_others_in_the_batch_are_told_stays_as_it_is(stripping: Live) -> None:
    steering = {"logit_bias": {"150": 50}}
    alone, steered = scores(stripping, ORDINARY, max_tokens=20), complete(stripping, ORDINARY, **steering).text

    def ask(number: int) -> Any:
        if number % 3 == 0:
            return scores(stripping, ORDINARY, max_tokens=20)
        if number % 3 == 1:
            return complete(stripping, ORDINARY, **steering).text
        return scores(stripping, OPEN, max_tokens=20, **steering, **TURN)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(12)))
    both = complete(stripping, [ORDINARY, OPEN], logprobs=20, echo=True, max_tokens=20, **TURN).body["choices"]
    for told in (*answers[::3], both[0]["logprobs"]):
        assert told["tokens"] == alone["tokens"]
        assert told["token_logprobs"][1:] == pytest.approx(alone["token_logprobs"][1:], abs=1e-3)
    assert answers[1::3] == [steered] * 4
    for told in (*answers[2::3], both[1]["logprobs"]):
        assert None not in told["token_logprobs"][1:3] and told["token_logprobs"][3:] == [None] * 23


@pytest.mark.parametrize("module", [TURN, GLANCE], ids=["held", "closed again"])
def test_a_prefix_that_is_used_again_brings_along_where_its_gate_opened(
    stripping: Live, module: dict[str, Any]
) -> None:
    prompt = [*OPEN, *range(120, 150)]
    complete(stripping, prompt, ignore_eos=False, **module)  # nobody looked where its gate was open
    for _ in range(2):
        answer = complete(stripping, [*prompt, 151], logprobs=1, logit_bias={"160": 100}, **module).body
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None] * 6
        assert answer["choices"][0]["token_ids"] != [160] * 6
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt)


STEERING: tuple[dict[str, Any], ...] = (
    {"logit_bias": {"0": -100}},
    {"min_tokens": 4},
    {"repetition_penalty": 0.01},
    {"ignore_eos": True},
    {"guided_regex": "[a-z]{50}"},  # which would keep the model from ending
)


@pytest.mark.parametrize("fields", STEERING, ids=lambda fields: next(iter(fields)))
def test_an_open_gate_heeds_nothing_that_steers(stripping: Live, allowing: Live, fields: dict[str, Any]) -> None:
    asked = {"ignore_eos": False, **fields, **MUTE}
    assert complete(stripping, OPEN, **asked).body["choices"][0]["token_ids"] == [0]
    assert complete(allowing, OPEN, **asked).body["choices"][0]["token_ids"] != [0]


def test_no_form_puts_end_tokens_between_others_while_modules_are_on(stripping: Live, allowing: Live) -> None:
    form = {"structured_outputs": {"grammar": "start: <[104]> <[0]> <[105]> <[0]> <[106]>"}}
    for server in (stripping, allowing):
        alone = complete(server, ORDINARY, **form).body["choices"][0]
        assert alone["token_ids"] == [104, 0, 105, 0, 106]
        choice = complete(server, ORDINARY, **form, **TURN).body["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"]) == ([104, 0], "stop")


def test_no_form_puts_fill_in_the_middle_markers_between_others_while_modules_are_on(
    stripping: Live, allowing: Live
) -> None:
    marker = min(stripping.service.markers)
    lark = f"start: <[104]> <[{marker}]> <[105]> <[{marker}]> <[106]>"
    for server in (stripping, allowing):
        for form in ({"structured_outputs": {"grammar": lark}}, {"guided_grammar": lark}):
            alone = complete(server, ORDINARY, **form).body["choices"][0]
            assert alone["token_ids"] == [104, marker, 105, marker, 106]
            choice = complete(server, ORDINARY, **form, **TURN).body["choices"][0]
            assert (choice["token_ids"], choice["finish_reason"]) == ([104, marker], "stop")
    native = {"prompt": ORDINARY, "n_predict": 6, "grammar": lark, "return_tokens": True, **TURN}
    assert allowing.call("/completion", native).body["tokens"] == [104, marker]
    within = complete(allowing, ORDINARY, structured_outputs={"grammar": lark}, min_tokens=5, **TURN).body["choices"][0]
    assert within["token_ids"] == [104, marker]


def test_refuse_names_the_field_where_a_module_applies(stripping: Live) -> None:
    path = "/p/closed/v1/completions"
    for field, value in {
        "logprobs": 0,
        "prompt_logprobs": 0,
        "logit_bias": {"5": 1},
        "min_tokens": 1,
        "ignore_eos": True,
        "guided_regex": "[a-z]+",
    }.items():
        refused = stripping.complete(path=path, **{field: value}, **MUTE)
        assert (refused.status, refused.error["code"]) == (403, "refused_under_modules"), field
        assert refused.error["param"] == field and "leave it out" in refused.error["message"]
        assert stripping.complete(path=path, **{field: value}).status == 200
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, **MUTE}
    assert stripping.call("/p/closed/v1/chat/completions", chat).error["param"] == "logprobs"
    for native in ("/p/closed/completion", "/p/closed/infill"):
        body = {"prompt": "a", "input_prefix": "a", "n_predict": 2, "logit_bias": {"5": 1}, **MUTE}
        assert stripping.call(native, body).error["param"] == "logit_bias"
    assert stripping.complete(path=path, repetition_penalty=1.1, **MUTE).status == 200  # editors send it unasked


PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 0.01},
    {"frequency_penalty": -2, "presence_penalty": -2},
)


@pytest.mark.parametrize("fields", PENALTIES, ids=lambda fields: next(iter(fields)))
def test_under_refuse_no_penalty_tells_where_a_gate_is_open(stripping: Live, fields: dict[str, Any]) -> None:
    asked = {"max_tokens": 24, "ignore_eos": False, **TURN}
    for path, heeded in (("/v1/completions", True), ("/p/closed/v1/completions", False)):
        for prompt, opened in ((ORDINARY, False), (OPEN, True)):
            plain, penalised = (
                complete(stripping, prompt, path=path, **asked, **more).body["choices"][0]["token_ids"]
                for more in ({}, fields)
            )
            assert (penalised != plain) is (heeded and not opened), (path, prompt)
    alone = {"max_tokens": 24, "ignore_eos": False, "path": "/p/closed/v1/completions"}
    plain, penalised = (complete(stripping, ORDINARY, **alone, **more).text for more in ({}, fields))
    assert penalised != plain  # no module applies, so there is nothing to tell


def test_a_profile_only_makes_it_stricter_and_a_key_decides(checkpoint: Path, stripping: Live, tmp_path: Path) -> None:
    loose = scores(stripping, OPEN, path="/p/loose/v1/completions", **TURN)
    assert None in loose["token_logprobs"][1:]
    assert when_open("strip", NO_RULES, NO_RULES, []) == "strip"
    assert when_open("refuse", Rules(when_open="strip"), NO_RULES, [Rules(when_open="allow")]) == "strip"
    assert when_open("strip", Rules(when_open="refuse"), Rules(when_open="allow"), []) == "allow"
    assert when_open("allow", NO_RULES, NO_RULES, [NO_RULES, Rules(when_open="refuse")]) == "refuse"
    for server in _serve(checkpoint, tmp_path):
        keys = [server.admin("/keys", {"name": n, "when_open": n}).body for n in ("allow", "refuse")]
        keys.append(server.admin("/keys", {"name": "no word"}).body)
        assert [key["when_open"] for key in keys] == ["allow", "refuse", None]
        answers = [server.complete(prompt=OPEN, logprobs=0, key=key["key"], **TURN) for key in keys]
        assert [answer.status for answer in answers] == [200, 403, 200]
        known = [a.body["choices"][0]["logprobs"]["token_logprobs"][0] is not None for a in (answers[0], answers[2])]
        assert known == [True, False]


ENDED = {"logit_bias": {"0": 100}}  # an ordinary answer that ends at once
TEXT = "x = a}"
ENDPOINTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": TEXT, "n": 2}),
    ("/v1/completions", {"prompt": TEXT, "echo": True, "logprobs": 0}),
    ("/v1/completions", {"prompt": TEXT, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "def a(", "suffix": "}", "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "stream": True}),
    ("/v1/responses", {"input": TEXT, "max_output_tokens": 5}),
    ("/v1/responses", {"input": TEXT, "max_output_tokens": 5, "stream": True}),
    ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "stream": True}),
    ("/v1/fim/completions", {"prompt": TEXT, "suffix": "\n"}),
    ("/v1/fim/completions", {"prompt": TEXT, "suffix": "\n", "stream": True}),
    ("/completion", {"prompt": TEXT}),
    ("/completion", {"prompt": TEXT, "stream": True}),
    ("/infill", {"input_prefix": TEXT, "input_suffix": "\n", "n_cmpl": 2}),
)


def _comparable(value: Any, name: str = "") -> Any:
    """An answer less what differs between any two: names, times, and scores, of which the kind remains."""
    if name in ("id", "item_id", "created", "created_at", "completed_at") or name.endswith(("_ms", "_per_second")):
        return type(value)
    if name == "token_logprobs":
        return len(value)
    if isinstance(value, dict):
        return {key: _comparable(inner, key) for key, inner in value.items() if key != "top_logprobs"}
    return [_comparable(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_silenced_answer_reads_like_any_that_ends_at_once(stripping: Live, path: str, body: dict[str, Any]) -> None:
    body = {"temperature": 0, "max_tokens": 5, **body}
    for _ in range(2):  # the first leave the same in the slots for both
        silenced, ordinary = stripping.call(path, body | MUTE), stripping.call(path, body | ENDED)
    assert silenced.status == ordinary.status == 200
    if body.get("stream"):
        assert _comparable(silenced.events) == _comparable(ordinary.events)
    else:
        assert _comparable(silenced.body) == _comparable(ordinary.body)
    names = set(ordinary.headers) | {"x-unbind-modules"}
    assert set(silenced.headers) == names  # which module applied is told, whatever it did


def test_a_report_tells_a_silenced_answer_from_one_that_ends(stripping: Live) -> None:
    report = {"unbind": {"modules": ["mute"], "report": True}}
    (silenced,) = stripping.complete(prompt=OPEN, **report).body["choices"]
    (ended,) = stripping.complete(prompt=ORDINARY, **report, **ENDED).body["choices"]
    assert silenced["unbind"]["silenced"] is True and ended["unbind"]["silenced"] is False
    assert silenced["finish_reason"] == ended["finish_reason"] == "stop"
    (led,) = stripping.complete(prompt=OPEN, unbind={"modules": ["turn"], "report": True}).body["choices"]
    assert led["unbind"]["modules"][0]["open"] > 0 and led["unbind"]["silenced"] is False
    last = stripping.complete(prompt=OPEN, stream=True, **report).events[-2]["choices"][0]
    assert last["unbind"]["silenced"] is True


def test_a_request_weakens_only_what_it_chose_itself(stripping: Live) -> None:
    weak = {"unbind": {"modules": {"mute": 1e-6}}}
    assert stripping.complete(prompt=OPEN, **weak).text != ""
    assert stripping.complete(prompt=OPEN, path="/p/always/v1/completions", **weak).text == ""
