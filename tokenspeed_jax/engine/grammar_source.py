"""Structured outputs written as a grammar that llguidance reads: a JSON list of schemas and Lark grammars."""

import json
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.errors import InvalidRequest

MAX_GRAMMAR_LINES = 4000
"""Most lines of a Lark grammar, hence of its rules."""

MAX_MULTIPLE = 100_000
"""Largest digits of a `multipleOf`, and of the least common multiple of all in one schema: an automaton of so many
states is built for it, in a third of a second, which nothing else bounds."""

_ANSWER = "answer"
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?[0-9][0-9.eE+-]*)')
_MAX_DIGITS = 30
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
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
    _check_multiples("grammar", lark)
    return {"lark_grammar": lark}


def _regex_grammar(expression: str) -> dict[str, Any]:
    from llguidance import regex_to_lark

    return {"lark_grammar": f"start: /{regex_to_lark(expression)}/\n"}


def _schema_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise _refusal("json", f"has an x-guidance that is no object: {json.dumps(own)[:80]}")
    _check_multiples("json", json.dumps(schema))
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


def _check_multiples(field: str, text: str) -> None:
    """Refuses what llguidance would build too large an automaton for. Schemas stand in Lark grammars too."""
    plain = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), text)
    least, decimals = 1, 0
    for number in _MULTIPLE.findall(plain):
        try:
            _, digits, exponent = Decimal(number).as_tuple()
        except InvalidOperation:
            continue  # no number: llguidance says so
        if not isinstance(exponent, int) or abs(exponent) + len(digits) > _MAX_DIGITS:
            raise _refusal(field, f"has a multipleOf of too many digits: {number[:40]}")
        value = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
        if value == 0:
            continue  # nor may it be 0
        places = max(-exponent, 0)
        common = max(places, decimals)
        least = math.lcm(least * 10 ** (common - decimals), value * 10 ** (common - places))
        decimals = common
        while decimals and least % 10 == 0:
            least, decimals = least // 10, decimals - 1
        if least > MAX_MULTIPLE:
            raise _refusal(
                field, f"has multipleOf whose least common multiple has digits above {MAX_MULTIPLE}, with {number[:40]}"
            )
