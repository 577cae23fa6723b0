"""What shares the cores of this CPU with the train step of configs/demo.py: the run's own threads, and a second run.

    python benchmarks/cores.py --out benchmarks/results/cpu_cores.json

`one run` takes steps as the training loop does, and saves in the background every `SAVE_EVERY` steps. Its rows are the wait for the
next batch, and the time of the steps that directly follow a save, both over the median of the other steps.

`two runs` lets two processes make `STEPS` steps each in three ways, which take turns: one process after the other, both at once,
and both at once with each process bound to its half of the cores (`taskset`). The ratio is the time until both are done over that
of one after the other, as the median over the turns, with its quartiles.
"""

import argparse
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

STEPS = 20
SAVE_EVERY = 20
AFTER = 3  # steps that count as following a save


def one_run(saves: int) -> list[dict[str, Any]]:
    """The wait for input, and the steps that follow a save."""
    import jax

    from configs import demo
    from xsa_jax.config import CheckpointConfig, from_config_dict
    from xsa_jax.parallel.mesh import put_batch
    from xsa_jax.parallel.process import prepare_process
    from xsa_jax.train.checkpoint import Checkpoints
    from xsa_jax.train.setup import assemble, open_data

    prepare_process()
    waits, steps, after = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        python = [sys.executable, "-m"]
        prepare = ["xsa_jax.data.prepare", "--input", f"{folder}/text/*.parquet", "--tokenizer", "bytes"]
        subprocess.run([*python, "xsa_jax.data.python_text", "--output", f"{folder}/text"], check=True, capture_output=True)
        subprocess.run([*python, *prepare, "--output", f"{folder}/tokens"], check=True, capture_output=True)
        tree = demo.get_config()
        tree.attention.kind = "xsa"
        tree.data.path = f"{folder}/tokens"
        config = from_config_dict(tree)
        setup = assemble(config, jax.devices()[:1])
        data = open_data(config, setup.mesh)
        state = setup.init_state()
        with Checkpoints(pathlib.Path(folder), CheckpointConfig(keep_last=1)) as checkpoints, jax.set_mesh(setup.mesh):
            batches = data.training.iterate()
            for step in range(1, SAVE_EVERY * (saves + 1) + 1):
                start = time.perf_counter()
                batch = put_batch(setup.mesh, next(batches))
                ready = time.perf_counter()
                state, metrics = setup.step(state, batch)
                float(metrics["loss"])
                seconds = time.perf_counter() - ready
                if step > SAVE_EVERY:  # the first interval warms up
                    waits.append(ready - start)
                    (after if (step - 1) % SAVE_EVERY < AFTER else steps).append(seconds)
                if step % SAVE_EVERY == 0:
                    checkpoints.save(step, state, config, data.training.state(step))
            batches.close()
    plain = statistics.median(steps)
    return [
        _row("one run: wait for a batch, over a step", [wait / plain for wait in waits]),
        _row(f"one run: the {AFTER} steps after a save, over the other steps", [seconds / plain for seconds in after]),
    ]


def worker(pipe: Any, cores: set[int]) -> None:
    """Makes `STEPS` steps whenever it is told to."""
    os.sched_setaffinity(0, cores)  # before jax starts its threads
    import jax

    from configs import demo
    from xsa_jax.config import from_config_dict
    from xsa_jax.parallel.process import prepare_process
    from xsa_jax.train.setup import assemble
    from xsa_jax.train.step_time import Stepper

    prepare_process()
    tree = demo.get_config()
    tree.attention.kind = "xsa"
    stepper = Stepper(assemble(from_config_dict(tree), jax.devices()[:1]))
    stepper.seconds()
    pipe.send(None)
    while pipe.recv():
        for _ in range(STEPS):
            stepper.seconds()
        pipe.send(None)


def two_runs(turns: int) -> list[dict[str, Any]]:
    """Two runs at once, over one after the other."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if not half:
        print("two runs: skipped, there is one core")
        return []
    context = multiprocessing.get_context("spawn")
    pipes = []
    for allowed in (cores, cores, cores[:half], cores[half:]):
        pipe, other = context.Pipe()
        context.Process(target=worker, args=(other, set(allowed)), daemon=True).start()
        pipe.recv()
        pipes.append(pipe)

    def seconds(*groups: list[int]) -> float:
        start = time.perf_counter()
        for group in groups:
            for number in group:
                pipes[number].send(True)
            for number in group:
                pipes[number].recv()
        return time.perf_counter() - start

    at_once, bound = [], []
    for turn in range(turns + 1):
        base = seconds([0], [1])
        ratios = seconds([0, 1]) / base, seconds([2, 3]) / base
        if turn:  # the first one warms up
            at_once.append(ratios[0])
            bound.append(ratios[1])
    for pipe in pipes:
        pipe.send(False)
    return [
        _row("two runs: at once, over one after the other", at_once),
        _row("two runs: at once, each on its half of the cores, over one after the other", bound),
    ]


def _row(what: str, ratios: list[float]) -> dict[str, Any]:
    low, middle, high = (float(x) for x in np.percentile(ratios, [25, 50, 75]))
    return {"what": what, "ratio": middle, "quartiles": f"{low:.3f} to {high:.3f}", "largest": max(ratios), "number": len(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=12)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out")
    args = parser.parse_args()

    from benchmarks import _record

    rows = two_runs(args.turns) + one_run(args.saves)
    _record.write(args.out, "cores", rows)
    print(_record.table(rows, ["what", "ratio", "quartiles", "largest", "number"]))


if __name__ == "__main__":
    main()
