"""What the Hopper kernels share: products and layouts of one warpgroup's tile, the order of the blocks, and the launch."""

import functools
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xsa_kernels.gpu.spans import BlockGrid, Spans, query_and_key_ids, segment_spans

COMPUTE_WARPGROUPS = 2  # one more warpgroup loads
ROWS = 64  # of a tile, all that one instruction of the tensor cores takes
# A kernel starts with 168 registers a thread, and three warpgroups can only share these.
COMPUTE_REGISTERS, LOAD_REGISTERS = 240, 24
# jax 0.10 asks for an index that later releases refuse.
_WHOLE = ((),) if jax.__version_info__ < (0, 11) else ()


def warpgroup() -> jax.Array:
    """The number of this warpgroup, for the body of a loop: the compiler takes it for another number in every step.

    Else it computes all addresses of the warpgroup's own tiles before the loop, and has no registers to keep them in.
    """
    return lax.optimization_barrier(lax.axis_index("wg"))


def products(*pairs: tuple[Any, Any], meanwhile: Callable[[], None] | None = None) -> tuple[jax.Array, ...]:
    """a b^T of each pair of tiles in shared memory, in float32. `meanwhile` runs while the tensor cores do."""

    def multiply(*accumulators: Any) -> tuple[jax.Array, ...]:
        for (a, b), accumulator in zip(pairs, accumulators, strict=True):
            plgpu.wgmma(accumulator, a, b.transpose((1, 0)))
        if meanwhile is not None:
            meanwhile()
        return tuple(accumulator[...] for accumulator in accumulators)

    return pl.run_scoped(multiply, *(plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32) for a, b in pairs))


def add_products(*triples: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, ...]:
    """c + a b of each triple; c and a are in registers, b in shared memory."""

    def multiply(accumulators: Any) -> None:
        for (_, a, b), accumulator in zip(triples, accumulators, strict=True):
            plgpu.wgmma(accumulator, a, b)

    return pl.run_state(multiply)(tuple(plgpu.ACC.init(c) for c, _, _ in triples))


def load(ref: Any, layout: Any) -> jax.Array:
    """A tile from shared or global memory into registers."""
    return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)


def row_layout() -> Any:
    """The layout of one number per row of a tile."""
    return plgpu.Layout.WGMMA.reduce(1)


def column_layout() -> Any:
    """The layout of one number per column of a tile."""
    return plgpu.Layout.WGMMA.reduce(0)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number per row, repeated in its columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number per column, repeated in its rows."""
    return lax.broadcast_in_dim(x, shape, [1])


def zeros(*shape: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA if len(shape) == 2 else row_layout())


def tiling(head_dim: int) -> tuple[Any, Any]:
    """How tiles of 16-bit numbers lie in shared memory: the widest swizzle whose line divides a row."""
    line = math.gcd(head_dim, 64)
    return plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(2 * line)


def positions(first_row: jax.Array, first_column: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The positions of the tokens of each row, and of each column, of a tile."""
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + first_row
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first_column
    return row, column


class Program(NamedTuple):
    """The part of a call that one program computes: a block of queries of one head."""

    batch: jax.Array
    block: jax.Array
    head: jax.Array
    kv_head: jax.Array

    @classmethod
    def of_queries(cls, grid: BlockGrid, refs: Any) -> "Program":
        """The last query blocks see the most keys under a causal mask, and start first."""
        head, batch = lax.axis_index("head"), lax.axis_index("batch")
        block = pl.cdiv(grid.T, grid.block_t) - 1 - lax.axis_index("block")
        return cls(batch, block, head, lax.div(head, jnp.int32(refs.q.shape[2] // refs.k.shape[2])))


class Sweep(NamedTuple):
    """The order in which a program visits blocks: first those that need no mask."""

    spans: Spans
    num_blocks: jax.Array
    num_unmasked: jax.Array

    @classmethod
    def over(cls, spans: Spans) -> "Sweep":
        return cls(spans, spans.stop - spans.start, spans.number(masked=False))

    def masked_block(self, n: jax.Array) -> jax.Array:
        """The block of step n, which needs the mask."""
        return self.spans.block(n - self.num_unmasked, masked=True)

    def block(self, n: jax.Array) -> jax.Array:
        """The block of step n."""
        return jnp.where(n < self.num_unmasked, self.spans.block(n, masked=False), self.masked_block(n))

    def run(self, step: Callable[..., Any], carry: Any) -> Any:
        """carry = step(n, carry, masked=...) for all steps."""
        carry = lax.fori_loop(0, self.num_unmasked, functools.partial(step, masked=False), carry)
        return lax.fori_loop(self.num_unmasked, self.num_blocks, functools.partial(step, masked=True), carry)


def fill_ring(steps: jax.Array, slots: int, consumed: tuple[Any, ...], fetch: Callable[[jax.Array, jax.Array], None]) -> None:
    """fetch(step, slot) for every step, into a ring of slots, each as soon as all that was in it is consumed."""

    def refill(n: jax.Array, _: None) -> None:
        slot = lax.rem(n, jnp.int32(slots))
        for barrier in consumed:
            plgpu.barrier_wait(barrier.at[slot])
        fetch(n, slot)

    filled = jnp.minimum(steps, slots)
    lax.fori_loop(0, filled, lambda n, _: fetch(n, n), None)
    lax.fori_loop(filled, steps, refill, None)


def load_keys_and_values(grid: BlockGrid, program: Program, sweep: Sweep, refs: Any, shared: Any) -> None:
    """What the loading warpgroup does for a block of queries: it fills `shared.k` and `shared.v` in the order of the sweep."""

    def fetch(n: jax.Array, slot: jax.Array) -> None:
        at = (program.batch, pl.ds(sweep.block(n) * grid.block_s, grid.block_s), program.kv_head)
        plgpu.copy_gmem_to_smem(refs.k.at[at], shared.k.at[slot], shared.ready[0].at[slot])
        plgpu.copy_gmem_to_smem(refs.v.at[at], shared.v.at[slot], shared.ready[1].at[slot])

    fill_ring(sweep.num_blocks, shared.k.shape[0], shared.consumed, fetch)


def padded(x: jax.Array | None, axis: int, multiple: int = COMPUTE_WARPGROUPS * ROWS) -> jax.Array | None:
    """`x` with zeros up to a multiple, by default to whole tiles of all warpgroups: plain loads do not stop where an array ends."""
    if x is None:
        return None
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def copyable(x_BTHE: jax.Array | None) -> jax.Array | None:
    """What copies of tiles can read: they do stop where an array ends, with zeros beyond, but take tokens by eight."""
    return padded(x_BTHE, 1, 8)


def segment_inputs(grid: BlockGrid, segment_ids_BS: jax.Array | None, of_keys: bool) -> dict[str, jax.Array | None]:
    """What a kernel reads of the segment ids: those of the queries and of the keys, and which blocks may share a segment."""
    q_ids, k_ids = query_and_key_ids(grid, segment_ids_BS)
    return {
        "q_ids": padded(q_ids, 1),
        "k_ids": padded(k_ids, 1),
        "segment_spans": segment_spans(grid, segment_ids_BS, of_keys),
    }


def launch(
    kernel: Callable[..., None],
    name: str,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    scratch: Any,
    grid: tuple[int, int, int],
    interpret: bool,
) -> dict[str, Any]:
    """Runs kernel(refs, scratch) on a grid of (heads, blocks, batch rows) and returns its outputs.

    `inputs` are arrays and `outputs` shapes, by the name that each has in `refs`. What is None is None there and in the result.
    """
    given, made = ({n: x for n, x in named.items() if x is not None} for named in (inputs, outputs))

    def entry(*refs: Any) -> None:
        named = dict.fromkeys([*inputs, *outputs]) | dict(zip([*given, *made], refs, strict=True))
        pl.run_scoped(functools.partial(kernel, types.SimpleNamespace(**named)), scratch, collective_axes="wg")

    entry.__name__ = name  # jax names the kernel after its function, and profiles show it
    simulator: Any = getattr(plgpu, "InterpretGPUParams", None)  # since jax 0.12
    results = plgpu.kernel(
        entry,
        out_type=list(made.values()),
        grid=grid,
        grid_names=("head", "block", "batch"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=simulator(detect_races=True) if interpret else None,
    )(*given.values())
    return dict.fromkeys(outputs) | dict(zip(made, results, strict=True))
