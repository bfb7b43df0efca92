"""Objects hold what their schema names: which schemas are closed, which stay as they are, and what answers then look like."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.engine.embedded.engine import EmbeddedEngine
from server.engine.schemas import closed
from tests.server.engine.test_forms import ask, grammar, request

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
SHUT = {**POINT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (POINT, SHUT),
        (SHUT, SHUT),
        ({"type": "array", "items": POINT}, {"type": "array", "items": SHUT}),
        ({"items": [POINT, {"type": "null"}]}, {"items": [SHUT, {"type": "null"}]}),
        ({"anyOf": [POINT, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$ref": "#/$defs/p", "$defs": {"p": POINT}}, {"$ref": "#/$defs/p", "$defs": {"p": SHUT}}),
        (
            {"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": POINT}},
            {"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": SHUT}},
        ),
        ({"additionalProperties": POINT}, {"additionalProperties": SHUT}),
        (
            {"properties": {"properties": {"enum": [POINT]}, "not": POINT}},
            {"properties": {"properties": {"enum": [POINT]}, "not": SHUT}, "additionalProperties": False},
        ),
    ],
)
def test_an_object_that_names_its_properties_has_no_others(schema: Any, wanted: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == wanted and json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {**POINT, "additionalProperties": True},
        {**POINT, "patternProperties": {"^y": {}}},
        {**POINT, "required": ["x", "y"]},
        {**POINT, "required": True},
        {**POINT, "required": [{}]},
        {**POINT, "required": None, "properties": [POINT]},
        {**POINT, "minProperties": 2},
        {"allOf": [POINT, {"properties": {"y": {}}}]},
        {**POINT, "anyOf": [{"properties": {"y": {}}}, {"required": ["z"]}]},
        {"$ref": "#/$defs/p", "required": ["y"], "$defs": {"p": POINT}},
        {"$ref": "#/$defs/p", "anyOf": [POINT], "$defs": {"p": POINT}},
        {"properties": {"a": {"not": POINT}}},
        {"if": POINT, "then": {"properties": {"y": {}}}},
        {"const": POINT},
    ],
)
def test_what_speaks_of_others_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema


values = st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"enum": ["a", None]}, POINT])
objects = st.dictionaries(st.sampled_from("abc"), values, max_size=3).flatmap(
    lambda named: st.builds(
        lambda required, rest: {"type": "object", "properties": named, "required": required, **rest},
        st.lists(st.sampled_from([*named, "z"]), unique=True, max_size=2),
        st.sampled_from([{}, {}, {"additionalProperties": {"type": "null"}}, {"minProperties": 1}]),
    )
)
schemas = st.one_of(
    objects,
    st.builds(lambda one, two: {"anyOf": [one, two]}, objects, objects),
    st.builds(lambda one, two: {"allOf": [one, two]}, objects, objects),
    st.builds(lambda one, two: {**one, "anyOf": [two, {"required": ["c"]}]}, objects, objects),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=schemas)
def test_closing_a_schema_never_leaves_nothing_to_say(schema: dict[str, Any]) -> None:
    """What satisfies a closed schema satisfies the open one, and where that can be satisfied at all, so can the closed one."""
    examples = [{}, *({name: value} for name in "abcz" for value in (1, True, None, "a", {"x": 1}))]
    examples += [one | two for one in examples for two in examples]
    examples += [one | two for one in examples[1:21] for two in examples[21:]]
    is_open, is_shut = (jsonschema_rs.validator_for(one).is_valid for one in (schema, closed(schema)))
    found = [(is_open(one), is_shut(one)) for one in examples]
    assert (False, True) not in found
    assert (True, True) in found or (True, False) not in found


def test_answers_hold_the_properties_that_are_named(engine: EmbeddedEngine) -> None:
    made = grammar(engine, "json", {"type": "object", "properties": {"a": POINT, "b": {"type": "boolean"}}})
    answers = ask(engine, [request(made, seed=seed, temperature=1.5, max_tokens=200) for seed in range(12)])
    found = [json.loads(answer.text) for answer in answers if answer.finish_reason == "stop"]
    assert (
        len(found) > 6
        and any(found)
        and all(one.keys() <= {"a", "b"} and one.get("a", {}).keys() <= {"x"} for one in found)
    )
