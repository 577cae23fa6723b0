"""Configs as runs store them, and how the configs of older versions are read.

A stored config holds every field and, under "version", the version of xsa_jax that wrote it; runs from before 0.2.0 have no
"version". A field that the stored config lacks was added later: it takes the value `before` of its declaration, which is what the
run did when the field was not there yet.
"""

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from xsa_jax.config.fields import Field, fields
from xsa_jax.config.load import flatten, from_config_dict, to_dict
from xsa_jax.config.schema import ALWAYS_STORED, Config
from xsa_jax.errors import ConfigError

_BEFORE_VERSIONS = "before 0.2.0"


def version() -> str:
    """The version of xsa_jax at work; "unknown" where it is used without being installed."""
    try:
        return metadata.version("xsa_jax")
    except metadata.PackageNotFoundError:
        return "unknown"


def to_stored(config: Config) -> dict[str, Any]:
    """The nested dict that a run stores, with the version that wrote it."""
    return {"version": version(), **to_dict(config)}


def from_stored(stored: Any, where: str, schema: type[Config] = Config) -> Config:
    """The config of a run, whichever version stored it.

    Args:
      stored: what `to_stored` returned, or the nested dict of an older version.
      where: how messages name the file or run that it comes from.
      schema: the dataclass to build.

    Raises:
      ConfigError: it names a field that this version does not know, one that is missing, or a value that is impossible.
    """
    if not isinstance(stored, Mapping):
        raise ConfigError(f"{where}: expected a stored config, found {stored!r:.60}; restore the file")
    known = fields(schema)
    found = dict(flatten({name: value for name, value in stored.items() if name != "version"}))
    unknown = [name for name in found if name not in known]
    if unknown:
        raise ConfigError(
            f"{where}: unknown field {', '.join(unknown)}: it was written by version {stored.get('version', _BEFORE_VERSIONS)} of "
            f"xsa_jax, and this is {version()}. Use that version or a newer one"
        )
    values = {name: found[name] if name in found else _before(field, where) for name, field in known.items()}
    try:
        return from_config_dict(_nested(values), schema)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _before(field: Field, where: str) -> Any:
    if field.about.before is ALWAYS_STORED:
        raise ConfigError(f"{where}: {field.name} is missing, and every version of xsa_jax has stored it; restore the file")
    return field.about.before


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split(".")
        node = tree
        for part in groups:
            node = node.setdefault(part, {})
        node[last] = value
    return tree
