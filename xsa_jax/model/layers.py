"""The basic layers of the decoder: parameters with logical axes, norms, feed-forward, rotary embedding, dropout."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from xsa_jax.config import ModelConfig
from xsa_jax.parallel.mesh import traced_for

Array = jax.Array


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float) -> nnx.Param:
    """A float32 parameter drawn from N(0, std^2). `axes` gives the logical axis of each dimension, see `xsa_jax.parallel.mesh`."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def vector(value: float, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """A float32 parameter that starts constant. It draws no random number, so the other parameters start the same without it."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


def fan_in_std(fan_in: int) -> float:
    """Initial standard deviation of a matrix that preserves the variance of its input."""
    return 1.0 / math.sqrt(fan_in)


def residual_std(fan_in: int, num_layers: int) -> float:
    """Initial standard deviation of the two matrices per layer that write to the residual stream.

    It keeps the variance of the stream O(1) at any depth (GPT-2, NanoGPT).
    """
    return fan_in_std(fan_in) / math.sqrt(2 * num_layers)


def tied_head_scale(vocab_size: int, d_model: int, std: float) -> float:
    """Initial scale of the norm before an output matrix that is also the embedding.

    The residual stream holds the embedding of its own token, so that a norm with scale 1 gives this token a logit of up to
    `std * d_model`. That is 31 at width 1536, and the initial loss is far above ln V. With the scale of this function the logit is
    at most ln(V) / 2, and the probability of the token is at most about 1 / sqrt(V).

    Args:
      vocab_size: number of tokens V.
      d_model: width of the residual stream.
      std: initial standard deviation of the embedding.
    """
    return min(1.0, math.log(vocab_size) / (2 * std * d_model))


def linear(x: Array, weight: Array, num_input_axes: int = 1, dtype: DTypeLike | None = None) -> Array:
    """x [..., *inputs] times weight [*inputs, *outputs] in the type of x; the result has the type `dtype`, or that of x.

    `num_input_axes` is the number of input axes.

    On a CPU both operands of the product are flat matrices: with more axes the gradient of the weight costs two transposed copies.
    On a TPU mesh flat operands would make XLA divide more products into collective permutes.
    """
    weight = weight.astype(x.dtype)
    if traced_for() != "cpu":
        return jnp.tensordot(x, weight, num_input_axes, preferred_element_type=dtype)
    inputs, outputs = weight.shape[:num_input_axes], weight.shape[num_input_axes:]
    flat = weight.reshape(math.prod(inputs), math.prod(outputs))
    product = jnp.matmul(x.reshape(-1, math.prod(inputs)), flat, preferred_element_type=dtype)
    return product.reshape(*x.shape[: x.ndim - num_input_axes], *outputs)


class Norm(nnx.Module):
    """LayerNorm or RMSNorm over the last axis, with a scale that starts at `start`, and no bias. Statistics are float32.

    The variance is E[x^2] - E[x]^2, as in `flax.nnx.LayerNorm`: both sums are made in one pass over x.
    """

    def __init__(self, kind: str, width: int, start: float = 1.0):
        self.kind = kind
        self.scale = vector(start, (width,), (None,))

    def __call__(self, x: Array) -> Array:
        """Normalises x [..., width]; the result has the type of x."""
        y = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
        if self.kind == "layernorm":
            mean = jnp.mean(y, axis=-1, keepdims=True)
            variance, y = jnp.maximum(variance - jnp.square(mean), 0), y - mean
        y = y * jax.lax.rsqrt(variance + 1e-6)
        return (y * self.scale[...]).astype(x.dtype)


def _with_derivative(function: Callable[[Array], Array], derivative: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """An elementwise function of which the backward pass keeps one number per element, its derivative.

    Without it a scan over layers stacks each intermediate value of the derivative's formula, which on a CPU costs more than the
    arithmetic.
    """
    wrapped = jax.custom_jvp(lambda x: function(x))
    wrapped.defjvp(lambda primals, tangents: (wrapped(*primals), derivative(*primals) * tangents[0]))
    return wrapped


def _gelu_derivative(x: Array) -> Array:
    c = math.sqrt(2 / math.pi)
    t = jnp.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x**2)


def _silu_derivative(x: Array) -> Array:
    s = jax.nn.sigmoid(x)
    return s * (1 + x * (1 - s))


gelu = _with_derivative(jax.nn.gelu, _gelu_derivative)  # the tanh approximation (arXiv 1606.08415)
silu = _with_derivative(jax.nn.silu, _silu_derivative)


class MLP(nnx.Module):
    """The feed-forward: GELU(x W) W', or SwiGLU (SiLU(x G) * x W) W'."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, F = config.d_model, config.d_ff
        self.kind = config.mlp
        self.up = matrix(rngs, (D, F), ("embed", "mlp"), fan_in_std(D))
        if self.kind == "swiglu":
            self.gate = matrix(rngs, (D, F), ("embed", "mlp"), fan_in_std(D))
        self.down = matrix(rngs, (F, D), ("mlp", "embed"), residual_std(F, config.num_layers))

    def __call__(self, x_BTD: Array) -> Array:
        """The output [B, T, D], in the type of x_BTD."""
        h_BTF = linear(x_BTD, self.up[...])
        h_BTF = silu(linear(x_BTD, self.gate[...])) * h_BTF if self.kind == "swiglu" else gelu(h_BTF)
        return linear(h_BTF, self.down[...])


def positions(segment_ids_BT: Array) -> Array:
    """Position of each token in its document, int32 [B, T]. `segment_ids_BT` must not decrease along T."""
    T = segment_ids_BT.shape[1]
    index = jnp.arange(T, dtype=jnp.int32)
    starts = jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1] - 1) != 0
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def rope_phases(position_BT: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cosine and sine of position * theta^(-2i / E), float32 [B, T, 1, E/2] (RoFormer, arXiv 2104.09864).

    The phases are float32 for every compute type, because positions above 256 collide in bfloat16.
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = position_BT.astype(jnp.float32)[..., None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHE: Array, phases: tuple[Array, Array]) -> Array:
    """Rotates the pairs (i, i + E/2) of each head by `phases`, the cosine and sine of the position.

    On a TPU the halves of a head change places by a product with a permutation matrix, which is exact. Arrays of half a head fill
    half of the lanes.
    """
    cos, sin = phases
    E = x_BTHE.shape[-1]
    if traced_for() == "tpu":
        # Products of float32 numbers are rounded to bfloat16 unless the highest precision is asked for.
        exchange_EE = jnp.roll(jnp.eye(E, dtype=x_BTHE.dtype), E // 2, axis=1)
        exchanged_BTHE = jnp.matmul(x_BTHE, exchange_EE, precision=jax.lax.Precision.HIGHEST).astype(jnp.float32)
        cos, sin = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
        return (x_BTHE.astype(jnp.float32) * cos + exchanged_BTHE * sin).astype(x_BTHE.dtype)
    a, b = jnp.split(x_BTHE.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHE.dtype)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zeroes elements with probability `rate` and scales the rest. Without a key it is the identity."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)
