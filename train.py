"""Trains one model: python train.py --config configs/paper.py:0p7b --workdir runs/x [--config.attention.kind=xsa ...]

Run the same command again to continue after any kind of stop. Exit status: 0 = the run is complete; 75 = it stopped politely before
its last step, by a signal or --max_hours, and can go on; anything else is an error.

Several processes train one run where each is started with the same command on a TPU pod, by Slurm's srun or by OpenMPI's mpirun.
Elsewhere each also gets --coordinator, --num_processes and --process_id.
"""

import functools
import pathlib
import sys

from absl import app, flags
from ml_collections import config_flags

from xsa_jax.config import command_line, from_config_dict, table
from xsa_jax.errors import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, such as configs/demo.py; --config.a.b=c sets a field.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: config, metrics, checkpoints.")
PRINT_CONFIG = flags.DEFINE_bool("print_config", False, "Print every field of the config, and exit without training.")
MAX_HOURS = flags.DEFINE_float("max_hours", None, "Time after which the run saves and stops.", lower_bound=0.0)
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, where jax detects no cluster.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes; 1 turns the detection off.", lower_bound=1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Index of this process, from 0.", lower_bound=0)
flags.mark_flag_as_required("config")

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: "try again later"


def main(argv: list[str]) -> None:
    """Trains the run that the flags describe, or prints its config."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; fields are set as --config.a.b=c")
    try:
        if PRINT_CONFIG.value:
            print(table.text(from_config_dict(CONFIG.value)))
            return
        if WORKDIR.value is None:
            raise UserError("--workdir: not given; name the folder of the run")
        stopped = run(pathlib.Path(WORKDIR.value))
    except UserError as error:
        sys.exit(f"error: {error}")
    if stopped:
        sys.exit(STOPPED)


def run(workdir: pathlib.Path) -> str | None:
    """Joins the other processes, and trains. Returns the reason of a stop before the last step."""
    from xsa_jax.parallel import distributed  # imported once the flags are valid: these imports take seconds
    from xsa_jax.parallel.lifeline import Lifeline
    from xsa_jax.parallel.process import prepare_process

    prepare_process()
    distributed.start(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
    with Lifeline() as lifeline:
        distributed.only_first_prints()
        config = from_config_dict(CONFIG.value)  # within the lifeline, so that an invalid config of one process ends all
        from xsa_jax.train.actions import log, save, validate
        from xsa_jax.train.loop import train

        return train(config, workdir, (log, validate, save), lifeline, MAX_HOURS.value)


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(command_line.parse, CONFIG))
