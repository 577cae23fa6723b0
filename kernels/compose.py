"""Any attention that returns y, and the XSA projection in float32 behind it."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels import blockwise, reference
from kernels.spec import MaskSpec, Projection

BLOCK = 512


def xla(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    v_self_BTKE: jax.Array | None,
    mask: MaskSpec,
    xsa: Projection | None,
    sinks_H: jax.Array | None,
    softcap: float | None,
    scale: float,
) -> jax.Array:
    """`blockwise`, for every backend that XLA compiles for."""
    K = k_BSKE.shape[2]
    sinks_KG = None if sinks_H is None else sinks_H.reshape(K, -1)
    # In float32 from here on, so that what v gets from the average and from the projection, which nearly cancel, is added before
    # it is rounded.
    v_BSKE = v_BSKE.astype(jnp.promote_types(v_BSKE.dtype, jnp.float32))
    skip_BTK = _fully_projected(v_BSKE, xsa) if xsa is not None and v_self_BTKE is None else None
    y_BTKGE = _blockwise(reference.group(q_BTHE, K), k_BSKE, v_BSKE, mask, skip_BTK, sinks_KG, softcap, scale)
    z_BTKGE = y_BTKGE if xsa is None else reference.project(y_BTKGE, v_BSKE if v_self_BTKE is None else v_self_BTKE, xsa)
    return z_BTKGE.reshape(q_BTHE.shape).astype(q_BTHE.dtype)


def _fully_projected(v_BTKE, xsa: Projection) -> jax.Array | None:
    """Where nothing along v is left in z, bool [B, T, K]; None: nowhere that can be known.

    There p_ii v_i need not enter y_i at all. Left out, it cannot make z the small difference of two large rounded numbers that it
    would be, in bfloat16, for a token that attends mostly to itself; and z of the first token of a document is exactly 0.
    """
    if not (isinstance(xsa.alpha, int | float) and xsa.alpha == 1) or xsa.zero_rule == "add":
        return None
    least = xsa.eps if xsa.zero_rule == "clamp" else jnp.finfo(jnp.float32).tiny
    return jnp.sum(v_BTKE * v_BTKE, axis=-1) >= least


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _blockwise(q_BTKGE, k_BSKE, v_BSKE, mask, skip_BTK, sinks_KG, softcap, scale):
    """y in float32 or better, for v in float32 or better but of the precision of q."""
    return _blockwise_fwd(q_BTKGE, k_BSKE, v_BSKE, mask, skip_BTK, sinks_KG, softcap, scale)[0]


def _blockwise_fwd(q_BTKGE, k_BSKE, v_BSKE, mask, skip_BTK, sinks_KG, softcap, scale):
    v_BSKE = v_BSKE.astype(k_BSKE.dtype)
    y_BTKGE, lse_BTKG = blockwise.forward(q_BTKGE, k_BSKE, v_BSKE, mask, skip_BTK, sinks_KG, softcap, scale, BLOCK)
    # Saved, these two spare the backward pass of a rematerialised layer a second forward pass of attention.
    y_BTKGE = checkpoint_name(y_BTKGE, "attention_out")
    lse_BTKG = checkpoint_name(lse_BTKG, "attention_out")
    return y_BTKGE, (q_BTKGE, k_BSKE, v_BSKE, mask, skip_BTK, sinks_KG, y_BTKGE, lse_BTKG)


def _blockwise_bwd(softcap, scale, residuals, dy_BTKGE):
    q_BTKGE, k_BSKE, v_BSKE, mask, skip_BTK, sinks_KG, y_BTKGE, lse_BTKG = residuals
    dy_BTKGE = dy_BTKGE.astype(q_BTKGE.dtype)
    # delta must come from the very dy, rounded, that the products below see, or their errors no longer cancel.
    delta_BTKG = jnp.sum(y_BTKGE * dy_BTKGE, axis=-1)
    dq, dk, dv = blockwise.backward(q_BTKGE, k_BSKE, v_BSKE, mask, skip_BTK, softcap, scale, BLOCK, lse_BTKG, dy_BTKGE, delta_BTKG)
    dsinks_KG = None
    if sinks_KG is not None:
        dsinks_KG = -jnp.sum(jnp.exp(sinks_KG - lse_BTKG) * delta_BTKG, axis=(0, 1)).astype(sinks_KG.dtype)
    return dq.astype(q_BTKGE.dtype), dk.astype(k_BSKE.dtype), dv, None, None, dsinks_KG


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)


def cudnn(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    v_self_BTKE: jax.Array | None,
    mask: MaskSpec,
    xsa: Projection | None,
    sinks_H: jax.Array | None,
    softcap: float | None,
    scale: float,
) -> jax.Array:
    """NVIDIA's cuDNN flash attention as jax ships it. `api.check` has refused what it cannot honour."""
    window = None if mask.window is None else (mask.window - 1, 0)
    try:
        y_BTHE = jax.nn.dot_product_attention(
            q_BTHE, k_BSKE, v_BSKE, scale=scale, is_causal=mask.causal, local_window_size=window, implementation="cudnn"
        )
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(f"impl: found 'cudnn', which refuses: {error}. Expected 'xla', or a machine that has it") from error
    if xsa is None:
        return y_BTHE
    y_BTKGE = reference.group(y_BTHE, k_BSKE.shape[2]).astype(jnp.float32)
    return (
        reference.project(y_BTKGE, v_BSKE if v_self_BTKE is None else v_self_BTKE, xsa).reshape(q_BTHE.shape).astype(q_BTHE.dtype)
    )
