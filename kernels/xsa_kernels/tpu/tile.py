"""What the forward and the backward kernel do alike to one tile of scores."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from xsa_kernels.fused import Call

LANES, SUBLANES = 128, 8
LOG2E = 1.4426950408889634
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))


def dot(a: jax.Array, b: jax.Array, dims) -> jax.Array:
    """A product with float32 sums; float32 inputs are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def scores(call: Call, kq: jax.Array) -> jax.Array:
    """log2(e) times the scores, from the products of keys and queries."""
    if call.softcap is None:
        return kq * (call.scale * LOG2E)
    return jnp.tanh(kq * (call.scale / call.softcap)) * (call.softcap * LOG2E)


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


def row_sum(x: jax.Array) -> jax.Array:
    """The sum over E of each row, where the rows are in lanes: [E, rows] -> [1, rows]."""
    return jnp.sum(x, axis=0, keepdims=True)


def both(a: jax.Array | None, b: jax.Array) -> jax.Array:
    return b if a is None else a & b


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
