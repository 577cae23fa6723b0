"""Errors of z and of the gradients in bfloat16, as tokens attend more and more to themselves, of all implementations that run here.

    python benchmarks/accuracy.py --out benchmarks/results/cpu_accuracy.json

Errors are |error| / |value| in percent, against float64 on the same bfloat16 inputs; rounding the result alone costs 0.17. Beside
the implementations: `unfused`, plain attention that rounds its y to bfloat16 and the projection behind it, which is what any
attention library gives. `mean` adds to V a mean of twice its spread. On a CPU the kernels are interpreted.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import _record
from xsa_kernels import Projection, attention, project, registry, weights

# The score of a token with itself beyond what is random; its mean weight on itself follows.
PULLS = (0.0, 5.0, 7.0, 8.7, 12.5)
RESULTS = ("z", "dq", "dk", "dv")


def inputs(T, E, pull, mean):
    rng = np.random.default_rng(0)
    q, k, v, dz = (rng.normal(size=(1, T, heads, E)) for heads in (2, 1, 1, 2))
    q[:, :, 1] = q[:, :, 0] + 0.1 * q[:, :, 1]  # both query heads lean towards the one key head
    k += pull / E**0.5 * q[:, :, :1]
    v += 2 * mean * rng.normal(size=E)
    return tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, dz))


def unfused(q, k, v):
    y = attention(q, k, v, impl="xla")
    return project(y, v, Projection())


def both_passes(call, q, k, v, dz):
    z, vjp = jax.vjp(call, q, k, v)
    return z, *vjp(dz)


def contenders(T, E):
    """Name -> function, of those that run on this device."""
    calls: dict[str, Callable] = {
        name: functools.partial(attention, xsa=Projection(), impl=name) for name in registry.NAMES if name != "reference"
    }
    found = {"unfused": unfused}
    x = inputs(T, E, 0.0, False)
    for name, call in calls.items():
        try:
            jax.block_until_ready(jax.jit(call)(*x[:3]))
        except Exception as error:
            print(f"not here: {name} ({type(error).__name__}: {str(error).splitlines()[0][:100]})")
        else:
            found[name] = call
    return found


def table(rows) -> str:
    """Markdown: a line for each kind of input, a column for each implementation."""
    lines: dict = {}
    for row in rows:
        own = f"{row['mean a_ii']:.3f}" + (", mean" if row["mean"] else "")
        line = lines.setdefault(own, {"mean a_ii": own})
        line[f"{row['implementation']} {' '.join(RESULTS)}"] = " ".join(f"{row[name]:.2f}" for name in RESULTS)
    made = list(lines.values())
    return _record.table(made, list(made[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--out")
    args = parser.parse_args()
    programs = {
        name: jax.jit(functools.partial(both_passes, call)) for name, call in contenders(args.length, args.head_dim).items()
    }
    rows = []
    for mean in (False, True):
        for pull in PULLS:
            x = inputs(args.length, args.head_dim, pull, mean)
            with jax.enable_x64(True):
                wide = tuple(a.astype(jnp.float64) for a in x)
                exact = functools.partial(attention, xsa=Projection(), impl="reference")
                want = [np.asarray(a) for a in both_passes(exact, *wide)]
                own = float(np.diagonal(np.asarray(weights(*wide[:2])), axis1=-2, axis2=-1).mean())
            for name, program in programs.items():
                errors = [
                    100 * float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))
                    for a, b in zip(program(*x), want, strict=True)
                ]
                row = {"implementation": name, "mean": mean, "mean a_ii": own}
                rows.append(row | dict(zip(RESULTS, errors, strict=True)))
    rows.sort(key=lambda row: list(programs).index(row["implementation"]))
    _record.write(args.out, "accuracy", rows)
    print(table(rows))


if __name__ == "__main__":
    main()
