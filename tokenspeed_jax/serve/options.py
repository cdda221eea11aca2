"""The command line, generated from the fields of the configuration dataclasses."""

import argparse
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.serve.config import ServerConfig

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")


def option_name(field_name: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + field_name.replace("_", "-")


def parse_options(argv: Sequence[str] | None = None) -> tuple[EngineConfig, ServerConfig]:
    """Reads the command line (default: the process's own).

    Any mistake prints the usage and one line that names option, value and what is allowed, then exits with 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tokenspeed_jax.serve",
        description="Serve one model over HTTP with OpenAI's protocol.",
        allow_abbrev=False,
    )
    _add_options(parser.add_argument_group("server"), ServerConfig)
    _add_options(parser.add_argument_group("engine"), EngineConfig)
    given = vars(parser.parse_args(argv))
    server_names = {item.name for item in fields(ServerConfig)}
    try:
        server = ServerConfig(**{name: value for name, value in given.items() if name in server_names})
        engine = EngineConfig(**{name: value for name, value in given.items() if name not in server_names})
    except ConfigError as error:
        parser.error(f"argument {option_name(error.field)}: {error}" if error.field else str(error))
    return engine, server


def _add_options(group: Any, config: type) -> None:
    hints = get_type_hints(config)
    for item in fields(config):
        names = [option_name(name) for name in (item.name, *item.metadata.get("aliases", ()))]
        hint = _without_none(hints[item.name])
        common: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": _help(item)}
        if hint is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        else:
            required = item.default is MISSING and item.default_factory is MISSING
            group.add_argument(*names, type=_parser_of(hint), metavar=_metavar(hint), required=required, **common)


def _help(item: Field) -> str:
    text = item.metadata["help"]
    if item.default is not MISSING and item.default is not None:
        text += f" (default: {item.default})"
    return text.replace("%", "%%")


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        rest = [part for part in get_args(hint) if part is not type(None)]
        if len(rest) != 1:
            raise TypeError(f"an option has one type, got {hint}")
        return rest[0]
    return hint


def _metavar(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    return {int: "INTEGER", float: "NUMBER", str: "TEXT"}[hint]


def _parser_of(hint: Any) -> Callable[[str], Any]:
    if get_origin(hint) is Literal:
        return _one_of(get_args(hint))
    return {int: _integer, float: _number, str: str}[hint]


def _one_of(allowed: tuple[Any, ...]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(allowed)}, got {text!r}")
        return text

    return parse


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
