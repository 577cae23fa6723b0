"""Conversion between nested dicts, which files hold, and validated dataclasses, which the program reads."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from xsa_jax.config.check import check
from xsa_jax.config.fields import Field, fields
from xsa_jax.config.schema import Config
from xsa_jax.errors import ConfigError

if TYPE_CHECKING:
    from ml_collections import ConfigDict


def config_dict(schema: type[Config] = Config) -> "ConfigDict":
    """A ConfigDict with the default of every field, for a config file to change."""
    from ml_collections import ConfigDict  # only config files need it, and some machines lack it

    return ConfigDict(dataclasses.asdict(schema()))


def from_config_dict(tree: Mapping[str, Any], schema: type[Config] = Config) -> Config:
    """Builds and validates a config.

    Args:
      tree: a ConfigDict or a nested dict with every field.
      schema: the dataclass to build.

    Raises:
      ConfigError: a field is unknown, missing, of the wrong type or invalid. The message names the field, its value and what is
        expected.
    """
    config = _build(schema, tree, "", fields(schema))
    check(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """A config as a nested dict of plain values, which JSON can hold and `from_config_dict` accepts."""
    return dataclasses.asdict(config)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted field name, value) for each value of a nested dict, in its order."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _build(cls: type, tree: Mapping[str, Any], prefix: str, known: Mapping[str, Field]) -> Any:
    if not hasattr(tree, "items"):  # a ConfigDict is no Mapping
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: expected a group of fields, found {tree!r}")
    hints = typing.get_type_hints(cls)
    given = dict(tree.items())
    for name in given:
        if name not in hints:
            raise ConfigError(f"{prefix}{name}: unknown field; known here: {', '.join(hints)}")
    for name in hints:
        if name not in given:
            raise ConfigError(f"{prefix}{name}: missing")
    values = {}
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            values[name] = _build(typing.cast(type, hint), given[name], f"{prefix}{name}.", known)
        else:
            values[name] = _checked_value(known[prefix + name], given[name])
    return cls(**values)


def _checked_value(field: Field, value: Any) -> Any:
    if field.choices:
        if value not in field.choices or type(value) is not field.type:
            raise ConfigError(f"{field.name}={value!r}: expected one of {', '.join(map(repr, field.choices))}")
        return value
    if field.type is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not field.type:
        raise ConfigError(f"{field.name}={value!r}: expected {field.type.__name__}, found {type(value).__name__}")
    return value
