"""Plans a run on devices that are not here.

    python -m xsa_jax.plan --config configs/paper.py:2p7b --topology v5e:16x16 --mesh data=16,fsdp=16
    python -m xsa_jax.plan --config configs/paper.py:2p7b --topology v5e:16x16 --search

It compiles the real train step for the topology, and prints what a device needs and what a step is predicted to take. `make plan`
runs it with the compilers installed. Exit status 1: the run cannot be planned, for a reason that is printed.
"""

import functools
import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"  # jax must not look for the devices that this machine has

from absl import app, flags
from ml_collections import config_flags

from xsa_jax.config import command_line, from_config_dict
from xsa_jax.errors import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, such as configs/paper.py:2p7b; --config.a.b=c sets a field.")
TOPOLOGY = flags.DEFINE_string("topology", None, "TPU slice such as v5e:16x16, or GPUs of one host such as h200:8.")
MESH = flags.DEFINE_list("mesh", [], "Sizes of mesh axes, such as data=16,fsdp=16; short for --config.mesh.data=16 and so on.")
SEARCH = flags.DEFINE_bool("search", False, "Plan ten combinations of mesh and remat that may fit, and rank them.")
JSON = flags.DEFINE_string("json", None, "File to write the plan to, as JSON.")
flags.mark_flags_as_required(["config", "topology"])


def main(argv: list[str]) -> None:
    """Plans the run that the flags describe."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; fields are set as --config.a.b=c")
    try:
        for item in MESH.value:
            axis, _, size = item.partition("=")
            if axis not in ("data", "fsdp", "tensor") or not size.isdecimal():
                raise UserError(f"--mesh: found {item!r}, expected sizes such as data=16,fsdp=16,tensor=1")
            CONFIG.value.mesh[axis] = int(size)
        config, topology = from_config_dict(CONFIG.value), str(TOPOLOGY.value)
        from xsa_jax.plan.predict import plan  # imported once the flags are valid
        from xsa_jax.plan.report import report
        from xsa_jax.plan.search import search

        if SEARCH.value:
            if MESH.value:
                raise UserError("--search chooses data and fsdp itself; leave --mesh out, or set --config.mesh.tensor")
            print(search(config, topology, sys.argv[1:]))
            return
        found = plan(config, topology)
    except UserError as error:
        sys.exit(f"error: {error}")
    if JSON.value:
        with open(JSON.value, "w") as file:
            json.dump(found.as_dict(), file, indent=1)
    print(report(found))


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(command_line.parse, CONFIG))
