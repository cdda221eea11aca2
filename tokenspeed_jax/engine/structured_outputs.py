"""`StructuredOutputsParams`: what the text of a sample has to look like."""

import json
from collections.abc import Mapping
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
        begins_after: text that ends an unconstrained part in front, such as the model's reasoning with its closing
            mark; None constrains from the first token on.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    begins_after: str | None = None

    def __post_init__(self) -> None:
        given = [item.name for item in fields(self)[:5] if getattr(self, item.name) not in (None, False)]
        if self.json is False:
            given.append("json")
        if len(given) != 1:
            raise InvalidRequest(
                "structured_outputs takes exactly one of json, json_object, regex, choice and grammar, got "
                + (", ".join(given) or "none"),
                parameter="structured_outputs",
            )
        if self.json_object not in (False, True):
            _refuse("json_object", "must be true or false", self.json_object)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar", "begins_after"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                _refuse(name, "must be a non-empty string", value)
        if self.choice is not None:
            if isinstance(self.choice, str) or not all(isinstance(text, str) and text for text in self.choice):
                _refuse("choice", "must be a list of non-empty strings", self.choice)
            object.__setattr__(self, "choice", tuple(self.choice))
        self._check_size(given[0])

    def _check_size(self, name: str) -> None:
        value = getattr(self, name)
        texts = value if isinstance(value, tuple) else [value] if isinstance(value, str) else []
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
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
