"""What an option's value looks like as text, by the type of its field."""

import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin

from tokenspeed_jax.errors import ConfigError

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")


class OptionError(ValueError):
    """A command line or a configuration file that cannot be used; the message names option and value."""


@dataclass(frozen=True)
class ValueKind:
    """How the values of one field are written.

    Attributes:
        parse: from text; raises `OptionError`.
        placeholder: what stands for a value in the help.
        is_switch: the option takes no value and has an opposite.
        is_text: a value in a configuration file must be text: YAML would turn `1.10` into another number.
        is_list: the option may be repeated, and is a list in a configuration file.
        is_mapping: a mapping in a configuration file, JSON on the command line.
        of_mapping: the value of such a mapping; raises `OptionError`.
    """

    parse: Callable[[str], Any]
    placeholder: str
    is_switch: bool = False
    is_text: bool = False
    is_list: bool = False
    is_mapping: bool = False
    of_mapping: Callable[[dict[str, Any]], Any] = dict

    @classmethod
    def of(cls, hint: Any, spellings: Mapping[str, str]) -> "ValueKind":
        """The kind of a field with this type. Raises TypeError for a type that no option can have."""
        hint = _without_none(hint)
        if hint is bool:
            return cls(_switch, "", is_switch=True)
        if get_origin(hint) is Literal:
            allowed = get_args(hint)
            return cls(_one_of(allowed, spellings), "{" + ",".join(map(str, allowed)) + "}", is_text=True)
        if get_origin(hint) is Sequence and get_args(hint)[0] in (int, str):
            item = cls.of(get_args(hint)[0], spellings)
            return cls(item.parse, item.placeholder, is_text=item.is_text, is_list=True)
        if get_origin(hint) is Mapping:
            return cls(_mapping, "JSON", is_mapping=True)
        if is_dataclass(hint) and isinstance(hint, type):
            build = partial(_record, hint)
            return cls(lambda text: build(_json_object(text)), "JSON", is_mapping=True, of_mapping=build)
        if hint in (int, float, str):
            parse: Callable[[str], Any] = {int: _integer, float: _number, str: str}[hint]
            return cls(parse, {int: "INTEGER", float: "NUMBER", str: "TEXT"}[hint], is_text=hint is str)
        raise TypeError(f"no option can have the type {hint}")


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        rest = [part for part in get_args(hint) if part is not type(None)]
        if len(rest) != 1:
            raise TypeError(f"an option has one type, got {hint}")
        return rest[0]
    return hint


def _one_of(allowed: tuple[str, ...], spellings: Mapping[str, str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = spellings.get(text, text)
        if value not in allowed:
            raise OptionError(f"must be one of {', '.join(allowed)}, got {text!r}")
        return value

    return parse


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise OptionError(f"must be true or false, got {text!r}")
    return text == "true"


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise OptionError(f"must be an integer, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"must be a number, got {text!r}") from None


def _mapping(text: str) -> dict[int, float]:
    return {_integer(key): number for key, number in _json_object(text).items()}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_without_repetition)
    except OptionError:
        raise
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise OptionError(f"must be a JSON object, got {text!r}")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise OptionError(f"has the key {key!r} twice")
        found[key] = value
    return found


def _record(kind: type, values: Mapping[str, Any]) -> Any:
    """The dataclass `kind` with these fields; it checks their values itself."""
    known = [item.name for item in fields(kind)]
    for key in values:
        if key not in known:
            raise OptionError(f"has no key {key!r}; its keys are {', '.join(known)}")
    try:
        return kind(**values)
    except ConfigError as error:
        raise OptionError(str(error)) from None
