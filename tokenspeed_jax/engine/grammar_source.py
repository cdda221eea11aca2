"""Structured outputs written as a grammar that llguidance reads: a JSON list of schemas and Lark grammars."""

import json
import re
from typing import Any

from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.errors import InvalidRequest

MAX_GRAMMAR_LINES = 4000
"""Most lines of a Lark grammar, hence of its rules."""

_ANSWER = "answer"
_BLANKS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""Of llguidance's JSON grammars. Between two tokens of JSON there may be a line break and the next line's indentation,
but no end of blanks, which is what small models otherwise write until `max_tokens`."""


def grammar_source(params: StructuredOutputsParams, text_mark: str | None) -> str:
    """The grammar of one constraint.

    Args:
        text_mark: what an unconstrained part in front ends with; None without one.

    Raises:
        InvalidRequest: a schema that is no JSON, naming line and column, or none at all; a grammar of too many lines.
    """
    answer = _answer(params)
    if text_mark is None:
        return json.dumps({"grammars": [answer]})
    front = f"start: front @{_ANSWER}\nfront[lazy]: TEXT {json.dumps(text_mark)}\nTEXT: /(?s:.*)/\n"
    return json.dumps({"grammars": [{"lark_grammar": front}, {**answer, "name": _ANSWER}]})


def _answer(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.json_object:
        return _schema_grammar({"type": "object"})
    if params.json is not None:
        return _schema_grammar(_parsed_schema(str(params.json)))
    if params.regex is not None:
        return _regex_grammar(params.regex)
    if params.choice is not None:
        return _regex_grammar("|".join(map(re.escape, params.choice)))
    lark = str(params.grammar)
    if lark.count("\n") >= MAX_GRAMMAR_LINES:
        raise _refusal("grammar", f"has {lark.count(chr(10)) + 1} lines; the limit is {MAX_GRAMMAR_LINES}")
    return {"lark_grammar": lark}


def _regex_grammar(expression: str) -> dict[str, Any]:
    from llguidance import regex_to_lark

    return {"lark_grammar": f"start: /{regex_to_lark(expression)}/\n"}


def _schema_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise _refusal("json", f"has an x-guidance that is no object: {json.dumps(own)[:80]}")
    options = own if "whitespace_flexible" in own else {**_BLANKS, **own}
    return {"json_schema": {**schema, "x-guidance": options}}


def _parsed_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise _refusal("json", f"is no JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except (RecursionError, ValueError) as error:
        raise _refusal("json", f"is no JSON that can be read: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _refusal("json", f"must be a JSON schema, an object or true; got {text[:80]}")
    return schema


def _refusal(field: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs.{field} {rule}", parameter=f"structured_outputs.{field}")
