"""The time from the start of a process to its first train step, phase by phase, for configs/demo.py.

    python benchmarks/startup.py --repeats 5 --out benchmarks/results/cpu_startup.json

Three kinds of start take turns: `nothing kept` compiles and keeps nothing, `first` compiles and keeps the programs in an empty
folder, and `second` finds them there. The table gives the median of each phase in seconds, and the ratio to `nothing kept` as the
median over the turns.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

PHASES = ["python and imports", "assembly", "initial state", "trace of the step", "compilation of the step", "first step"]


def worker(started: float) -> None:
    """Makes one step of the demo, and prints the seconds of each phase as JSON."""
    seconds, last = {}, started

    def done(phase: str) -> None:
        nonlocal last
        now = time.time()
        seconds[phase], last = now - last, now

    import jax
    import numpy as np

    from configs import demo
    from xsa_jax.config import from_config_dict
    from xsa_jax.parallel.mesh import put_batch
    from xsa_jax.parallel.process import prepare_process
    from xsa_jax.train.setup import assemble

    done("python and imports")
    prepare_process()
    config = demo.get_config()
    config.attention.kind = "xsa"
    setup = assemble(from_config_dict(config), jax.devices()[:1])
    done("assembly")
    state = jax.block_until_ready(setup.init_state())
    done("initial state")
    with jax.set_mesh(setup.mesh):
        tokens = np.zeros(setup.abstract_batch()["tokens"].shape, np.int32)
        batch = put_batch(setup.mesh, {"tokens": tokens})
        step: Any = setup.step
        lowered = step.lower(state, batch)
        done("trace of the step")
        compiled = lowered.compile()
        done("compilation of the step")
        float(compiled(state, batch)[1]["loss"])
        done("first step")
    print(json.dumps(seconds))


def start(folder: str | None) -> dict[str, float]:
    """The phases of one start that keeps compiled programs in this folder, or nowhere."""
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false" if folder is None else "true"}
    env |= {"JAX_COMPILATION_CACHE_DIR": folder or "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    command = [sys.executable, __file__, "--worker", str(time.time())]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return

    from benchmarks import _record

    starts: dict[str, list[dict[str, float]]] = {"nothing kept": [], "first": [], "second": []}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for kind, kept_in in (("nothing kept", None), ("first", folder), ("second", folder)):
                starts[kind].append(start(kept_in))
    rows = []
    for kind, found in starts.items():
        totals = [sum(phases.values()) for phases in found]
        ratios = [total / sum(base.values()) for total, base in zip(totals, starts["nothing kept"], strict=True)]
        medians = {phase: statistics.median(phases[phase] for phases in found) for phase in PHASES}
        rows.append({"start": kind} | medians | {"total": statistics.median(totals), "ratio": statistics.median(ratios)})
    _record.write(args.out, "startup", rows)
    print(_record.table(rows, ["start", *PHASES, "total", "ratio"]))


if __name__ == "__main__":
    main()
