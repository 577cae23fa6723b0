"""The backward pass of the projection in one pass over z and dz. XLA makes five of it, with a reduction between each."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.fused import Call
from kernels.tpu import schedule, tile
from kernels.tpu.schedule import LANES

ROWS = 1024


def rows(
    interpret: Any, call: Call, z_BTHE: jax.Array, c_BHT: jax.Array, own_BTKE: jax.Array, dz_BTHE: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """`Backend.rows` after its first argument."""
    (B, T, H, E), K = z_BTHE.shape, own_BTKE.shape[2]
    G = H // K
    size = min(ROWS, schedule.round_up(T, LANES))
    padded_T = schedule.round_up(T, size)
    steps = padded_T // size

    def grouped(x_BTHE):
        return schedule.rows_first(x_BTHE, padded_T).reshape(B, K, G * padded_T, E)

    z, dz, own = grouped(z_BTHE), grouped(dz_BTHE), schedule.rows_first(own_BTKE, padded_T)
    c = jnp.pad(c_BHT, ((0, 0), (0, 0), (0, padded_T - T))).reshape(B, K, 1, -1)
    q_spec = pl.BlockSpec((None, None, size, E), lambda b, k, i, g: (b, k, g * steps + i, 0))
    own_spec = pl.BlockSpec((None, None, size, E), lambda b, k, i, g: (b, k, i, 0))
    dy, dv, numbers = pl.pallas_call(
        functools.partial(_kernel, call),
        grid=(B, K, steps, G),
        in_specs=[q_spec, q_spec, own_spec, pl.BlockSpec((None, None, 1, size), lambda b, k, i, g: (b, k, 0, g * steps + i))],
        out_specs=[q_spec, own_spec, pl.BlockSpec((None, None, 2, size), lambda b, k, i, g: (b, k, 0, g * steps + i))],
        out_shape=[
            jax.ShapeDtypeStruct(dz.shape, z_BTHE.dtype),
            jax.ShapeDtypeStruct(own.shape, jnp.float32),
            jax.ShapeDtypeStruct((B, K, 2, G * padded_T), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=16 * z.size, transcendentals=0, bytes_accessed=3 * z.nbytes + own.nbytes + own.size * 4
        ),
        interpret=interpret,
        name="xsa_rows",
    )(z, dz, own, c)
    dy_BTHE = dy.reshape(B, H, padded_T, E)[:, :, :T].swapaxes(1, 2)
    numbers = numbers.reshape(B, K, 2, G, padded_T)[..., :T]
    kept_BKT = numbers[:, :, 1, 0] == 0 if call.drop_diagonal else None
    return dy_BTHE, numbers[:, :, 0].reshape(B, H, T), dv[:, :, :T].swapaxes(1, 2), kept_BKT


def _kernel(call: Call, z_ref, dz_ref, own_ref, c_ref, dy_ref, dv_ref, numbers_ref):
    z, dz, v = (ref[...].astype(jnp.float32) for ref in (z_ref, dz_ref, own_ref))
    size, E = z.shape
    c = tile.lanes(jnp.broadcast_to(c_ref[...], (LANES, size)).T, E)
    b, exact = call.inverse(jnp.sum(v * v, axis=1, keepdims=True))
    exact = jnp.where(exact, 1.0, jnp.zeros_like(b))
    r = jnp.sum(dz * v, axis=1, keepdims=True)
    dy = dz - b * r * v
    dy_ref[...] = dy.astype(dy_ref.dtype)
    # From the rounded dy: the main loop sees no other.
    delta = jnp.sum((z + c * v) * dy_ref[...].astype(jnp.float32), axis=1, keepdims=True)
    dv = -(c * dy + b * r * z)
    if call.zero_rule != "add":
        dv -= 2 * (1 - exact) * b * c * r * v

    @pl.when(pl.program_id(3) == 0)
    def _():
        dv_ref[...] = dv

    @pl.when(pl.program_id(3) > 0)
    def _():
        dv_ref[...] += dv

    lane = lax.broadcasted_iota(jnp.int32, (size, LANES), 1)
    numbers_ref[...] = jnp.where(lane == 0, delta, exact).T[:2]
