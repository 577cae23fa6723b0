"""Attention with XSA against the same attention without it: first the values, then the speed, on this machine's device.

    python benchmarks/kernels.py --out benchmarks/results/gpu_kernels.json

Implementations: `hopper` and `triton` (fused, each with XSA and as plain attention), `cudnn` (plain, and with the projection
behind it) and `xla`. Values: z and the gradients of q, k and v against float32 attention of the same bfloat16 inputs; what is off by
more than 1% (3% for the projection that finds y rounded, whose error is known) is not timed. Speed: TFLOP/s of the causal products
alone, medians over repetitions in which the implementations take turns, on several random input sets; a ratio is the median of the
ratios of one repetition. `residual MB` is what stays in memory between the passes, the inputs included. On a CPU it runs one tiny
shape, to test itself.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import _record
from kernels import MaskSpec, Projection, attention

# Name -> (implementation, with XSA). The first that runs here is what ratios are taken against.
CONTENDERS = {
    "cudnn sa": ("cudnn", False),
    "cudnn xsa": ("cudnn", True),
    "hopper sa": ("hopper", False),
    "hopper xsa": ("hopper", True),
    "triton sa": ("triton", False),
    "triton xsa": ("triton", True),
    "xla sa": ("xla", False),
    "xla xsa": ("xla", True),
}
TOKENS = 16384  # of a batch
WIDTH = 2048  # H * E
VALUE_SHAPES = [  # B, T, H, K, E, window
    (2, 1024, 8, 8, 64, None),
    (2, 1024, 8, 2, 128, None),
    (1, 2048, 4, 4, 96, None),
    (1, 1000, 4, 1, 80, None),
    (2, 512, 8, 8, 128, 200),
    (1, 4096, 2, 1, 64, 1000),
]
ON_CPU = ["xla sa", "xla xsa", "triton sa", "triton xsa"]


def attend(name, mask=None):
    impl, xsa = CONTENDERS[name]
    return functools.partial(attention, mask=mask or MaskSpec(), xsa=Projection() if xsa else None, impl=impl)


def inputs(B, T, H, K, E, seed, dtype=jnp.bfloat16):
    """q, k, v, dz. Keys lean towards their own query, so that tokens attend to themselves as in trained models."""
    keys = jax.random.split(jax.random.key(seed), 4)
    q, k, v, dz = (jax.random.normal(key, (B, T, n, E)) for key, n in zip(keys, (H, K, K, H), strict=True))
    k = k + 0.3 * q[:, :, :: H // K]
    return tuple(x.astype(dtype) for x in (q, k, v, dz))


def both_passes(call, q, k, v, dz):
    z, vjp = jax.vjp(call, q, k, v)
    return z, *vjp(dz)


def runs(name, *shape):
    """Whether an implementation takes a shape at all; the reason if not."""
    B, T, H, K, E, window = shape
    q, k = jax.ShapeDtypeStruct((B, T, H, E), jnp.bfloat16), jax.ShapeDtypeStruct((B, T, K, E), jnp.bfloat16)
    try:
        jax.eval_shape(attend(name, MaskSpec(window=window)), q, k, k)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return str(error)
    return None


def check_values(names, shapes):
    """Rows of relative errors in percent; `wrong` where one is too large or not a number, or the run failed."""
    rows = []
    for shape in shapes:
        *sizes, window = shape
        x = inputs(*sizes, seed=1)
        wide = tuple(a.astype(jnp.float32) for a in x)
        want = {}
        for name in names:
            xsa = CONTENDERS[name][1]
            if runs(name, *shape):
                continue
            if xsa not in want:
                exact = functools.partial(attend("xla xsa" if xsa else "xla sa", MaskSpec(window=window)))
                with jax.default_matmul_precision("highest"):
                    want[xsa] = jax.jit(functools.partial(both_passes, exact))(*wide)
            row = {"shape": "x".join(map(str, sizes)), "window": window, "implementation": name}
            try:
                got = jax.jit(functools.partial(both_passes, attend(name, MaskSpec(window=window))))(*x)
                errors = [
                    float(jnp.linalg.norm((a.astype(jnp.float32) - b).ravel()) / jnp.linalg.norm(b.ravel()))
                    for a, b in zip(got, want[xsa], strict=True)
                ]
                row |= {label: 100 * e for label, e in zip(("z %", "dq %", "dk %", "dv %"), errors, strict=True)}
                row["wrong"] = not max(errors) <= (0.03 if name == "cudnn xsa" else 0.01)
            except Exception as error:
                row |= {"wrong": True, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
            rows.append(row)
            print(row, flush=True)
    return rows


def repeated(call, count):
    """call(*arguments) `count` times in one program, each with arguments that only exist once the call before is done."""

    def body(_, carry):
        arguments, _ = carry
        # Carried to the end, the results cannot be dropped; through the barrier, no call can be moved out of the loop.
        return lax.optimization_barrier((arguments, call(*arguments)))

    def program(*arguments):
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(call, *arguments))
        return lax.fori_loop(0, count, body, (arguments, nothing))[1]

    return jax.jit(program)


def measure(names, shape, passes, repetitions, sets):
    """Rows for one shape: seconds of each implementation, all taking turns."""
    B, T, H, K, E = shape
    data = [inputs(B, T, H, K, E, seed) for seed in range(sets)]
    flops = 4 * B * H * T * T * E / 2 * (1 if passes == "forward" else 3.5)
    count = 2 if jax.default_backend() == "cpu" else max(1, int(2e12 / flops))
    programs, rows = {}, {}
    for name in names:
        call = attend(name) if passes == "forward" else functools.partial(both_passes, attend(name))
        arguments = [x[:3] if passes == "forward" else x for x in data]
        try:
            programs[name] = repeated(call, count), arguments
            for x in arguments:
                jax.block_until_ready(programs[name][0](*x))
        except Exception as error:
            print(f"{name} {shape}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            programs.pop(name)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for n in range(repetitions):
        for name, (program, arguments) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments[n % sets]))
            seconds[name].append((time.perf_counter() - start) / count)
    base = next(iter(programs), None)
    for name, times in seconds.items():
        rows[name] = {
            "T": T, "E": E, "H/K": H // K, "passes": passes, "implementation": name,
            "ms": 1e3 * statistics.median(times),
            "TFLOP/s": flops / statistics.median(times) / 1e12,
            f"speed / {base}": statistics.median(b / t for b, t in zip(seconds[base], times, strict=True)),
            "residual MB": residual_bytes(name, shape) / 2**20,
        }  # fmt: skip
        print(rows[name], flush=True)
    return list(rows.values())


def residual_bytes(name, shape):
    B, T, H, K, E = shape
    q, k = jax.ShapeDtypeStruct((B, T, H, E), jnp.bfloat16), jax.ShapeDtypeStruct((B, T, K, E), jnp.bfloat16)
    kept = jax.eval_shape(lambda *x: jax.vjp(attend(name), *x)[1], q, k, k)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def main() -> None:
    def numbers(text):
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--head-dims", type=numbers, default=[128, 64])
    parser.add_argument("--groups", type=numbers, default=[1, 4], help="query heads per KV head")
    parser.add_argument("--implementations", type=lambda text: text.split(","), default=list(CONTENDERS))
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--sets", type=int, default=3, help="random input sets")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after so long")
    parser.add_argument("--values-only", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()

    start, cpu = time.monotonic(), jax.default_backend() == "cpu"
    names = [name for name in args.implementations if not cpu or name in ON_CPU]
    values = check_values(names, [(1, 64, 2, 1, 16, None)] if cpu else VALUE_SHAPES)
    wrong = {row["implementation"] for row in values if row["wrong"]}
    rows: list[dict] = []
    shapes = [(1, 64, 2, 1, 16)] if cpu else []
    if not cpu:
        for E in args.head_dims:
            for G in args.groups:
                shapes += [(max(1, TOKENS // T), T, WIDTH // E, WIDTH // E // G, E) for T in args.lengths]
    for shape in [] if args.values_only else shapes:
        for passes in ("forward", "both"):
            if time.monotonic() - start > args.seconds:
                print(f"not measured, out of time: {shape} {passes}", flush=True)
                continue
            # XLA's own blocks are slow enough to know at short lengths.
            able = [name for name in names if name not in wrong and not runs(name, *shape, None)]
            able = [name for name in able if shape[1] <= 2048 or "xla" not in name]
            rows += measure(able, shape, passes, args.repetitions, args.sets)
            _record.write(args.out, "kernels", [*values, *rows])
    _record.write(args.out, "kernels", [*values, *rows])
    print(_record.table(values, ["shape", "window", "implementation", "z %", "dq %", "dk %", "dv %", "wrong"]))
    if rows:
        print(_record.table(rows, list(dict.fromkeys(column for row in rows for column in row))))


if __name__ == "__main__":
    main()
