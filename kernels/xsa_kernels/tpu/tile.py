"""Operations on one tile of scores that the forward and the backward kernel share. Keys are in sublanes, queries in lanes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from xsa_kernels import spec
from xsa_kernels.request import Settings
from xsa_kernels.spec import LOG2E

LANES, SUBLANES = 128, 8
# Dimension numbers of `dot`: a @ b.T and a @ b.
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))


class Origin(NamedTuple):
    """The positions of the first query and of the first key of a pair of blocks."""

    query: jax.Array
    key: jax.Array


def dot(a: jax.Array, b: jax.Array, dims: lax.DotDimensionNumbers) -> jax.Array:
    """A product with float32 sums; float32 inputs are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def base2_scores(settings: Settings, kq: jax.Array) -> jax.Array:
    """log2(e) times the scores, from the products of keys and queries: the hardware's exponential is a power of 2."""
    if settings.softcap is None:
        return kq * (settings.scale * LOG2E)
    return jnp.tanh(kq * (settings.scale / settings.softcap)) * (settings.softcap * LOG2E)


def visible(settings: Settings, q_position: jax.Array, k_position: jax.Array, num_keys: int | None) -> jax.Array | None:
    """Whether a query sees a key, by position; None: every query sees every key. `num_keys` is given where keys are padded."""
    shown = spec.visible(settings, q_position, k_position)
    return shown if num_keys is None else both(shown, k_position < num_keys)


def is_dropped(k_position: jax.Array, dropped_key: jax.Array) -> jax.Array:
    """Where a weight on the diagonal is left out: `dropped_key` is the query's own position, or -1 if it keeps its diagonal."""
    return k_position == dropped_key


def row_sum(x: jax.Array) -> jax.Array:
    """The sum over E of each row, where the rows are in lanes: [E, rows] -> [1, rows]."""
    return jnp.sum(x, axis=0, keepdims=True)


def both(a: jax.Array | None, b: jax.Array) -> jax.Array:
    """a & b, where None is true everywhere."""
    return b if a is None else a & b


def generation() -> int | None:
    """The generation of the TPU that a program is traced for, by the mesh or by jax's default backend; None if neither is a TPU."""
    try:
        return pltpu.get_tpu_info().generation
    except ValueError:
        return None


def concatenate_nonempty(parts: list[jax.Array], axis: int) -> jax.Array:
    return jnp.concatenate([part for part in parts if part.size], axis)


def repeat_lanes(x_128: jax.Array, width: int) -> jax.Array:
    """`x_128` holds one number per row in each of its 128 lanes; the result holds it in `width` lanes."""
    if width <= x_128.shape[1]:
        return x_128[:, :width]
    return jnp.tile(x_128, (1, -(-width // x_128.shape[1])))[:, :width]
