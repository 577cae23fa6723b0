"""Trains one model: python train.py --config configs/paper.py:0p7b --workdir runs/x [--config.attention.kind=xsa ...]

Run the same command again to continue after any kind of stop.
"""

import pathlib
import sys

from absl import app, flags
from ml_collections import config_flags

from xsa_jax.config import from_config_dict, table
from xsa_jax.errors import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/; --config.a.b=c sets a field of it.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: config, metrics, checkpoints.")
PRINT_CONFIG = flags.DEFINE_bool("print_config", False, "Print every field of the config, and train nothing.")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; fields are set as --config.a.b=c")
    try:
        config = from_config_dict(CONFIG.value)
        if PRINT_CONFIG.value:
            print(table.text(config))
            return
        if WORKDIR.value is None:
            raise UserError("--workdir: not given; name the folder of the run")
        from xsa_jax.train.actions import log, save, validate  # after the config is known to be good: this brings up jax
        from xsa_jax.train.loop import train

        train(config, pathlib.Path(WORKDIR.value), (log, validate, save))
    except UserError as error:
        sys.exit(f"error: {error}")


def parse_flags(argv: list[str]) -> list[str]:
    """Absl's parser, with one line in place of a traceback for a config file or field that does not exist."""
    try:
        rest = flags.FLAGS([argv[0], "--verbosity=-1", *argv[1:]])  # the libraries log every file they touch
        CONFIG.value.keys()  # a config file that cannot be read says so only when it is used
        return rest
    except (AttributeError, KeyError) as error:  # ml_collections names only the unknown part of --config.a.b
        cause = error.args[0]
        reason = " ".join(str(cause.args[0] if isinstance(cause, KeyError) else cause).split())
        given = [arg for arg in argv if arg.startswith("--config.") and any(f"'{part}'" in reason for part in _parts(arg))]
        sys.exit(f"error: {given[0] if given else '--config'}: unknown field: {reason}")
    except flags.Error as error:  # a config file that fails is quoted with its traceback, whose last line says why
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        traced = any(line.startswith("Traceback") for line in lines)
        sys.exit(f"error: {lines[0]} {lines[-1]}" if traced else f"error: {' '.join(lines)}")
    except (OSError, UserError) as error:
        sys.exit(f"error: --config: {' '.join(str(error).split())}")


def _parts(override: str) -> list[str]:
    return override.split("=")[0].split(".")[1:]


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
