"""The format of stored configs, and the upgrade of those that older versions stored.

A stored config holds every field and, under "version", the version of xsa_jax that wrote it. Versions before 0.2.0 stored no
"version". A field that is missing from a stored config was added later. It takes the value `before` of its declaration, which
describes the behaviour of versions without the field.
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
    """The installed version of xsa_jax; "unknown" where the package is not installed."""
    try:
        return metadata.version("xsa_jax")
    except metadata.PackageNotFoundError:
        return "unknown"


def to_stored(config: Config) -> dict[str, Any]:
    """The nested dict that a run stores: the config, and the version of xsa_jax under "version"."""
    return {"version": version(), **to_dict(config)}


def from_stored(stored: Any, where: str, schema: type[Config] = Config) -> Config:
    """Reads a config that this version or an older one stored.

    Args:
      stored: result of `to_stored`, from this version or an older one.
      where: name of the file or run in error messages.
      schema: the dataclass to build.

    Raises:
      ConfigError: a field is unknown to this version, missing in every version, or invalid. The message names the field.
    """
    if not isinstance(stored, Mapping):
        raise ConfigError(f"{where}: expected a stored config, found {stored!r:.60}; restore the file")
    known = fields(schema)
    found = dict(flatten({name: value for name, value in stored.items() if name != "version"}))
    for name in found:
        if any(other.startswith(f"{name}.") for other in known):
            raise ConfigError(f"{where}: {name}: expected a group of fields, found {found[name]!r:.60}; restore the file")
    unknown = [name for name in found if name not in known]
    if unknown:
        wrote = stored.get("version", _BEFORE_VERSIONS)
        advice = "The file was edited: remove the field" if wrote == version() else "Use that version or a newer one"
        raise ConfigError(
            f"{where}: unknown field {', '.join(unknown)}: version {wrote} of xsa_jax wrote it, and this is {version()}. {advice}"
        )
    values = {name: found[name] if name in found else _value_before(field, where) for name, field in known.items()}
    try:
        return from_config_dict(_nested(values), schema)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _value_before(field: Field, where: str) -> Any:
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
