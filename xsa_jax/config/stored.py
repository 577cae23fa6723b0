"""The format of stored configs, and the upgrade of those that older versions stored.

A stored config holds every field and, under "version", the version of xsa_jax that wrote it. Versions before 0.2.0 stored no
"version". A field that is missing from a stored config was added later. It takes the value `before` of its declaration, which
describes the behaviour of versions without the field.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from xsa_jax import __version__
from xsa_jax.config.fields import Field, fields
from xsa_jax.config.load import from_config_dict, to_dict
from xsa_jax.config.schema import ALWAYS_STORED, Config
from xsa_jax.errors import ConfigError

_BEFORE_VERSIONS = "before 0.2.0"
# Fields that are gone -> what to set today, for people whose commands still name them.
REPLACED = {"train.loss_chunk": "train.loss_chunk_tokens, which counts tokens of a device: positions times its rows"}


def to_stored(config: Config) -> dict[str, Any]:
    """The nested dict that a run stores: the config, and the version of xsa_jax under "version"."""
    return {"version": __version__, **to_dict(config)}


def digest(config: Config) -> str:
    """A hash of all values of a config, as hexadecimal digits; equal configs have equal digests, whatever version stored them."""
    return hashlib.blake2b(json.dumps(to_dict(config), sort_keys=True).encode(), digest_size=16).hexdigest()


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
    groups = {name[: end.start()] for name in known for end in re.finditer(r"\.", name)}
    found = _flat({name: value for name, value in stored.items() if name != "version"}, groups, where)
    _replace_old_fields(found)
    unknown = [name for name in found if name not in known]
    if unknown:
        wrote = stored.get("version", _BEFORE_VERSIONS)
        advice = "The file was edited: remove the field" if wrote == __version__ else "Use that version or a newer one"
        raise ConfigError(
            f"{where}: unknown field {', '.join(unknown)}: version {wrote} of xsa_jax wrote it, and this is {__version__}. {advice}"
        )
    values = {name: found[name] if name in found else _value_before(field, where) for name, field in known.items()}
    try:
        return from_config_dict(_nested(values), schema)
    except ConfigError as error:
        wrote = stored.get("version", _BEFORE_VERSIONS)
        newer = "" if wrote in (__version__, _BEFORE_VERSIONS) else f" (version {wrote} of xsa_jax wrote it, this is {__version__})"
        raise ConfigError(f"{where}: {error}{newer}") from None


def _flat(tree: Mapping[str, Any], groups: Collection[str], where: str, prefix: str = "") -> dict[str, Any]:
    """The stored values by dotted name. Only known groups are entered, so that no unknown one is lost."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + key
        if name in groups and "." not in key:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {name}: expected a group of fields, found {value!r:.60}; restore the file")
            found |= _flat(value, groups, where, f"{name}.")
        elif "." in key:
            raise ConfigError(f"{where}: {name}: expected no '.' in the name of a field or group; restore the file")
        else:
            found[name] = value
    return found


def _replace_old_fields(found: dict[str, Any]) -> None:
    """Puts the fields of today in the place of those that they replaced, for values that an older version stored."""
    names = ("train.loss_chunk", "data.batch_size", "mesh.data", "mesh.fsdp")
    sizes: list[int] = [found[name] for name in names if isinstance(found.get(name), int)]
    if len(sizes) == len(names):
        # It counted positions of each row. Where the mesh took its size from the devices, one device is supposed.
        chunk, rows, data, fsdp = sizes
        del found["train.loss_chunk"]
        found["train.loss_chunk_tokens"] = chunk * max(1, rows // (max(1, data) * max(1, fsdp)))


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
