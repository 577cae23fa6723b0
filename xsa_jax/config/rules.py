"""Rules for two configs: of a run and its continuation, of two runs in a comparison, and of two models that share weights."""

import dataclasses
import difflib
import itertools
from collections.abc import Collection, Mapping
from typing import Any

from xsa_jax.config.fields import fields
from xsa_jax.config.load import flatten, to_dict
from xsa_jax.config.schema import AttentionConfig, Config, ModelConfig
from xsa_jax.errors import ConfigError


def check_continues(stored: Config, config: Config, run: str) -> None:
    """Checks that a config continues the same experiment: only fields declared with `may_change` may differ.

    Args:
      stored: config that the run started with.
      config: config of the continuation.
      run: name of the run in the error message.

    Raises:
      ConfigError: another field differs. The message names each such field, with both values.
    """
    fixed = [name for name, field in fields(type(config)).items() if not field.about.may_change]
    changed = _listed(differences(to_dict(stored), to_dict(config), fixed))
    if changed:
        raise ConfigError(f"{run} was started with another config: {changed}. Use its values, or another --workdir")


def check_same_weights(stored: Config, model: ModelConfig, attention: AttentionConfig, run: str) -> None:
    """Checks that a run's weights may be used in the model of a config.

    The configs decide, because weights do not show whether they were trained with XSA. Fields of `model` and `attention` may
    differ only if they are declared with `keeps_weights`.

    Args:
      stored: config that the weights were trained with.
      model, attention: config of the model that is to use them.
      run: name of the run in the error message.

    Raises:
      ConfigError: another field differs. The message names each such field, with both values.
    """
    fixed = [
        name
        for name, field in fields(type(stored)).items()
        if name.startswith(("model.", "attention.")) and not field.about.keeps_weights
    ]
    now = {"model": dataclasses.asdict(model), "attention": dataclasses.asdict(attention)}
    changed = _listed(differences(to_dict(stored), now, fixed))
    if changed:
        raise ConfigError(f"{run} holds the weights of another model: {changed}. Build the model from the run's own config")


def fixed_in_comparisons(allowed: Collection[str] = (), schema: type[Config] = Config) -> list[str]:
    """Names of the fields that must be equal in all runs of a comparison.

    Args:
      allowed: names of fields or groups that may differ nevertheless.
      schema: config dataclass of the runs.
    """
    return [
        name
        for name, field in fields(schema).items()
        if not field.about.may_differ and not any(name == part or name.startswith(part.rstrip(".") + ".") for part in allowed)
    ]


def check_fields(names: Collection[str], schema: type[Config] = Config) -> None:
    """Refuses names that are neither a field nor a group of fields.

    Raises:
      ConfigError: a name is neither; the message suggests a similar one.
    """
    fields_and_groups = {part for name in fields(schema) for part in itertools.accumulate(name.split("."), "{}.{}".format)}
    for name in names:
        if name.rstrip(".") not in fields_and_groups:
            similar = difflib.get_close_matches(name, sorted(fields_and_groups), 1)
            hint = f"; did you mean {similar[0]}?" if similar else ", such as seed or optim"
            raise ConfigError(f"{name}: expected a config field or a group of fields{hint}")


def differences(first: Mapping[str, Any], second: Mapping[str, Any], names: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """The fields among `names` whose values differ, sorted by name, as {name: (value in first, value in second)}."""
    a, b = dict(flatten(first)), dict(flatten(second))
    return {name: (a[name], b[name]) for name in sorted(names) if a[name] != b[name]}


def _listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name} (run: {before!r}, now: {now!r})" for name, (before, now) in changed.items())
