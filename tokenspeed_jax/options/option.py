"""`Option`: one field of a configuration, as it is offered on a command line and in a configuration file."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, get_type_hints

from tokenspeed_jax.options.values import ValueKind

_ATTRIBUTE = re.compile(r"    (\w+(?:, \w+)*): (.*)")
_CONTINUED = re.compile(r" {6,}(.*)")


def option_name(field_name: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + field_name.replace("_", "-")


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        field: the name of the dataclass's field.
        help: with default and further names.
        section: heading in the help.
        is_required: has no default.
        names: the field's own name and those that mean the same, without dashes in front.
        near_names: names that mean nearly the same, and what differs.
        opposites: names that turn the switch off.
        alternative_to: a field beside which this one has no effect.
    """

    field: str
    kind: ValueKind
    help: str
    section: str
    is_required: bool
    names: tuple[str, ...]
    near_names: Mapping[str, str]
    opposites: tuple[str, ...]
    alternative_to: str | None

    @property
    def all_names(self) -> tuple[str, ...]:
        """Every name under which the option is known."""
        return (*self.names, *self.near_names, *self.opposites)


def options_of(
    configuration: type, defaults: Mapping[str, Any], omitted: frozenset[str], section: str
) -> Iterator[Option]:
    """The options of a dataclass in the order of its fields.

    Args:
        defaults: defaults in place of the dataclass's own.
        omitted: fields that are not offered.
        section: heading of fields before the first one that begins a section.

    Raises:
        TypeError: a field has no help, or a type that no option can have.
    """
    hints = get_type_hints(configuration)
    described = _attributes(configuration)
    for item in fields(configuration):
        about = item.metadata
        section = about.get("section") or section
        if item.name in omitted:
            continue
        text = about.get("help") or described.get(item.name)
        if text is None:
            raise TypeError(f"{configuration.__name__}.{item.name} has no help")
        kind = ValueKind.of(hints[item.name], about.get("spellings", {}))
        opposites = tuple(map(_dashed, about.get("opposites", ())))
        if kind.is_switch:
            opposites = ("no-" + _dashed(item.name), *opposites)
        near = {_dashed(name): note for name, note in about.get("near_aliases", {}).items()}
        yield Option(
            field=item.name,
            kind=kind,
            help=text + _default_text(item, defaults) + _further_names(near, opposites[1:]),
            section=section,
            is_required=item.default is MISSING and item.default_factory is MISSING and item.name not in defaults,
            names=tuple(map(_dashed, (item.name, *about.get("aliases", ())))),
            near_names=near,
            opposites=opposites,
            alternative_to=about.get("alternative_to"),
        )


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _default_text(item: Field, defaults: Mapping[str, Any]) -> str:
    default = defaults.get(item.name, item.default)
    return "" if default is MISSING or default is None or default == () else f" (default: {default})"


def _further_names(near: Mapping[str, str], opposites: tuple[str, ...]) -> str:
    text = "".join(f"; --{name} is nearly the same" for name in near)
    return text + "".join(f"; --{name} turns it off" for name in opposites)


def _attributes(configuration: type) -> dict[str, str]:
    """What the class's docstring says of its attributes, for fields without a help of their own."""
    lines = inspect.getdoc(configuration) or ""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines.partition("Attributes:\n")[2].splitlines():
        if match := _ATTRIBUTE.fullmatch(line):
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2])
        elif names and (match := _CONTINUED.fullmatch(line)):
            found |= {name: f"{found[name]} {match[1]}" for name in names}
        else:
            names = []
    return {name: text.rstrip(".") for name, text in found.items()}
