"""The declarations of `schema` as a flat list, for everything that is derived from them."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, Literal

from xsa_jax.config.schema import About, Config


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a config.

    Attributes:
      name: dotted name, such as "attention.xsa.alpha".
      type: int, float, bool or str.
      default: the value that a run has unless it says otherwise.
      choices: the allowed values; empty where any value of the type will do.
      about: the rest of its declaration.
    """

    name: str
    type: type
    default: Any
    choices: tuple[Any, ...]
    about: About


def fields(schema: type[Config] = Config) -> dict[str, Field]:
    """Every field of a schema by dotted name, in the order of declaration."""
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
