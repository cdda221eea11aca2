"""What a reply has to look like, as clients of OpenAI, vLLM and SGLang say it."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.errors import InvalidRequest
from tokenspeed_jax.serve.bodies import Neutral, convert_object
from tokenspeed_jax.serve.errors import ApiError, refusal
from tokenspeed_jax.serve.protocol.json_schemas import Schema, read_schema, text_of, with_guidance

MAX_EBNF_BYTES = 16 * 1024
"""Largest grammar in EBNF. It is rewritten in Python, in a time that grows with the square of its rules."""

MAX_CHOICES = 4096

_ENGINE_FIELDS = ("json", "json_object", "regex", "choice", "grammar")
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_BACKENDS = ("auto", "guidance", "llguidance")

STRUCTURED_NEUTRAL_FIELDS: Mapping[str, Neutral] = {
    "structural_tag": lambda _value, _body: False,
    "guided_decoding_backend": lambda value, _body: value in _BACKENDS,
}


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`response_format.json_schema`. The name and the description are for the client's own use."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's way."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def constraint(self) -> StructuredOutputsParams | None:
        """None for a text. `strict` false drops the keywords that cannot be enforced, where else they are errors."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            wrong = "is missing" if self.json_schema is None else "is for the type json_schema only"
            field = "response_format.json_schema"
            raise ApiError(f"{field} {wrong}", param=field, code="invalid_value")
        if self.json_schema is not None:
            schema: Schema = read_schema(self.json_schema.schema, "response_format.json_schema.schema")
            if self.json_schema.strict is False:
                schema = with_guidance(schema, lenient=True)
            return StructuredOutputsParams(json=text_of(schema))
        return StructuredOutputsParams(json_object=True) if self.type == "json_object" else None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's way: exactly one of the first five, and how JSON is spaced. There is no fallback to disable."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        "structural_tag": lambda _value, _body: False,
        "disable_fallback": lambda value, _body: isinstance(value, bool),
        "disable_additional_properties": lambda value, _body: value is False,
    }

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None

    def constraint(self, names: Callable[[str], str]) -> StructuredOutputsParams:
        """The constraint; `names` tells what the client calls a field.

        Raises:
            ApiError, InvalidRequest: none or several constraints, or one that is malformed.
        """
        return StructuredOutputsParams(
            json=self._schema_text(names),
            json_object=bool(self.json_object) and not self._spacing,
            regex=self.regex,
            choice=None if self.choice is None else _checked_choice(self.choice, names("choice")),
            grammar=None if self.grammar is None else lark_of(self.grammar, names("grammar")),
        )

    @property
    def _spacing(self) -> dict[str, Any]:
        if self.disable_any_whitespace:
            return {"whitespace_flexible": False, "whitespace_pattern": None}
        return {} if self.whitespace_pattern is None else {"whitespace_pattern": self.whitespace_pattern}

    def _schema_text(self, names: Callable[[str], str]) -> str | None:
        spacing = self._spacing
        if self.json is None and not (self.json_object and spacing):
            if spacing:
                field = names("whitespace_pattern" if self.whitespace_pattern else "disable_any_whitespace")
                raise ApiError(f"{field} is for JSON only", param=field, code="invalid_value")
            return None
        schema: Schema = {"type": "object"} if self.json is None else read_schema(self.json, names("json"))
        return text_of(with_guidance(schema, **spacing) if spacing else schema)


class StructuredOutputFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of completions and chat, of which a request has one: OpenAI's, vLLM's, vLLM's older ones, SGLang's."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def content_constraint(self) -> StructuredOutputsParams | None:
        """What the content has to look like, None when the request does not say.

        Raises:
            ApiError: 400 for several constraints or a malformed one, naming the fields.
        """
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            name = "guided_whitespace_pattern"
            raise ApiError(f"{name} needs guided_json", param=name, code="invalid_value")
        field = self._constraining_field()
        if field is None:
            return None
        try:
            match field:
                case "response_format":
                    return self.response_format.constraint() if self.response_format is not None else None
                case "structured_outputs":
                    given = convert_object(self.structured_outputs or {}, StructuredOutputs, "structured_outputs.")
                    return given.constraint("structured_outputs.{}".format)
                case "regex" | "ebnf":
                    return sglang_constraint(regex=self.regex, ebnf=self.ebnf)
            return StructuredOutputs(
                json=self.guided_json,
                regex=self.guided_regex,
                choice=self.guided_choice,
                grammar=self.guided_grammar,
                whitespace_pattern=self.guided_whitespace_pattern,
            ).constraint("guided_{}".format)
        except InvalidRequest as error:
            raise refusal(error, self.constraint_names()) from None

    def constraint_names(self) -> dict[str, str]:
        """The engine's names of a constraint by the field that this request has for it."""
        field = self._constraining_field()
        if field == "structured_outputs":
            given = [name for name in _ENGINE_FIELDS if (self.structured_outputs or {}).get(name) is not None]
            field = ".".join((field, *given[:1]))
        return {} if field is None else engine_names(field)

    def _constraining_field(self) -> str | None:
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf")
        given = [name for name in ("structured_outputs", *names) if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type != "text":
            given.insert(0, "response_format")
        check_one_constraint(given)
        return given[0] if given else None


def check_one_constraint(given: Sequence[str]) -> None:
    """Raises `ApiError` 400 that names all of the given fields when they are more than one."""
    if len(given) > 1:
        raise ApiError(f"{', '.join(given)} exclude each other; send one of them", param=given[1], code="invalid_value")


def engine_names(field: str) -> dict[str, str]:
    """Every name that the engine may use for a constraint, by the one field of the request that it came from."""
    return {"structured_outputs": field} | {f"structured_outputs.{name}": field for name in _ENGINE_FIELDS}


def sglang_constraint(
    *, json_schema: str | dict[str, Any] | None = None, regex: str | None, ebnf: str | None, prefix: str = ""
) -> StructuredOutputsParams:
    """One of SGLang's fields, whose names begin with `prefix`. Raises as `StructuredOutputs.constraint` does."""
    if json_schema is not None:
        return StructuredOutputsParams(json=text_of(read_schema(json_schema, f"{prefix}json_schema")))
    grammar = None if ebnf is None else _converted_ebnf(ebnf, f"{prefix}ebnf")
    return StructuredOutputsParams(regex=regex, grammar=grammar)


def lark_of(grammar: str, field: str) -> str:
    """A grammar in Lark: as it is, or rewritten when it is EBNF (`NAME ::= ...`), as xgrammar and llama.cpp read."""
    return _converted_ebnf(grammar, field) if _EBNF_RULE.search(grammar) else grammar


def _converted_ebnf(grammar: str, field: str) -> str:
    if len(grammar) > MAX_EBNF_BYTES:
        raise ApiError(
            f"{field} has {len(grammar)} characters; the limit for EBNF is {MAX_EBNF_BYTES}",
            param=field,
            code="invalid_value",
        )
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark  # here, for a server must start without it

        return gbnf_to_lark(grammar)
    except ImportError:
        raise ApiError(
            f"{field} needs llguidance, which is not installed", param=field, code="unsupported_parameter"
        ) from None
    except RecursionError:
        reason = "it is nested too deeply"
    except Exception as error:
        # The converter raises what comes: IndexError at a text's end, plain Exception for an unknown rule.
        reason = str(error) or type(error).__name__
    raise ApiError(f"{field} is no EBNF grammar: {reason}", param=field, code="invalid_value")


def _checked_choice(choice: list[str], field: str) -> tuple[str, ...]:
    if not 1 <= len(choice) <= MAX_CHOICES:
        raise ApiError(
            f"{field} must have 1 to {MAX_CHOICES} texts, got {len(choice)}", param=field, code="invalid_value"
        )
    return tuple(choice)
