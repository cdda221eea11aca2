"""`CommandLine`: reads the options of one command, strictly, from its arguments and from a configuration file."""

import argparse
import difflib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, cast

from tokenspeed_jax.errors import ConfigError, InvalidRequest
from tokenspeed_jax.options.config_file import parse_value, read_config_file
from tokenspeed_jax.options.option import Option, option_name, options_of
from tokenspeed_jax.options.refused import REFUSED
from tokenspeed_jax.options.values import OptionError

_CONFIG = "--config"
_NEAREST = 0.6


@dataclass(frozen=True)
class Configuration:
    """One dataclass whose fields are options of a command.

    Attributes:
        kind: the dataclass; it raises `ConfigError` or `InvalidRequest` for a value it cannot have.
        omitted: fields that would have no effect in this command and are not offered.
        defaults: values in place of the dataclass's own defaults.
        positional: a field that may also be given without its name.
        section: heading of the options whose fields begin no section of their own.
    """

    kind: type
    omitted: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    positional: str | None = None
    section: str = "options"


@dataclass(frozen=True)
class _Given:
    """A value, and how it was asked for."""

    option: Option
    value: Any
    spelled: str


class ParsedOptions:
    """The configurations that one command line asks for.

    Attributes:
        given: field -> how the option was written, for those that were given.
    """

    def __init__(self, parser: argparse.ArgumentParser, built: Mapping[type, Any], given: Mapping[str, str]) -> None:
        self._parser = parser
        self._built = built
        self.given = given

    def of[T](self, kind: type[T]) -> T:
        """The configuration of this class."""
        return cast("T", self._built[kind])

    def refuse(self, message: str, field_name: str | None = None) -> NoReturn:
        """Prints what is wrong, with the option as it was written, and exits with 2."""
        if field_name is not None:
            message = f"argument {self.given.get(field_name, option_name(field_name))}: {message}"
        self._parser.error(message)


class CommandLine:
    """The options of one command.

    Unknown, contradictory and refused options end the process with exit code 2, after the usage and one line that
    names the option, the value and what is allowed.
    """

    def __init__(self, prog: str, description: str, *configurations: Configuration) -> None:
        self._configurations = configurations
        self._options = [
            option
            for configuration in configurations
            for option in options_of(
                configuration.kind, configuration.defaults, configuration.omitted, configuration.section
            )
        ]
        self._by_name = {name: option for option in self._options for name in option.all_names}
        if len(self._by_name) != sum(len(option.all_names) for option in self._options):
            raise TypeError("two options have the same name")
        positionals = [item.positional for item in configurations if item.positional is not None]
        self._positional = next((option for option in self._options if option.field in positionals), None)
        self._parser = self._make_parser(prog, description)

    def _make_parser(self, prog: str, description: str) -> argparse.ArgumentParser:
        words = f" [{self._positional.field.upper()}]" if self._positional else ""
        parser = argparse.ArgumentParser(
            prog=prog, description=description, usage=f"{prog} [options]{words}", allow_abbrev=False
        )
        parser.add_argument(
            _CONFIG,
            metavar="FILE.yaml",
            action=_Record,
            help="take options from a YAML file, by their names without the dashes in front; what the command line "
            "says wins",
        )
        groups: dict[str, Any] = {}
        for option in self._options:
            if option.section not in groups:
                groups[option.section] = parser.add_argument_group(option.section)
            _add(groups[option.section], option)
        return parser

    def parse(self, argv: Sequence[str] | None = None) -> ParsedOptions:
        """Reads the arguments (default: the process's own)."""
        try:
            given = self._given(list(sys.argv[1:] if argv is None else argv))
            self._check_required(given)
            return ParsedOptions(
                self._parser,
                {item.kind: self._build(item, given) for item in self._configurations},
                {name: item.spelled for name, item in given.items()},
            )
        except OptionError as error:
            self._parser.error(str(error))

    def _given(self, argv: list[str]) -> dict[str, _Given]:
        end = argv.index("--") if "--" in argv else len(argv)
        words = [_with_dashes(word) for word in argv[:end]]
        _check_refused(words)
        namespace = argparse.Namespace(recorded=[])
        _, rest = self._parser.parse_known_args(words, namespace)
        files = {value for name, value in namespace.recorded if name == _CONFIG}
        if len(files) > 1:
            raise OptionError(f"{_CONFIG} is given twice: {', '.join(sorted(files))}")
        from_file = _merged(self._in_file(path) for path in files)
        spelled = [(name, value) for name, value in namespace.recorded if name != _CONFIG]
        on_line = [self._read(self._by_name[name.removeprefix("--")], name, value) for name, value in spelled]
        from_line = _merged([on_line, self._positionals(rest, argv[end + 1 :], on_line)])
        pairs = [(item.field, item.alternative_to) for item in self._options if item.alternative_to is not None]
        for pair in pairs:
            _check_alternatives(pair, from_file)
            _check_alternatives(pair, from_line)
            if any(name in from_line for name in pair):
                from_file = {name: item for name, item in from_file.items() if name not in pair}
        return from_file | from_line

    def _read(self, option: Option, name: str, text: str) -> _Given:
        """An option on the command line; without a name it is the positional."""
        spelled = name or option.field.upper()
        if option.kind.is_switch:
            return _given(option, spelled, True)
        try:
            value = option.kind.parse(text)
        except OptionError as error:
            raise OptionError(f"argument {spelled}: {error}") from None
        return _given(option, spelled, (value,) if option.kind.is_list else value)

    def _positionals(self, words: list[str], literal: list[str], named: list[_Given]) -> list[_Given]:
        for word in words:
            if word.startswith("-") and word != "-":
                raise OptionError(_unknown(word.partition("=")[0], (f"--{name}" for name in self._by_name)))
        found = [*words, *literal]
        limit = 0 if self._positional is None else 1
        if len(found) > limit:
            raise OptionError(f"unexpected argument {found[limit]!r}")
        given = [] if self._positional is None else [self._read(self._positional, "", word) for word in found]
        for item, other in itertools.product(given, named):
            if item.option is other.option and item.value != other.value:
                raise OptionError(f"unexpected argument {found[0]!r}: {other.spelled} is given already")
        return given

    def _in_file(self, path: str) -> Iterator[_Given]:
        for key, value in read_config_file(path).items():
            name = key.replace("_", "-")
            if reason := REFUSED.get("--" + name):
                raise OptionError(f"{key} in {path}: not supported: {reason}")
            if name not in self._by_name:
                raise OptionError(f"{path}: {_unknown(key, self._by_name)}")
            option = self._by_name[name]
            try:
                parsed = parse_value(value, option.kind)
            except OptionError as error:
                raise OptionError(f"{key} in {path}: {error}") from None
            yield _given(option, f"{key} in {path}", parsed, name)

    def _check_required(self, given: Mapping[str, _Given]) -> None:
        missing = [option_name(item.field) for item in self._options if item.is_required and item.field not in given]
        if missing:
            raise OptionError(f"the following arguments are required: {', '.join(missing)}")

    def _build(self, configuration: Configuration, given: Mapping[str, _Given]) -> Any:
        names = [item.name for item in fields(configuration.kind)]
        values = {name: given[name].value for name in names if name in given}
        try:
            return configuration.kind(**{**configuration.defaults, **values})
        except (ConfigError, InvalidRequest) as error:
            name = error.field if isinstance(error, ConfigError) else error.parameter
            if name is None:
                raise OptionError(str(error)) from None
            spelled = given[name].spelled if name in given else option_name(name)
            raise OptionError(f"argument {spelled}: {error}") from None


class _Record(argparse.Action):
    """Keeps what was written, in order, so that contradictions are seen."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del parser
        namespace.recorded.append((option_string, values))


def _add(group: Any, option: Option) -> None:
    shape: dict[str, Any] = {"action": _Record, "dest": option.field, "default": argparse.SUPPRESS}
    own, hidden = list(option.names), list(option.near_names)
    if option.kind.is_switch:
        shape["nargs"] = 0
        own.append(option.opposites[0])
        hidden += option.opposites[1:]
    else:
        shape["metavar"] = option.kind.placeholder
    repeated = "; may be repeated" if option.kind.is_list else ""
    text = (option.help + repeated).replace("%", "%%")
    group.add_argument(*(f"--{name}" for name in own), help=text, **shape)
    if hidden:
        group.add_argument(*(f"--{name}" for name in hidden), help=argparse.SUPPRESS, **shape)


def _given(option: Option, spelled: str, value: Any, name: str | None = None) -> _Given:
    name = name or spelled.removeprefix("--")
    if name in option.near_names:
        print(
            f"note: {spelled} is taken as {option_name(option.field)}: {option.near_names[name]}",
            file=sys.stderr,
            flush=True,
        )
    return _Given(option, not value if name in option.opposites else value, spelled)


def _merged(sources: Iterable[Iterable[_Given]]) -> dict[str, _Given]:
    """One value per field. Raises `OptionError` for two that differ; lists are joined."""
    merged: dict[str, _Given] = {}
    for item in (item for source in sources for item in source):
        before = merged.setdefault(item.option.field, item)
        if before is item:
            continue
        if item.option.kind.is_list:
            merged[item.option.field] = _Given(item.option, before.value + item.value, item.spelled)
        elif before.value != item.value:
            raise OptionError(f"{before.spelled} and {item.spelled} contradict each other")
    return merged


def _check_alternatives(pair: tuple[str, str], given: Mapping[str, _Given]) -> None:
    first, second = (given.get(name) for name in pair)
    if first is not None and second is not None:
        raise OptionError(f"{first.spelled} has no effect beside {second.spelled}; give one of them")


def _with_dashes(word: str) -> str:
    """`--max_model_len=5` -> `--max-model-len=5`, as vLLM has it."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _check_refused(words: Iterable[str]) -> None:
    for word in words:
        name = word.partition("=")[0]
        if name in REFUSED:
            raise OptionError(f"argument {name}: not supported: {REFUSED[name]}")


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), list(known), 1, _NEAREST)
    return f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "")
