"""Which fields may differ between a run and its continuation, between runs that are compared, and around the same weights."""

from collections.abc import Collection, Mapping
from typing import Any

from xsa_jax.config.fields import fields
from xsa_jax.config.load import flatten, to_dict
from xsa_jax.config.schema import Config
from xsa_jax.errors import ConfigError


def check_continues(stored: Config, config: Config, run: str) -> None:
    """Refuses to continue a run under a config that would make it another experiment.

    Args:
      stored: the config that the run began with.
      config: what is asked for now.
      run: how the message names the run.

    Raises:
      ConfigError: it names each field that differs, with both values.
    """
    fixed = [name for name, field in fields(type(config)).items() if not field.about.may_change]
    changed = _named(differences(to_dict(stored), to_dict(config), fixed))
    if changed:
        raise ConfigError(f"{run} was started with another config: {changed}. Use its values, or another --workdir")


def check_same_weights(stored: Config, config: Config, run: str) -> None:
    """Refuses to put a run's weights into another model: nothing in the weights shows whether they were trained with XSA.

    Raises:
      ConfigError: it names each field that differs, with both values.
    """
    decisive = [
        name
        for name, field in fields(type(config)).items()
        if name.startswith(("model.", "attention.")) and not field.about.keeps_weights
    ]
    changed = _named(differences(to_dict(stored), to_dict(config), decisive))
    if changed:
        raise ConfigError(f"{run} holds the weights of another model: {changed}. Build the model from the run's own config")


def fixed_in_comparisons(allowed: Collection[str] = (), schema: type[Config] = Config) -> list[str]:
    """Fields in which runs that are compared must agree.

    Args:
      allowed: fields, or groups of them, that may differ all the same.
      schema: the schema of the runs.
    """
    return [
        name
        for name, field in fields(schema).items()
        if not field.about.may_differ and not any(name == part or name.startswith(part.rstrip(".") + ".") for part in allowed)
    ]


def differences(first: Mapping[str, Any], second: Mapping[str, Any], names: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Those of the named fields that two nested dicts do not share, sorted by name, with both values."""
    a, b = dict(flatten(first)), dict(flatten(second))
    return {name: (a[name], b[name]) for name in sorted(names) if a[name] != b[name]}


def _named(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name} (run: {before!r}, now: {now!r})" for name, (before, now) in changed.items())
