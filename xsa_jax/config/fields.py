"""The declared fields of a config as one flat dict."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, Literal

from xsa_jax.config.schema import About, Config


@dataclasses.dataclass(frozen=True)
class Field:
    """One declared field of a config.

    Attributes:
      name: dotted name, such as "attention.xsa.alpha".
      type: int, float, bool or str.
      default: value of the field where a config file sets none.
      choices: allowed values; empty where any value of the type is allowed.
      about: the remaining properties of the field.
    """

    name: str
    type: type
    default: Any
    choices: tuple[Any, ...]
    about: About


def fields(schema: type[Config] = Config) -> dict[str, Field]:
    """All fields of a schema by dotted name, in the order of declaration."""
    return {found.name: found for found in _walk(schema, "")}


def _walk(cls: type, prefix: str) -> Iterator[Field]:
    hints = typing.get_type_hints(cls)
    for declared in dataclasses.fields(cls):
        name, hint = prefix + declared.name, hints[declared.name]
        if dataclasses.is_dataclass(hint):
            yield from _walk(typing.cast(type, hint), f"{name}.")
            continue
        about: About = declared.metadata["about"]
        choices = tuple(about.choices)
        if typing.get_origin(hint) is Literal:
            choices = typing.get_args(hint)
            hint = type(choices[0])
        yield Field(name, hint, declared.default, choices, about)
