"""Which schemas bare values can be held to: promised is only what the parser then reads."""

from typing import Any

import pytest

from tokenspeed_jax.serve.bare_values import bare_parameters

STRING = {"type": "string"}


@pytest.mark.parametrize(
    "value",
    [
        STRING, {}, True, STRING | {"title": "x", "default": ""}, {"type": ["string", "null"]}, {"description": "x"},
        {"anyOf": [STRING, {"type": "number"}]}, {"enum": ["a", "b"]}, {"const": "a"}, {"type": "integer", "const": 3},
        {"type": "array", "items": {"$ref": "#/$defs/x"}}, {"anyOf": [{"type": "object"}, {"type": "null"}]},
        {"enum": [1, 2]}, {"type": "boolean"},
    ],
)  # fmt: skip
def test_values_whose_type_follows_from_their_text(value: Any) -> None:
    (parameter,) = bare_parameters({"type": "object", "properties": {"x": value}}) or ()
    assert (parameter.key, parameter.is_required) == ("x", False)


@pytest.mark.parametrize(
    "value",
    [
        {"$ref": "#/$defs/x"}, {"allOf": [STRING]}, {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}, False, [],
        STRING | {"pattern": "a"}, STRING | {"minLength": 1}, {"type": ["string", "array"]}, {"enum": ["a", 1]},
        {"enum": ["a", None]}, {"enum": [" a"]}, {"enum": ["<a"]}, {"enum": []}, {"const": 5}, {"not": STRING},
        {"type": ["string", "integer"], "enum": ["5"]}, {"anyOf": [STRING | {"format": "date"}, {"type": "null"}]},
        {"anyOf": "x"}, {"type": "string", "enum": "ab"}, {"type": {}},
    ],
)  # fmt: skip
def test_values_that_need_more_than_their_text(value: Any) -> None:
    assert bare_parameters({"type": "object", "properties": {"x": value}}) is None


@pytest.mark.parametrize(
    "more",
    [
        {"required": ["y"]}, {"required": "x"}, {"required": [[]]}, {"properties": []}, {"minProperties": 1},
        {"anyOf": [{"required": ["x"]}]}, {"patternProperties": {}}, {"properties": {"a>b": STRING}},
        {"properties": {" a": STRING}}, {"properties": {"": STRING}}, {"$ref": "#/$defs/x"},
    ],
)  # fmt: skip
def test_objects_that_say_more_than_their_properties(more: Any) -> None:
    schema = {"type": "object", "properties": {"x": STRING}}
    assert bare_parameters(schema) is not None
    assert bare_parameters(schema | more) is None
