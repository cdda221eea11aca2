"""`--config FILE.yaml`: a mapping from option names to values."""

from pathlib import Path
from typing import Any

import yaml

from tokenspeed_jax.options.values import OptionError, ValueKind


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is there twice; YAML's own loader lets the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_config_file(path: str) -> dict[str, Any]:
    """The file's keys and values as YAML has them; an empty file has none.

    Raises:
        OptionError: the file cannot be read, is no YAML, or holds something other than a mapping from texts.
    """
    try:
        # A subclass of SafeLoader builds plain values only.
        value = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeyLoader)
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        # The line itself stays out of the message: it may hold a key.
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise OptionError(f"--config {path}{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        raise OptionError(f"--config {path} is no YAML in UTF-8") from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise OptionError(f"--config {path} must hold a mapping from option names to values")
    return value


def parse_value(value: Any, kind: ValueKind) -> Any:
    """An option's value from what YAML read. Raises `OptionError` for one of another kind."""
    if kind.is_list:
        items = value if isinstance(value, list) else [value]
        return tuple(_parse_scalar(item, kind) for item in items)
    if kind.is_mapping:
        if not isinstance(value, dict):
            raise OptionError(f"must be a mapping, got {value!r}")
        return kind.of_mapping(value)
    return _parse_scalar(value, kind)


def _parse_scalar(value: Any, kind: ValueKind) -> Any:
    if value is None:
        raise OptionError("has no value")
    if kind.is_switch:
        if not isinstance(value, bool):
            raise OptionError(f"must be true or false, got {value!r}")
        return value
    if kind.is_text and not isinstance(value, str):
        raise OptionError("must be text; put the value in quotes")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise OptionError(f"must be one value, got {value!r}")
    return kind.parse(str(value))
