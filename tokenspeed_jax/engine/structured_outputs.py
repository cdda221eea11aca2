"""`StructuredOutputsParams`: what the text of a sample has to look like."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from tokenspeed_jax.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 256 * 1024
"""Most bytes of one schema, expression or grammar, and of all choices together."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One constraint: exactly one of the fields up to `grammar` is given.

    Raises InvalidRequest, naming `structured_outputs.FIELD`, for none or several constraints and for values of the
    wrong type or size. Whether a grammar can be compiled is found out when a request is submitted.

    Attributes:
        json: a JSON schema, as text or as the value of its JSON.
        json_object: any JSON object.
        regex: an expression that the whole text matches.
        choice: texts, one of which it is.
        grammar: a grammar in llguidance's dialect of Lark.
        begins_after: text that ends an unconstrained part in front, such as the closing mark of the model's reasoning;
            None constrains from the first token on. It may be or end in a special token.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    begins_after: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            _refuse("json_object", "must be true or false", self.json_object)
        given = self._given()
        if len(given) != 1:
            raise InvalidRequest(
                "structured_outputs takes exactly one of json, json_object, regex, choice and grammar, got "
                + (", ".join(given) or "none"),
                parameter="structured_outputs",
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar", "begins_after"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                _refuse(name, "must be a non-empty string", value)
        if self.choice is not None:
            texts = self.choice
            if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
                _refuse("choice", "must be a list of non-empty strings", texts)
            if not all(isinstance(text, str) and text for text in texts):
                _refuse("choice", "must be a list of non-empty strings", texts)
            object.__setattr__(self, "choice", tuple(texts))
        for name in (given[0], "begins_after"):
            self._check_text(name)

    @property
    def constraint(self) -> str:
        """The name of the field that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        absent = {"json_object": False}
        return [item.name for item in fields(self)[:5] if getattr(self, item.name) is not absent.get(item.name)]

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        texts = value if isinstance(value, tuple) else [value] if isinstance(value, str) else []
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"structured_outputs.{name} must be valid Unicode", parameter=f"structured_outputs.{name}"
            ) from None
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"structured_outputs.{name} has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}",
                parameter=f"structured_outputs.{name}",
            )


def _schema_text(schema: object) -> str:
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping | bool):
        _refuse("json", "must be a JSON schema", schema)
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"structured_outputs.json is no JSON value: {error}", parameter="structured_outputs.json"
        ) from None


def _refuse(name: str, rule: str, value: object) -> None:
    raise InvalidRequest(f"structured_outputs.{name} {rule}, got {value!r}", parameter=f"structured_outputs.{name}")
