"""Arguments that a model writes as bare text between tags: which schemas a grammar of them can promise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed_jax.text.transcripts import value_types

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_OF_OBJECTS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$schema", "$defs", "definitions", "x-guidance"}
)
_OF_CHOICES = frozenset({"type", "enum", "const"})
_SCALARS = frozenset({"string", "null", "boolean", "integer", "number"})


@dataclass(frozen=True)
class BareParameter:
    """One parameter of a function.

    Attributes:
        schema: of a value that is written as JSON.
        choices: the texts that the value may be. Without either it is any text.
    """

    key: str
    is_required: bool
    schema: Mapping[str, Any] | None = None
    choices: Sequence[str] | None = None


def bare_parameters(schema: Mapping[str, Any]) -> list[BareParameter] | None:
    """The parameters of a function, in the schema's order.

    None where the schema says more than bare values can be held to: of the object as a whole, or of a value whose JSON
    type does not follow from its text.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not (isinstance(properties, dict) and isinstance(required, list)):
        return None
    if not schema.keys() - _ANNOTATIONS <= _OF_OBJECTS:
        return None
    if not all(isinstance(key, str) and key in properties for key in required):
        return None
    parameters: list[BareParameter] = []
    for key, value in properties.items():
        parameter = _parameter(schema, key, value, is_required=key in required)
        if parameter is None:
            return None
        parameters.append(parameter)
    return parameters


def _parameter(schema: Mapping[str, Any], key: str, value: Any, *, is_required: bool) -> BareParameter | None:
    if not key.strip() or key != key.strip() or any(mark in key for mark in '<>"\n'):
        return None
    if value is True or value == {}:
        return BareParameter(key, is_required)
    if not isinstance(value, dict):
        return None
    types, said = value_types(schema, key), value.keys() - _ANNOTATIONS
    if "string" not in types:
        shared = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
        return BareParameter(key, is_required, schema=value | shared) if _says_its_types(value) else None
    choices = value.get("enum", [value["const"]] if "const" in value else None)
    if choices is not None:
        is_plain = types == {"string"} and said <= _OF_CHOICES and isinstance(choices, list) and bool(choices)
        return BareParameter(key, is_required, choices=choices) if is_plain and all(map(_is_bare, choices)) else None
    is_scalar = types <= _SCALARS and _says_only_types(value)
    return BareParameter(key, is_required) if is_scalar or not said else None


def _is_bare(choice: Any) -> bool:
    return isinstance(choice, str) and choice != "" and choice == choice.strip() and "<" not in choice


def _says_its_types(value: Any) -> bool:
    """Whether no part of a schema leaves the type of its values to something that `value_types` does not look at."""
    if not isinstance(value, dict):
        return False
    if "type" in value or "enum" in value:
        return True
    branches = [value[word] for word in ("anyOf", "oneOf") if word in value]
    return len(branches) == 1 and isinstance(branches[0], list) and all(map(_says_its_types, branches[0]))


def _says_only_types(value: Any) -> bool:
    """Whether every text is a value: of one of the types that the schema names and says nothing more of."""
    if not isinstance(value, dict):
        return False
    said = value.keys() - _ANNOTATIONS
    if said == {"type"}:
        return isinstance(value["type"], str | list)
    return said == {"anyOf"} and isinstance(value["anyOf"], list) and all(map(_says_only_types, value["anyOf"]))
