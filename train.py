"""Trains one model: python train.py --config configs/paper.py:0p7b --workdir runs/x [--config.attention.kind=xsa ...]

Run the same command again to continue after any kind of stop.
"""

import pathlib
import sys

from absl import app, flags
from ml_collections import config_flags

from xsa_jax.config import from_config_dict, table
from xsa_jax.errors import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, such as configs/demo.py; --config.a.b=c sets a field.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: config, metrics, checkpoints.")
PRINT_CONFIG = flags.DEFINE_bool("print_config", False, "Print every field of the config, and exit without training.")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    """Trains the run that the flags describe, or prints its config."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; fields are set as --config.a.b=c")
    try:
        config = from_config_dict(CONFIG.value)
        if PRINT_CONFIG.value:
            print(table.text(config))
            return
        if WORKDIR.value is None:
            raise UserError("--workdir: not given; name the folder of the run")
        from xsa_jax.parallel.process import prepare_process  # imported once the config is valid: this starts jax
        from xsa_jax.train.actions import log, save, validate
        from xsa_jax.train.loop import train

        prepare_process()
        train(config, pathlib.Path(WORKDIR.value), (log, validate, save))
    except UserError as error:
        sys.exit(f"error: {error}")


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the flags by absl. An unusable config file or field ends the program with one line, not with a traceback."""
    try:
        rest = flags.FLAGS([argv[0], "--verbosity=-1", *argv[1:]])  # no info lines: libraries log every file that they use
        CONFIG.value.keys()  # ml_collections raises at the first use of a config file that it cannot read
        return rest
    except (AttributeError, KeyError) as error:  # ml_collections names only the unknown part of --config.a.b
        cause = error.args[0]
        reason = " ".join(str(cause.args[0] if isinstance(cause, KeyError) else cause).split())
        given = [arg for arg in argv if arg.startswith("--config.") and any(f"'{part}'" in reason for part in _field_parts(arg))]
        sys.exit(f"error: {given[0] if given else '--config'}: unknown field: {reason}")
    except flags.Error as error:  # the error of a failing config file holds its traceback, whose last line gives the reason
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        has_traceback = any(line.startswith("Traceback") for line in lines)
        sys.exit(f"error: {lines[0]} {lines[-1]}" if has_traceback else f"error: {' '.join(lines)}")
    except (OSError, UserError) as error:
        sys.exit(f"error: --config: {' '.join(str(error).split())}")


def _field_parts(override: str) -> list[str]:
    return override.split("=")[0].split(".")[1:]


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
