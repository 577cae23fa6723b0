"""The flags of a command that takes a config: --config configs/x.py, and --config.a.b=c for a field."""

import sys
from typing import Any

from absl import flags

from xsa_jax.config.stored import REPLACED
from xsa_jax.errors import UserError


def parse(config: flags.FlagHolder[Any], argv: list[str]) -> list[str]:
    """Parses the flags by absl, and returns the other arguments. Unusable flags end the program with one line and status 1.

    absl alone would print a traceback for a config file or a field of it that is unusable.

    Args:
      config: what `config_flags.DEFINE_config_file` returned.
      argv: arguments with the name of the program.
    """
    try:
        rest = flags.FLAGS([argv[0], "--verbosity=-1", *argv[1:]])  # no info lines: libraries log every file that they use
        config.value.keys()  # ml_collections raises at the first use of a config file that it cannot read
        return rest
    except (AttributeError, KeyError) as error:  # ml_collections names only the unknown part of --config.a.b
        cause = error.args[0]
        reason = " ".join(str(cause.args[0] if isinstance(cause, KeyError) else cause).split())
        given = [arg for arg in argv if arg.startswith("--config.") and any(f"'{part}'" in reason for part in _field_parts(arg))]
        named = given[0] if given else "--config"
        today = REPLACED.get(named.split("=")[0].removeprefix("--config."))
        sys.exit(f"error: {named}: unknown field: {reason}{f'; set {today}' if today else ''}")
    except flags.Error as error:  # the error of a failing config file holds its traceback, whose last line gives the reason
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        has_traceback = any(line.startswith("Traceback") for line in lines)
        sys.exit(f"error: {lines[0]} {lines[-1]}" if has_traceback else f"error: {' '.join(lines)}")
    except (OSError, UserError) as error:
        sys.exit(f"error: --config: {' '.join(str(error).split())}")


def _field_parts(override: str) -> list[str]:
    return override.split("=")[0].split(".")[1:]
