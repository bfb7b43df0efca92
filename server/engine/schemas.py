"""JSON schemas as grammars are made of them: an object has the properties that are named, unless its schema speaks of others.

JSON Schema lets any further property stand in an object whose schema does not forbid it, and a small model makes use of that: it
calls a function with arguments that it has made up. xgrammar, which vLLM compiles schemas with, forbids what is not named; so
do we.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of schemas by name
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ONES = ("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties")
# What is said of the same value elsewhere: with properties named in two places, neither may forbid those of the other.
_ELSEWHERE = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "dependentSchemas", "dependencies"}
_OF_OBJECTS = {
    "properties",
    "patternProperties",
    "additionalProperties",
    "unevaluatedProperties",
    "required",
    "minProperties",
}
_CONDITIONS = {"not", "if", "then", "else"}
_OPEN = {"patternProperties", "additionalProperties", "unevaluatedProperties", "minProperties"} | _ELSEWHERE


def closed(document: Any) -> Any:
    """The schema with ``additionalProperties: false`` in each object that names its properties and says nothing of others.

    As it is where one value falls under several schemas at once, or under a condition: that could leave nothing to say.
    """
    return document if any(_tangled(schema) for schema in _every(document)) else _closed(document)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = {key: _mapped(key, value, _closed) for key, value in schema.items()}
    named, required = schema.get("properties"), schema.get("required", [])
    if (
        isinstance(named, dict)
        and not _OPEN & schema.keys()
        and isinstance(required, list)
        and all(isinstance(name, str) and name in named for name in required)
    ):
        made["additionalProperties"] = False
    return made


def _tangled(schema: dict[str, Any]) -> bool:
    several = schema.get("allOf")
    elsewhere = _ELSEWHERE & schema.keys()
    return bool(
        _CONDITIONS & schema.keys()
        or (isinstance(several, list) and len(several) > 1)
        or len(elsewhere) > 1
        or (elsewhere and _OF_OBJECTS & schema.keys())
    )


def _every(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all within it; values that are no schemas, as an ``enum`` holds, are not looked into."""
    found: list[Any] = [schema]
    while found:
        one = found.pop()
        if isinstance(one, dict):
            yield one
            for key, value in one.items():
                _mapped(key, value, found.append)


def _mapped(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a keyword, each schema in it changed."""
    if key in _MAPS and isinstance(value, dict):
        return {name: change(one) for name, one in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [change(one) for one in value]
    return change(value) if key in _ONES and isinstance(value, dict) else value
