"""Similarity between the output of attention and the token's value: the measurements that motivate XSA (arXiv 2603.09078).

All statistics are computed on one batch of text, per layer and query head, in float32. Notation: a_ij are the attention weights,
v_i is the value of token i in the KV head that the query head reads, y_i = sum_j a_ij v_j, and z_i is the output of the model's
attention, which equals y_i without XSA.

A token is counted if it sees at least one other token. For any other token (the first of a row or document, every token under a
window of 1) y is a multiple of v whatever the model learned, which would only pull the means towards 1.

  value_cosine        cos(v_i, v_j) over all pairs j < i in which i sees j: same row, same document, inside the window.
                      Without a window that is every pair i != j of a document, the cosine being symmetric.
  self_weight         a_ii. With attention sinks the weights of a row sum to less than 1.
  cosine              cos(y_i, v_i).
  cosine_xsa          cos(z_i, v_i), which full XSA makes 0.
  centred_cosine      cos(y_i - mean y, v_i - mean v), each mean over all counted tokens of the batch, per layer and head. A
                      vector that all values share makes every raw cosine large without any token resembling itself;
                      centring removes it.
  centred_cosine_xsa  cos(z_i - mean z, v_i - mean v). XSA does not determine it: z is orthogonal to v, not to v - mean v.
  removed             |y_i - z_i| / |y_i|.

Means are over counted tokens (over pairs for value_cosine), with equal weights. The cosine with a zero vector is 0. So is the
cosine of a z shorter than 1e-5 |y|: where a_ii is nearly 1, only rounding errors of y remain after XSA, in an arbitrary direction.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

import xsa_kernels
from xsa_jax.model import layers
from xsa_jax.model.transformer import Model, Params, build
from xsa_jax.train.loss import shift

Array = jax.Array


def similarity(model: Model, params: Params, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The statistics of the module docstring, each float32 [L, H]; nan where no token is counted.

    The forward pass runs in float32 for every compute type, so that rounding errors do not look like a removed component. Memory
    holds one [T, T] array per query head of one KV head; it does not grow with layers, rows or KV heads.

    Args:
      model: description of the decoder.
      params: weights of the decoder, on any devices.
      batch: batch of a `Loader`: "tokens", int32 [B, T+1], and "segment_ids" of that shape where documents are isolated.
    """
    float32_model = build(dataclasses.replace(model.config, dtype="float32", remat="none"), model.attention)

    @jax.jit
    def measure(params: Params, batch: Mapping[str, Array]) -> dict[str, Array]:
        inputs_BT, _, segment_ids_BT, _ = shift(dict(batch))
        return float32_model.bind(params)(inputs_BT, segment_ids_BT, probe=probe, whole_batch=True)[1]

    with jax.default_matmul_precision("highest"):
        return jax.device_get(measure(params, dict(batch)))


def probe(
    q_BTHE: Array,
    k_BTKE: Array,
    v_BTKE: Array,
    z_BTHE: Array,
    *,
    mask: xsa_kernels.MaskSpec,
    sinks_H: Array | None,
    softcap: float | None,
) -> dict[str, Array]:
    """The statistics of one layer, each float32 [H], as an `xsa_jax.model.attention.Probe`."""
    B, T, H, E = q_BTHE.shape
    K = v_BTKE.shape[2]
    v_BTKE, z_BTHE = v_BTKE.astype(jnp.float32), z_BTHE.astype(jnp.float32)
    y_BTHE, self_BTH = _attend(q_BTHE, k_BTKE, v_BTKE, mask, sinks_H, softcap)
    removed_BTH = _ratio(_norm(y_BTHE - z_BTHE), _norm(y_BTHE))
    z_above_rounding_BTHE = jnp.where((_norm(z_BTHE) > 1e-5 * _norm(y_BTHE))[..., None], z_BTHE, 0)
    v_self_BTHE = jnp.broadcast_to(v_BTKE[:, :, :, None], (B, T, K, H // K, E)).reshape(B, T, H, E)

    first_BT = _first_visible(mask, B, T)
    counted_BT = (first_BT < jnp.arange(T)).astype(jnp.float32)
    mean = functools.partial(_mean, weights_BT=counted_BT)

    def centred(x_BTHE: Array) -> Array:
        return x_BTHE - mean(x_BTHE)

    return {
        "value_cosine": jnp.repeat(_pair_cosine(v_BTKE, first_BT), H // K),
        "self_weight": mean(self_BTH),
        "cosine": mean(_cosine(y_BTHE, v_self_BTHE)),
        "cosine_xsa": mean(_cosine(z_above_rounding_BTHE, v_self_BTHE)),
        "centred_cosine": mean(_cosine(centred(y_BTHE), centred(v_self_BTHE))),
        "centred_cosine_xsa": mean(_cosine(centred(z_BTHE), centred(v_self_BTHE))),
        "removed": mean(removed_BTH),
    }


def _attend(
    q_BTHE: Array,
    k_BTKE: Array,
    v_BTKE: Array,
    mask: xsa_kernels.MaskSpec,
    sinks_H: Array | None,
    softcap: float | None,
) -> tuple[Array, Array]:
    """y [B, T, H, E] and a_ii [B, T, H], by the definition of attention. N = B * K; each n is computed in turn."""
    B, T, H, E = q_BTHE.shape
    K = k_BTKE.shape[2]
    G = H // K
    q_NTGE = jnp.moveaxis(q_BTHE.reshape(B, T, K, G, E), 2, 1).reshape(B * K, T, G, E)
    k_NTE, v_NTE = (jnp.moveaxis(x, 2, 1).reshape(B * K, T, E) for x in (k_BTKE, v_BTKE))

    def attend_one(n: Array) -> tuple[Array, Array]:
        segments = mask.segment_ids
        row = dataclasses.replace(mask, segment_ids=None if segments is None else segments[n // K][None])
        sinks_G = None if sinks_H is None else sinks_H.reshape(K, G)[n % K]
        p_GTS = xsa_kernels.weights(q_NTGE[n][None], k_NTE[n][None, :, None], row, sinks_G, softcap)[0, 0]
        y_TGE = jnp.einsum("GTS,SE->TGE", p_GTS, v_NTE[n], precision="highest")
        return y_TGE, jnp.diagonal(p_GTS, axis1=1, axis2=2).T

    y_NTGE, self_NTG = jax.lax.map(attend_one, jnp.arange(B * K))
    y_BTHE = jnp.moveaxis(y_NTGE.reshape(B, K, T, G, E), 1, 2).reshape(B, T, H, E)
    self_BTH = jnp.moveaxis(self_NTG.reshape(B, K, T, G), 1, 2).reshape(B, T, H)
    return y_BTHE, self_BTH


def _first_visible(mask: xsa_kernels.MaskSpec, B: int, T: int) -> Array:
    """Position of the first token that each token sees, int32 [B, T]. It also sees all later tokens up to itself."""
    index = jnp.arange(T, dtype=jnp.int32)
    first_BT = jnp.zeros((B, T), jnp.int32)
    if mask.segment_ids is not None:
        first_BT = index - layers.positions(mask.segment_ids)
    if mask.window is not None:
        first_BT = jnp.maximum(first_BT, index - (mask.window - 1))
    return first_BT


def _pair_cosine(v_BTKE: Array, first_BT: Array) -> Array:
    """Mean of cos(v_i, v_j) over first_i <= j < i, [K].

    With u = v / |v| and its cumulative sum U, the pairs of token i sum to u_i . (U_(i-1) - U_(first_i - 1)), so no T x T array is
    needed.
    """
    u_BTKE = _ratio(v_BTKE, _norm(v_BTKE)[..., None])
    before_BTKE = jnp.cumsum(u_BTKE, axis=1) - u_BTKE  # U_(i-1)
    sums_BTKE = before_BTKE - jnp.take_along_axis(before_BTKE, first_BT[:, :, None, None], axis=1)
    pairs = jnp.sum(jnp.arange(v_BTKE.shape[1]) - first_BT).astype(jnp.float32)
    return jnp.einsum("BTKE,BTKE->K", u_BTKE, sums_BTKE, precision="highest") / pairs


def _mean(x: Array, weights_BT: Array) -> Array:
    """Weighted mean over the first two axes."""
    return jnp.einsum("BT...,BT->...", x, weights_BT, precision="highest") / jnp.sum(weights_BT)


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=-1))


def _ratio(x: Array, size: Array) -> Array:
    return jnp.where(size > 0, x / jnp.where(size > 0, size, 1), 0)


def _cosine(x: Array, y: Array) -> Array:
    return _ratio(jnp.sum(x * y, axis=-1), _norm(x) * _norm(y))
