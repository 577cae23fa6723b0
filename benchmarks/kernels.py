"""Attention with XSA against the same attention without it: first the values, then the speed, on this machine's device.

    python benchmarks/kernels.py --out benchmarks/results/gpu_kernels.json

Implementations: `hopper`, `triton` and `tpu` (fused, each with XSA and as plain attention), `cudnn`, `splash` and `tokamax`
(plain, and with the projection behind it; `splash sa` is jax's own, forward and backward) and `xla`. Values: z and the gradients
of q, k and v against float32 attention of the same bfloat16 inputs; what is off by more than 1% (3% for the projection that finds
y rounded, whose error is known) is not timed. Speed: TFLOP/s of the causal products alone, medians over repetitions in which the
implementations take turns, on several random input sets; a ratio is the median of the ratios of one repetition. `residual MB` is
what stays in memory between the passes, the inputs included. On a CPU it runs one tiny shape, to test itself.
"""

import argparse
import concurrent.futures
import functools
import itertools
import math
import os
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import _record
from xsa_kernels import MaskSpec, Projection, attention

# What is compared on each kind of device; each with XSA ("cudnn xsa") and without ("cudnn sa"). Ratios are taken against the first
# that runs.
IMPLEMENTATIONS = {
    "gpu": ("cudnn", "hopper", "triton", "tokamax", "xla"),
    "tpu": ("splash", "tpu", "tokamax", "xla"),
    "cpu": ("xla", "triton", "splash", "tpu"),
}
ROUND_Y = ("cudnn xsa", "splash xsa", "tokamax xsa")
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


def attend(name, mask=None):
    impl, kind = name.split()
    if name == "splash sa":
        return functools.partial(splash_itself, mask or MaskSpec())
    return functools.partial(attention, mask=mask or MaskSpec(), xsa=Projection() if kind == "xsa" else None, impl=impl)


def splash_itself(mask, q, k, v):
    """As jax ships it, with its own backward pass, which `impl="splash"` does not take."""
    T, H, E = q.shape[1:]
    b = math.gcd(T, 1024)
    shown = splash.CausalMask((T, T)) if mask.window is None else splash.LocalMask((T, T), (mask.window - 1, 0), 0)
    sizes = splash.BlockSizes(b, b, min(b, 512), b, b, min(b, 512), b, b)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([shown] * H),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=jax.default_backend() == "cpu",
    )
    return jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q * E**-0.5, k, v))).swapaxes(1, 2)


def inputs(B, T, H, K, E, seed, dtype=jnp.bfloat16):
    """q, k, v, dz. Keys lean towards their own query, so that tokens attend to themselves as in trained models."""
    keys = jax.random.split(jax.random.key(seed), 4)
    q, k, v, dz = (jax.random.normal(key, (B, T, n, E)) for key, n in zip(keys, (H, K, K, H), strict=True))
    k = k + 0.3 * q[:, :, :: H // K]
    return tuple(x.astype(dtype) for x in (q, k, v, dz))


def both_passes(call, q, k, v, dz):
    z, vjp = jax.vjp(call, q, k, v)
    return z, *vjp(dz)


def precisely(call, *arguments):
    with jax.default_matmul_precision("highest"):
        return both_passes(call, *arguments)


def runs(name, *shape):
    """Whether an implementation takes a shape at all; the reason if not."""
    B, T, H, K, E, window = shape
    q, k = jax.ShapeDtypeStruct((B, T, H, E), jnp.bfloat16), jax.ShapeDtypeStruct((B, T, K, E), jnp.bfloat16)
    try:
        jax.eval_shape(attend(name, MaskSpec(window=window)), q, k, k)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return None


def compile_all(programs):
    """Compiles {name: (function, arguments)}, at once on all cores. What does not compile is reported and left out."""

    def build(item):
        name, (function, arguments) = item
        try:
            return name, jax.jit(function).lower(*arguments).compile()
        except Exception as error:
            print(f"{name} does not compile: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return name, None

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return {name: program for name, program in pool.map(build, programs.items()) if program is not None}


def check_values(names, shapes):
    """Rows of relative errors in percent; `wrong` where one is too large or not a number, or the run failed."""
    wanted = {}
    for shape in shapes:
        *sizes, window = shape
        mask, x = MaskSpec(window=window), inputs(*sizes, seed=1)
        for xsa in (False, True):
            exact = attend("xla xsa" if xsa else "xla sa", mask)
            wanted[shape, xsa] = functools.partial(precisely, exact), tuple(a.astype(jnp.float32) for a in x)
        for name in names:
            # Plain attention is the same kernel without its last lines: two shapes tell.
            if not runs(name, *shape) and (name.endswith("xsa") or shape in shapes[:2]):
                wanted[shape, name] = functools.partial(both_passes, attend(name, mask)), x
    programs, rows = compile_all(wanted), []
    for (shape, name), (_, x) in wanted.items():
        if name in (False, True):
            continue
        row = {"shape": "x".join(map(str, shape[:-1])), "window": shape[-1], "implementation": name, "wrong": True}
        exact = (shape, name.endswith("xsa"))
        try:
            pairs = zip(programs[shape, name](*x), programs[exact](*wanted[exact][1]), strict=True)
            errors = [float(jnp.linalg.norm((a.astype(jnp.float32) - b).ravel()) / jnp.linalg.norm(b.ravel())) for a, b in pairs]
            row |= {label: 100 * e for label, e in zip(("z %", "dq %", "dk %", "dv %"), errors, strict=True)}
            row["wrong"] = not max(errors) <= (0.03 if name in ROUND_Y else 0.01)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
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

    return program


def measure(names, shape, passes, repetitions, sets):
    """Rows for one shape: seconds of each implementation, all taking turns."""
    B, T, H, K, E = shape
    data = [inputs(B, T, H, K, E, seed) for seed in range(sets)]
    flops = 4 * B * H * T * T * E / 2 * (1 if passes == "forward" else 3.5)
    count = 2 if jax.default_backend() == "cpu" else max(1, int(2e12 / flops))
    jobs = {}
    for name in names:
        call = attend(name) if passes == "forward" else functools.partial(both_passes, attend(name))
        jobs[name] = repeated(call, count), data[0][:3] if passes == "forward" else data[0]
    programs, rows = compile_all(jobs), {}
    data = [x[: len(jobs[names[0]][1])] for x in data]
    for program in programs.values():
        for x in data:
            jax.block_until_ready(program(*x))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for n in range(repetitions):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*data[n % sets]))
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
    parser.add_argument("--implementations", type=lambda text: text.split(","), help="such as cudnn xsa,hopper xsa")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--sets", type=int, default=3, help="random input sets")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after so long")
    parser.add_argument("--values-only", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()

    start, cpu = time.monotonic(), jax.default_backend() == "cpu"
    able = [f"{impl} {kind}" for impl in IMPLEMENTATIONS[jax.default_backend()] for kind in ("sa", "xsa")]
    names = [name for name in able if args.implementations is None or name in args.implementations]
    values = check_values(names, [(1, 128, 2, 1, 16, None)] if cpu else VALUE_SHAPES)
    wrong = {row["implementation"] for row in values if row["wrong"]}
    rows: list[dict] = []
    shapes = [(1, 128, 2, 1, 16)] if cpu else []
    if not cpu:
        for T, E, G in itertools.product(args.lengths, args.head_dims, args.groups):
            shapes.append((max(1, TOKENS // T), T, WIDTH // E, WIDTH // E // G, E))
    for shape in [] if args.values_only else shapes:
        for passes in ("forward", "both"):
            if time.monotonic() - start > args.seconds:
                print(f"not measured, out of time: {shape} {passes}", flush=True)
                continue
            # XLA's own blocks are slow enough to know at short lengths.
            able = [name for name in names if name not in wrong and not runs(name, *shape, None)]
            able = [name for name in able if shape[1] <= 2048 or "xla" not in name]
            if able:
                rows += measure(able, shape, passes, args.repetitions, args.sets)
            _record.write(args.out, "kernels", [*values, *rows])
    _record.write(args.out, "kernels", [*values, *rows])
    print(_record.table(values, ["shape", "window", "implementation", "z %", "dq %", "dk %", "dv %", "wrong"]))
    if rows:
        print(_record.table(rows, list(dict.fromkeys(column for row in rows for column in row))))


if __name__ == "__main__":
    main()
