"""What the train step of a shape of versus_torch.py spends its time on, on this machine's CPU, from XLA's own trace.

    python benchmarks/step_profile.py --shape 3M --length 256 --kind xsa

One row for each kind of operation: milliseconds per step, as the sum over its executions, and for products GFLOP/s. Operations that
do not depend on each other run side by side, so the rows add up to more than a step, and each looks slower than it is alone.
"""

import argparse
import collections
import glob
import gzip
import json
import math
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

STEPS = 8


def traced_step(shape: str, length: int, kind: str) -> tuple[str, dict[str, float], float]:
    """The compiled step's HLO, milliseconds per step by the name of an operation, and the median milliseconds of a step."""
    import jax

    from benchmarks.versus_torch import batches, config_of
    from xsa_jax.parallel.mesh import put_batch
    from xsa_jax.parallel.process import prepare_process
    from xsa_jax.train.setup import assemble

    prepare_process()
    config = config_of(shape, length, kind)
    setup = assemble(config, jax.devices()[:1])
    state, batch = setup.init_state(), put_batch(setup.mesh, {"tokens": batches(config)[0]})
    with jax.set_mesh(setup.mesh), tempfile.TemporaryDirectory() as folder:
        step: Any = setup.step
        compiled = step.lower(state, batch).compile()
        for _ in range(3):
            state, metrics = compiled(state, batch)
        float(metrics["loss"])
        seconds = []
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                start = time.perf_counter()
                state, metrics = compiled(state, batch)
                float(metrics["loss"])
                seconds.append(time.perf_counter() - start)
        (path,) = glob.glob(f"{folder}/plugins/profile/*/*.trace.json.gz")
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    spent: dict[str, float] = collections.Counter()
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            spent[event["args"]["hlo_op"]] += event["dur"] / 1e3 / STEPS
    return compiled.as_text(), spent, 1e3 * float(np.median(seconds))


def operations(hlo: str) -> dict[str, tuple[str, float]]:
    """The kind of each operation, and its floating-point operations if it is a product, by name."""
    found, products, computation, shapes = {}, collections.defaultdict(list), "", {}
    for line in hlo.splitlines():
        if (header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)) is not None:
            computation, shapes = header[1], {}
            continue
        if (match := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (?:\w+)\[([\d,]*)\]\S* ([\w\-]+)\((.*)$", line)) is None:
            continue
        name, dims, opcode, rest = match.groups()
        shapes[name] = [int(size) for size in dims.split(",") if size]
        kind, flops = f"other: {opcode}", 0.0
        if opcode == "dot":
            contracted = re.search(r"lhs_contracting_dims=\{(\d+)\}", rest)
            left = re.match(r"[^%]*%?([\w.\-]+)", rest)
            if contracted is not None and left is not None:
                flops = 2.0 * math.prod(shapes[name]) * shapes[left[1]][int(contracted[1])]
            kind = "products of attention" if "lhs_batch_dims={" in rest else "products of weights"
            products[computation].append((kind, flops))
        elif opcode == "fusion" and (called := re.search(r"calls=%?([\w.\-]+)", rest)) is not None:
            if inside := products[called[1]]:
                kind, flops = inside[0][0], sum(one for _, one in inside)
            elif name.startswith("ynn"):
                kind = "reductions"
            else:
                words = ("exponential", "tanh", "concatenate", "transpose", "copy", "slice", "pad", "select")
                kind = next((f"fusions with {word}" for word in words if word in name), "other fusions")
        found[name] = kind, flops
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="3M")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--kind", default="xsa")
    parser.add_argument("--out")
    args = parser.parse_args()

    from benchmarks import _record

    hlo, spent, step = traced_step(args.shape, args.length, args.kind)
    known = operations(hlo)
    rows: dict[str, dict[str, Any]] = {}
    for name, milliseconds in spent.items():
        kind, flops = known.get(name, ("other", 0.0))
        row = rows.setdefault(kind, {"operations": kind, "number": 0, "ms": 0.0, "GFLOP": 0.0})
        row["number"] += 1
        row["ms"] += milliseconds
        row["GFLOP"] += flops / 1e9
    table = sorted(rows.values(), key=lambda row: -row["ms"])
    for row in table:
        row["GFLOP/s"] = 1e3 * row["GFLOP"] / row["ms"] if row["GFLOP"] else ""
    table.append({"operations": "a step, from start to end", "ms": step})
    _record.write(args.out, "step_profile", table)
    print(_record.table(table, ["operations", "number", "ms", "GFLOP/s"]))


if __name__ == "__main__":
    main()
