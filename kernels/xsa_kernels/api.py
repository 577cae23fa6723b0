"""The public functions: attention, its weights, and the check of what a call asks for. Arguments are checked here alone."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp

from xsa_kernels import device as devices
from xsa_kernels import mesh, reference, registry
from xsa_kernels.arguments import is_number, need
from xsa_kernels.registry import Features, Impl
from xsa_kernels.request import make_request
from xsa_kernels.spec import CAUSAL, MaskSpec, Projection, Sharding, check_projection

log = logging.getLogger("xsa_kernels")


def attention(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    *,
    mask: MaskSpec = CAUSAL,
    xsa: Projection | None = None,
    sinks_H: jax.Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    v_self_BTKE: jax.Array | None = None,
    sharding: Sharding | None = None,
    impl: Impl = "auto",
) -> jax.Array:
    """Softmax attention, then (with `xsa`) the projection that removes the component along each token's own value.

    y_i = sum_j a_ij v_j;  z_i = y_i - alpha (y_i . v_i) / |v_i|^2 v_i, per head, before the output projection.

    Args:
      q_BTHE: queries, of any dtype in `registry.DTYPES`. Scores, softmax and projection are float32 (float64 for float64).
      k_BSKE: keys, of the same dtype. H is a multiple of K, and query head h reads KV head h // (H / K).
      v_BSKE: values, like the keys.
      mask: which keys a query sees. For a causal, windowed or segmented mask, T must equal S, or `v_self_BTKE` must be given.
      xsa: the projection; None is plain self attention and leaves no trace of it in the program.
      sinks_H: one logit per query head, which takes weight in the softmax and has no value; -inf is none.
      softcap: scores s become softcap * tanh(s / softcap); before the mask and beside the sinks.
      scale: what q . k is multiplied by; E ** -0.5 by default.
      v_self_BTKE: the own values of the T query tokens where they are not `v_BSKE` itself: chunked prefill and decoding. The
        queries are then the last T of the S tokens.
      sharding: the meaning of each mesh axis. It is needed under a mesh of several devices, and ignored where there is none.
      impl: "auto", or an implementation by name. It honours everything it is given or raises; `check` says what "auto" is.

    Returns:
      z_BTHE in the dtype of q. Residuals of every implementation except "reference" are named "attention_out", "attention_lse" and
      "attention_c": with the policy `jax.checkpoint_policies.save_only_these_names` of these a rematerialised layer runs attention
      forward once.

    Raises:
      ValueError: at trace time, naming the argument.
    """
    _check_arrays(q_BTHE, k_BSKE, v_BSKE, mask, xsa, sinks_H, v_self_BTKE, scale)
    need(sharding is None or isinstance(sharding, Sharding), "sharding", sharding, "None or a Sharding")
    features = Features(
        dtype=q_BTHE.dtype,
        head_dim=q_BTHE.shape[-1],
        causal=mask.causal,
        window=mask.window,
        segments=mask.segment_ids is not None,
        sinks=sinks_H is not None,
        softcap=softcap,
        lengths=(q_BTHE.shape[1], k_BSKE.shape[1]),
    )
    mask, softcap, scale = _plain(q_BTHE, k_BSKE, mask, softcap, scale)
    request = make_request(
        q_BTHE,
        k_BSKE,
        v_BSKE,
        mask=mask,
        xsa=xsa,
        scale=scale,
        sinks_H=sinks_H,
        softcap=softcap,
        v_self_BTKE=v_self_BTKE,
    )
    mesh.check(sharding, request)
    return _choose(impl, features, platform=devices.platform(request)).load()(request, sharding)


def check(impl: Impl, features: Features, device: str | None = None) -> str:
    """The implementation that `attention` runs for these features: `impl` itself, or what "auto" takes. Needs no arrays.

    Args:
      impl: as for `attention`.
      features: what the call asks for.
      device: the platform that the program will run on, "cpu", "gpu" or "tpu". None leaves that open: a program may be compiled for
        another machine, and "auto" takes the platform of the ambient mesh, or else of this machine.

    Raises:
      ValueError: names the argument that is wrong, or the feature that the implementation cannot honour.
    """
    need(isinstance(features, Features), "features", features, "a Features")
    need(device is None or isinstance(device, str), "device", device, "None or a platform, such as jax.default_backend()")
    return _choose(impl, features, platform=device or devices.platform(), device=device).name


def _choose(impl: Impl, features: Features, platform: str, device: str | None = None) -> registry.Implementation:
    chosen = registry.choose(impl, features, devices.kernel_platform(platform), device)
    log.info("impl=%r runs %s for %s", impl, chosen.name, features)
    return chosen


def weights(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    mask: MaskSpec = CAUSAL,
    sinks_H: jax.Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> jax.Array:
    """The attention weights a_ij, for analysis. With sinks a row sums to less than 1.

    Args:
      q_BTHE, k_BSKE, sinks_H, softcap, scale: as for `attention`.
      mask: as for `attention`; the queries are the last T of the S tokens.

    Returns:
      p_BKGTS in float32 (float64 for float64).

    Raises:
      ValueError: naming the argument.
    """
    _check_queries_and_keys(q_BTHE, k_BSKE, mask, sinks_H, scale)
    (_, T, _, E), S = q_BTHE.shape, k_BSKE.shape[1]
    Features(dtype=q_BTHE.dtype, head_dim=E, window=mask.window, softcap=softcap)
    need(T <= S or not _depends_on_position(mask), "q_BTHE", f"{T} queries", f"no more than the {S} keys of k_BSKE")
    mask, softcap, scale = _plain(q_BTHE, k_BSKE, mask, softcap, scale)
    return reference.weights(q_BTHE, k_BSKE, mask, sinks_H, softcap, scale)


def _plain(
    q: jax.Array, k: jax.Array, mask: MaskSpec, softcap: float | None, scale: float | None
) -> tuple[MaskSpec, float | None, float]:
    """The mask, the soft-cap and the scale as Python numbers, with defaults filled in."""
    if mask.window is not None:  # one as wide as the keys hides nothing, and may be too large for an int32
        mask = dataclasses.replace(mask, window=int(mask.window) if mask.window < k.shape[1] else None)
    return mask, None if softcap is None else float(softcap), q.shape[-1] ** -0.5 if scale is None else float(scale)


def _depends_on_position(mask: MaskSpec) -> bool:
    """Whether what a query sees depends on which token it is."""
    return mask.causal or mask.window is not None or mask.segment_ids is not None


def _check_arrays(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: MaskSpec,
    xsa: Projection | None,
    sinks: jax.Array | None,
    v_self: jax.Array | None,
    scale: float | None,
) -> None:
    check_projection(xsa)
    _check_queries_and_keys(q, k, mask, sinks, scale)
    (B, T, H, E), (_, S, K, _) = q.shape, k.shape
    _check_is_array("v_BSKE", v)
    need(v.shape == k.shape, "v_BSKE", v.shape, f"the shape of k_BSKE, {k.shape}")
    need(v.dtype == q.dtype, "v_BSKE", v.dtype, f"the dtype of q_BTHE, {q.dtype}")
    if v_self is not None:
        _check_is_array("v_self_BTKE", v_self)
        need(v_self.shape == (B, T, K, E), "v_self_BTKE", v_self.shape, f"{(B, T, K, E)}")
        need(v_self.dtype == q.dtype, "v_self_BTKE", v_self.dtype, f"the dtype of q_BTHE, {q.dtype}")
    if xsa is not None or _depends_on_position(mask):
        need(
            T == S or (T < S and v_self is not None),
            "v_self_BTKE",
            "None" if v_self is None else v_self.shape,
            f"the own values of the last {T} of {S} tokens, because q_BTHE has {T} and k_BSKE has {S}",
        )
    if xsa is not None:
        need(jnp.shape(xsa.alpha) in ((), (H,)), "xsa.alpha", jnp.shape(xsa.alpha), f"one number or {(H,)}")


def _check_queries_and_keys(q: jax.Array, k: jax.Array, mask: MaskSpec, sinks: jax.Array | None, scale: float | None) -> None:
    need(isinstance(mask, MaskSpec), "mask", mask, "a MaskSpec")
    _check_is_array("q_BTHE", q)
    _check_is_array("k_BSKE", k)
    mesh.check_no_explicit_axes(q, k)
    need(q.ndim == 4 and 0 not in q.shape[1:], "q_BTHE", q.shape, "four axes [B, T, H, E], of which only B may be empty")
    B, _, H, E = q.shape
    need(k.ndim == 4 and k.shape[0] == B and k.shape[3] == E, "k_BSKE", k.shape, f"[{B}, S, K, {E}] to fit q_BTHE {q.shape}")
    S, K = k.shape[1:3]
    need(S > 0 and K > 0, "k_BSKE", k.shape, "no empty axis")
    need(H % K == 0, "q_BTHE", f"{H} heads", f"a multiple of the {K} KV heads of k_BSKE")
    need(k.dtype == q.dtype, "k_BSKE", k.dtype, f"the dtype of q_BTHE, {q.dtype}")
    ids = mask.segment_ids
    if ids is not None:
        _check_is_array("mask.segment_ids", ids)
        need(ids.shape == (B, S), "mask.segment_ids", ids.shape, f"{(B, S)}")
        need(ids.dtype == jnp.int32, "mask.segment_ids", ids.dtype, "int32")
    need(scale is None or is_number(scale), "scale", scale, "None or a number that is known when the program is traced")
    if sinks is not None:
        _check_is_array("sinks_H", sinks)
        need(sinks.shape == (H,), "sinks_H", sinks.shape, f"{(H,)}")
        need(jnp.issubdtype(sinks.dtype, jnp.floating), "sinks_H", sinks.dtype, "a floating dtype")


def _check_is_array(name: str, x: Any) -> None:
    need(hasattr(x, "shape"), name, type(x).__name__, "an array")
