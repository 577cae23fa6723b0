"""Attention and its weights, and the check of what a call asks for."""

import contextlib
import dataclasses
import importlib.util
import logging
import numbers
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from xsa_kernels import reference, support, xla
from xsa_kernels.spec import CAUSAL, MaskSpec, Projection, check_projection, is_number, need

Impl = Literal["auto", "reference", "xla", "cudnn", "splash", "tokamax", "tpu", "triton", "hopper"]
log = logging.getLogger("xsa_kernels")


# Imported when asked for: loading the kernel compilers takes a moment, and jax has announced the end of one of them.
def _cudnn(*call):
    from xsa_kernels import cudnn

    return cudnn.attention(*call)


def _splash(*call):
    from xsa_kernels import splash

    return splash.attention(*call)


def _tokamax(*call):
    from xsa_kernels import tokamax

    return tokamax.attention(*call)


def _tpu(*call):
    from xsa_kernels import tpu

    return tpu.attention(*call)


def _triton(*call):
    from xsa_kernels.gpu import triton

    return triton.attention(*call)


def _hopper(*call):
    from xsa_kernels.gpu import hopper

    return hopper.attention(*call)


IMPLEMENTATIONS = {
    "reference": reference.attention,
    "xla": xla.attention,
    "cudnn": _cudnn,
    "splash": _splash,
    "tokamax": _tokamax,
    "tpu": _tpu,
    "triton": _triton,
    "hopper": _hopper,
}
DTYPES = ("bfloat16", "float16", "float32", "float64")


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
    impl: Impl = "auto",
) -> jax.Array:
    """Softmax attention, then (with `xsa`) the projection that removes the component along each token's own value.

    y_i = sum_j a_ij v_j;  z_i = y_i - alpha (y_i . v_i) / |v_i|^2 v_i, per head, before the output projection.

    Args:
      q_BTHE: queries, any of `DTYPES`; scores, softmax and projection are float32 (float64 for float64) whatever it is.
      k_BSKE: keys, of the same dtype. H is a multiple of K, and query head h reads KV head h // (H / K).
      v_BSKE: values, like the keys.
      mask: which keys a query sees. Unless it is neither causal nor windowed nor segmented, T = S or `v_self_BTKE` is needed.
      xsa: the projection; None is plain self attention and leaves no trace of it in the program.
      sinks_H: one logit per query head, which takes weight in the softmax and has no value; -inf is none.
      softcap: scores s become softcap * tanh(s / softcap); before the mask and beside the sinks.
      scale: what q . k is multiplied with; E ** -0.5 by default.
      v_self_BTKE: the own values of the T query tokens where they are not `v_BSKE` itself: chunked prefill and decoding. The
        queries are then the last T of the S tokens.
      impl: "auto", or an implementation by name. It honours everything it is given or raises; `check` says what "auto" is.

    Returns:
      z_BTHE in the dtype of q. What all but "reference" keep for the backward pass beside their inputs is named "attention_out",
      "attention_lse" and "attention_c": with the policy `jax.checkpoint_policies.save_only_these_names` of these a rematerialised
      layer runs attention forward once.

    Raises:
      ValueError: at trace time, naming the argument.
    """
    _check_arrays(q_BTHE, k_BSKE, v_BSKE, mask, xsa, sinks_H, v_self_BTKE, scale)
    name = check(
        impl,
        dtype=q_BTHE.dtype,
        head_dim=q_BTHE.shape[-1],
        causal=mask.causal,
        window=mask.window,
        segments=mask.segment_ids is not None,
        sinks=sinks_H is not None,
        softcap=softcap,
        lengths=(q_BTHE.shape[1], k_BSKE.shape[1]),
        xsa=xsa,
    )
    mask, softcap, scale = _plain(q_BTHE, k_BSKE, mask, softcap, scale)
    return IMPLEMENTATIONS[name](q_BTHE, k_BSKE, v_BSKE, v_self_BTKE, mask, xsa, sinks_H, softcap, scale)


def check(
    impl: Impl = "auto",
    *,
    dtype: Any,
    head_dim: int,
    causal: bool = True,
    window: int | None = None,
    segments: bool = False,
    sinks: bool = False,
    softcap: float | None = None,
    tail: bool = False,
    lengths: tuple[int, ...] = (),
    xsa: Projection | None = None,
    device: str | None = None,
) -> str:
    """The implementation that `attention` runs for these features: `impl` itself, or what "auto" picks. Needs no arrays.

    Args:
      impl: as for `attention`, like `softcap`, `xsa` and the parts of a MaskSpec, `causal` and `window`.
      dtype: of q.
      head_dim: E.
      segments: whether there are segment ids.
      sinks: whether there are sinks.
      tail: the queries are fewer than the keys (chunked prefill, decoding); where `lengths` are given, they say that.
      lengths: T and S where they are known; some implementations take only multiples of 128.
      device: the platform that the program will run on, "cpu", "gpu" or "tpu", as `jax.default_backend()` names this machine's.
        None leaves that open: a program may be compiled for another machine, and "auto" takes it for this one.

    Raises:
      ValueError: names the argument that is wrong, or the feature that the implementation cannot honour.
    """
    dtype = _dtype_name(dtype)
    need(_is_size(head_dim), "head_dim", head_dim, "a positive integer")
    sizes = isinstance(lengths, tuple | list) and len(lengths) in (0, 2) and all(_is_size(length) for length in lengths)
    need(sizes, "lengths", lengths, "() or (T, S), positive integers")
    need(device is None or isinstance(device, str), "device", device, "None or a platform, such as jax.default_backend()")
    if lengths:
        tail = lengths[0] != lengths[1]
    _check_numbers(window, softcap)
    check_projection(xsa)
    need(impl in ("auto", *IMPLEMENTATIONS), "impl", impl, f"'auto' or one of {', '.join(IMPLEMENTATIONS)}")
    installed = impl != "tokamax" or importlib.util.find_spec("tokamax") is not None
    need(installed, "impl", "'tokamax', which is not installed", "another, or the package: pip install tokamax")
    asked = support.Asked(dtype, head_dim, causal, window, segments, sinks, softcap, tail, tuple(lengths))
    name = support.pick(asked, device) if impl == "auto" else impl
    lacking = support.lacking(name, asked, device)
    able = [repr(name) for name in IMPLEMENTATIONS if not support.lacking(name, asked, device)]
    need(not lacking, "impl", f"{name!r}, which cannot honour {', '.join(lacking)}", f"one that can: {', '.join(able)}")
    log.info("impl=%r runs %s for %s", impl, name, asked)
    return name


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
    _check_numbers(mask.window, softcap)
    _dtype_name(q_BTHE.dtype)
    T, S = q_BTHE.shape[1], k_BSKE.shape[1]
    need(T <= S or not _is_placed(mask), "q_BTHE", f"{T} queries", f"no more than the {S} keys of k_BSKE")
    mask, softcap, scale = _plain(q_BTHE, k_BSKE, mask, softcap, scale)
    return reference.weights(q_BTHE, k_BSKE, mask, sinks_H, softcap, scale)


def _plain(
    q: jax.Array, k: jax.Array, mask: MaskSpec, softcap: float | None, scale: float | None
) -> tuple[MaskSpec, float | None, float]:
    """The mask, the soft-cap and the scale as Python numbers, with defaults filled in."""
    if mask.window is not None:  # one as wide as the keys hides nothing, and may be too large for an int32
        mask = dataclasses.replace(mask, window=int(mask.window) if mask.window < k.shape[1] else None)
    return mask, None if softcap is None else float(softcap), q.shape[-1] ** -0.5 if scale is None else float(scale)


def _is_placed(mask: MaskSpec) -> bool:
    """Whether it depends on which tokens the queries are."""
    return mask.causal or mask.window is not None or mask.segment_ids is not None


def _dtype_name(dtype: Any) -> str:
    name = None
    with contextlib.suppress(TypeError):  # what is no dtype is none of these either; and NumPy takes None for float64
        name = None if dtype is None else jnp.dtype(dtype).name
    need(name in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    return str(name)


def _is_size(x: object) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool) and int(x) >= 1


def _check_numbers(window: int | None, softcap: float | None) -> None:
    need(window is None or _is_size(window), "mask.window", window, "None or a Python integer of at least 1 (the token itself)")
    need(softcap is None or (is_number(softcap) and softcap > 0), "softcap", softcap, "None or a positive Python number")


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
    if xsa is not None or _is_placed(mask):
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
    kinds = jax.sharding.get_abstract_mesh().axis_types
    need(AxisType.Explicit not in kinds, "the mesh", f"axes of types {kinds}", "AxisType.Auto: jax.make_mesh(..., axis_types=...)")
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


def _check_is_array(name: str, x: object) -> None:
    need(hasattr(x, "shape"), name, type(x).__name__, "an array")
