"""What the forward and the backward kernel do alike to one tile of scores."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.fused import Call

LANES, SUBLANES = 128, 8
LOG2E = 1.4426950408889634
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))
TN = (((0,), (0,)), ((), ()))
_RECIPROCAL = getattr(pltpu, "reciprocal", None) or pl.reciprocal  # jax 0.11 moved it


def dot(a: jax.Array, b: jax.Array, dims) -> jax.Array:
    """A product with float32 sums; float32 inputs are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def scores(call: Call, q: jax.Array, k: jax.Array, keys_first: bool = False) -> jax.Array:
    """log2(e) times the scores, [queries, keys] or the other way round."""
    s = dot(k, q, NT) if keys_first else dot(q, k, NT)
    if call.softcap is None:
        return s * (call.scale * LOG2E)
    return jnp.tanh(s * (call.scale / call.softcap)) * (call.softcap * LOG2E)


def visible(call: Call, q_position: jax.Array, k_position: jax.Array, num_keys: int | None) -> jax.Array | None:
    """Whether a query sees a key, by position; None: it does. `num_keys` where the last key block is padded."""
    seen = None
    if call.causal:
        seen = k_position <= q_position
    if call.window is not None:
        seen = both(seen, k_position > q_position - call.window)
        if not call.causal:
            seen = both(seen, k_position < q_position + call.window)
    if num_keys is not None:
        seen = both(seen, k_position < num_keys)
    return seen


def on_diagonal(k_position: jax.Array, diagonal: jax.Array) -> jax.Array:
    """Where the key is the query's own token; `diagonal` is that token's position, or -1 in rows that keep their diagonal."""
    return k_position == diagonal


def both(a: jax.Array | None, b: jax.Array) -> jax.Array:
    return b if a is None else a & b


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x of positive numbers. Up to v5 an exact division takes ten instructions, most of them for 0, infinity and denormals."""
    if (generation() or 6) > 5:
        return 1 / x
    guess = _RECIPROCAL(x, approx=True)
    return guess * (2 - x * guess)  # Newton


def generation() -> int | None:
    """Of the TPU that a program is traced for, by the mesh or by jax's default backend; None where neither is a TPU."""
    try:
        return pltpu.get_tpu_info().generation
    except ValueError:
        return None


def join(parts: list[jax.Array], axis: int) -> jax.Array:
    """Concatenates what is not empty."""
    return jnp.concatenate([part for part in parts if part.size], axis)


def lanes(x_128: jax.Array, width: int) -> jax.Array:
    """A number per row, the same in each of 128 lanes, in `width` lanes."""
    if width <= x_128.shape[1]:
        return x_128[:, :width]
    return jnp.tile(x_128, (1, -(-width // x_128.shape[1])))[:, :width]


def pack(x_column: jax.Array) -> jax.Array:
    """[n, 1] or [n, 128], with one number in all lanes -> [n / 16, 128].

    In a column 8 numbers fill a register; here 128 do. Of each 128 rows, row 8 j + i is in lanes 8 j to 8 j + 7 of sublane i.
    """
    octet = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1) // SUBLANES
    packed = []
    for first in range(0, len(x_column), LANES):
        registers = [x_column[first + k : first + k + SUBLANES] for k in range(0, LANES, SUBLANES)]
        together = jnp.broadcast_to(registers[0], octet.shape)
        for k, register in enumerate(registers[1:], 1):
            together = jnp.where(octet == k, register, together)
        packed.append(together)
    return jnp.concatenate(packed, axis=0)


def row(packed: jax.Array) -> jax.Array:
    """What was packed, as [1, n]."""
    sublane, lane = (lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), axis) for axis in (0, 1))
    here = sublane == lane % SUBLANES
    registers = [packed[first : first + SUBLANES] for first in range(0, len(packed), SUBLANES)]
    return jnp.concatenate([jnp.sum(jnp.where(here, x, 0), axis=0, keepdims=True) for x in registers], axis=1)


def upright(x_row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 1]."""
    here = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0) == lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    squares = [jnp.where(here, x_row[:, first : first + LANES], 0) for first in range(0, x_row.shape[1], LANES)]
    return jnp.concatenate([jnp.sum(x, axis=1, keepdims=True) for x in squares], axis=0)
