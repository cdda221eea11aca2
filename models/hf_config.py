"""Reading a Hugging Face `config.json`: typed fields, and refusals that name field, value and what is served."""

from collections.abc import Mapping
from typing import Any, Final

FULL_ATTENTION: Final = "full_attention"
SLIDING_ATTENTION: Final = "sliding_attention"
LINEAR_ATTENTION: Final = "linear_attention"


class UnsupportedConfig(ValueError):
    """A field of `config.json` is missing, malformed, or asks for something that is not implemented."""


class Required:
    """The type of `REQUIRED`."""


REQUIRED: Final = Required()  # as a default: the field must be there


class HfConfig:
    """Typed access to a parsed `config.json`.

    A field that is absent takes the default given, which is the one of the family's own Hugging Face class; a field
    that is `null` counts as absent unless the reader is one of the optional ones. Every error is an
    `UnsupportedConfig` that names the field.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def _value(self, field: str, default: Any) -> Any:
        value = self.fields.get(field)
        if value is not None:
            return value
        if isinstance(default, Required):
            raise UnsupportedConfig(f"config.json has no {field}")
        return default

    def integer(self, field: str, default: int | Required = REQUIRED) -> int:
        """A positive integer."""
        value = self._value(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UnsupportedConfig(f"config.json: {field} must be a positive integer, got {value!r}")
        return value

    def count(self, field: str, default: int | Required = REQUIRED) -> int:
        """An integer that may be 0."""
        return 0 if self._value(field, default) == 0 else self.integer(field, default)

    def number(self, field: str, default: float | Required = REQUIRED) -> float:
        """A positive number."""
        return positive_number(self._value(field, default), field)

    def optional_number(self, field: str) -> float | None:
        """A positive number, or None when the field is absent or null."""
        return None if self.fields.get(field) is None else self.number(field)

    def optional_integer(self, field: str, default: int | None = None) -> int | None:
        """A positive integer; None when the field is null, `default` when it is absent."""
        if field not in self.fields:
            return default
        return None if self.fields[field] is None else self.integer(field)

    def flag(self, field: str, default: bool) -> bool:
        """A boolean."""
        value = self._value(field, default)
        if not isinstance(value, bool):
            raise UnsupportedConfig(f"config.json: {field} must be true or false, got {value!r}")
        return value

    def refuse_unless(self, field: str, default: Any, *served: Any) -> None:
        """Raises when the field (or its default) is not one of the `served` values."""
        value = self._value(field, default)
        if value not in served:
            raise UnsupportedConfig(
                f"config.json: {field} = {value!r} is not supported (served: {', '.join(map(repr, served))})"
            )

    def layer_types(
        self,
        num_layers: int,
        default: tuple[str, ...],
        served: tuple[str, ...] = (FULL_ATTENTION, SLIDING_ATTENTION),
    ) -> tuple[str, ...]:
        """One of `served` for each layer."""
        types = tuple(self._value("layer_types", default))
        if len(types) != num_layers:
            raise UnsupportedConfig(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
        for kind in types:
            if kind not in served:
                raise UnsupportedConfig(f"config.json: layer_types has {kind!r} (served: {', '.join(served)})")
        return types


def positive_number(value: Any, field: str) -> float:
    """`value` as a float; raises `UnsupportedConfig` naming `field` when it is not a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UnsupportedConfig(f"config.json: {field} must be a positive number, got {value!r}")
    return float(value)
