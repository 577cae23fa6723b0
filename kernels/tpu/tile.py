"""What the forward and the backward kernel do alike to one tile of scores."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels.fused import Call

LANES = 128
LOG2E = 1.4426950408889634
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))
TN = (((0,), (0,)), ((), ()))


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


def join(parts: list[jax.Array], axis: int) -> jax.Array:
    """Concatenates what is not empty."""
    return jnp.concatenate([part for part in parts if part.size], axis)


def lanes(x_128: jax.Array, width: int) -> jax.Array:
    """A number per row, the same in each of 128 lanes, in `width` lanes."""
    if width <= x_128.shape[1]:
        return x_128[:, :width]
    return jnp.tile(x_128, (1, -(-width // x_128.shape[1])))[:, :width]


def row(x_column: jax.Array) -> jax.Array:
    """[n, 1] -> [1, n]."""
    n = min(len(x_column), LANES)
    rows = (jnp.sum(_diagonal(x_column[first : first + n]), axis=0, keepdims=True) for first in range(0, len(x_column), n))
    return jnp.concatenate(list(rows), axis=1)


def column(x_row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 1]."""
    n = min(x_row.shape[1], LANES)
    columns = (jnp.sum(_diagonal(x_row[:, first : first + n]), axis=1, keepdims=True) for first in range(0, x_row.shape[1], n))
    return jnp.concatenate(list(columns), axis=0)


def _diagonal(x: jax.Array) -> jax.Array:
    """A row or a column as a diagonal matrix."""
    n = x.size
    here = lax.broadcasted_iota(jnp.int32, (n, n), 0) == lax.broadcasted_iota(jnp.int32, (n, n), 1)
    return jnp.where(here, x, 0)
