"""What the Hopper kernels share: matrix products, masks and layouts of one tile of one warpgroup, and the order of the blocks."""

import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsa_kernels.gpu.spans import Plan, Spans, query_and_key_ids, segment_spans

COMPUTE = 2  # warpgroups that compute; one more feeds them
ROWS = 64  # of a tile, all that one instruction of the tensor cores takes
# A kernel starts with 168 registers a thread, and three warpgroups can only share these.
COMPUTE_REGISTERS, FEED_REGISTERS = 240, 24
HEAD_DIMS = (64, 80, 96, 128)
LOG2E = math.log2(math.e)
# jax 0.10 asks for an index that later releases refuse.
_WHOLE = ((),) if jax.__version_info__ < (0, 11) else ()


def warpgroup():
    """The number of this warpgroup, for the body of a loop: the compiler takes it for another number in every step.

    Else it makes all addresses of the warpgroup's own tiles before the loop, and has no registers to keep them in.
    """
    return lax.optimization_barrier(lax.axis_index("wg"))


def products(*pairs, meanwhile=None):
    """a b^T of each pair of tiles in shared memory, in float32. `meanwhile` runs while the tensor cores do."""

    def multiply(*accumulators):
        for (a, b), accumulator in zip(pairs, accumulators, strict=True):
            plgpu.wgmma(accumulator, a, b.transpose((1, 0)))
        if meanwhile is not None:
            meanwhile()
        return tuple(accumulator[...] for accumulator in accumulators)

    return pl.run_scoped(multiply, *(plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32) for a, b in pairs))


def add_products(*triples):
    """c + a b of each triple; c and a are in registers, b in shared memory."""

    def multiply(accumulators):
        for (_, a, b), accumulator in zip(triples, accumulators, strict=True):
            plgpu.wgmma(accumulator, a, b)

    return pl.run_state(multiply)(tuple(plgpu.ACC.init(c) for c, _, _ in triples))


def load(ref, layout):
    """A tile from shared or global memory into registers."""
    return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)


def row_layout():
    """That of one number per row of a tile."""
    return plgpu.Layout.WGMMA.reduce(1)


def column_layout():
    """That of one number per column."""
    return plgpu.Layout.WGMMA.reduce(0)


def along_rows(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x, shape):
    return lax.broadcast_in_dim(x, shape, [1])


def zeros(*shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA if len(shape) == 2 else row_layout())


def tiling(head_dim: int):
    """How tiles of 16-bit numbers lie in shared memory: the widest swizzle whose line divides a row."""
    line = math.gcd(head_dim, 64)
    return plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(2 * line)


def positions(first_row, first_column, shape):
    """Position of the token of each row, and of each column, of a tile."""
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first_row
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first_column
    return row, column


def seen(plan: Plan, query, key):
    """Which pairs of positions the mask shows."""
    shown = key < plan.S
    if plan.ahead is not None:
        shown &= key <= query + plan.ahead
    if plan.back is not None:
        shown &= key >= query - plan.back
    return shown


def nth_block(spans: Spans, n, num_clean):
    """The order of a sweep: first the blocks that need no mask."""
    return jnp.where(n < num_clean, spans.block(n, clean=True), spans.block(n - num_clean, clean=False))


def scores(plan: Plan, dot):
    """(scores, the factor that makes them base 2): the maximum of the product is the product of the maximum, so it is positive."""
    call = plan.call
    if call.softcap is not None:
        return jnp.tanh(dot * (call.scale / call.softcap)), call.softcap * LOG2E
    return (dot if call.scale >= 0 else -dot), abs(call.scale) * LOG2E


def feed(steps, stages: int, consumed, fetch):
    """fetch(step, slot) for every step, into a ring of `stages` slots, each once all that was in it is consumed."""

    def refill(n, _):
        slot = lax.rem(n, jnp.int32(stages))
        for barrier in consumed:
            plgpu.barrier_wait(barrier.at[slot])
        fetch(n, slot)

    filled = jnp.minimum(steps, stages)
    lax.fori_loop(0, filled, lambda n, _: fetch(n, n), None)
    lax.fori_loop(filled, steps, refill, None)


def padded(x, axis: int, multiple: int = COMPUTE * ROWS):
    """With zeros up to a multiple, by default to whole tiles of all warpgroups: plain loads do not stop where an array ends."""
    if x is None:
        return None
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def copyable(x_BTHE):
    """What copies of tiles can read: they do stop where an array ends, with zeros beyond, but take tokens by eight."""
    return padded(x_BTHE, 1, 8)


def segments(plan: Plan, segment_ids, of_keys: bool) -> dict[str, Any]:
    """What a kernel reads of the segment ids: those of the queries and of the keys, and which blocks may meet."""
    q_ids, k_ids = query_and_key_ids(plan, segment_ids)
    return {"q_ids": padded(q_ids, 1), "k_ids": padded(k_ids, 1), "meeting": segment_spans(plan, segment_ids, of_keys)}


def launch(kernel, name: str, inputs: dict[str, Any], outputs: dict[str, Any], scratch, grid, interpret: bool) -> dict[str, Any]:
    """Runs kernel(refs, *scratch) on a grid of (heads, blocks, batch rows) and returns its outputs.

    `inputs` are arrays and `outputs` shapes, by the name that each has in `refs`. What is None is None there and in the result.
    """
    given, made = ({n: x for n, x in named.items() if x is not None} for named in (inputs, outputs))

    def entry(*refs):
        named = dict.fromkeys([*inputs, *outputs]) | dict(zip([*given, *made], refs, strict=True))
        pl.run_scoped(functools.partial(kernel, types.SimpleNamespace(**named)), *scratch, collective_axes="wg")

    entry.__name__ = name  # jax names the kernel after its function, and profiles show it
    simulator: Any = getattr(plgpu, "InterpretGPUParams", None)  # since jax 0.12
    results = plgpu.kernel(
        entry,
        out_type=list(made.values()),
        grid=grid,
        grid_names=("head", "block", "batch"),
        num_threads=COMPUTE + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=simulator(detect_races=True) if interpret else None,
    )(*given.values())
    return dict.fromkeys(outputs) | dict(zip(made, results, strict=True))
