"""The projection alone, for serving stacks: decoding with a cache, chunked prefill, pages, ragged batches.

The projection of a token needs the token's y and its own value, and nothing of earlier tokens. So it can follow any attention
kernel, and it adds nothing to the cache.
"""

import jax
import jax.numpy as jnp

from xsa_kernels import reference
from xsa_kernels.arguments import need
from xsa_kernels.spec import Projection, check_projection


def project(y_THE: jax.Array, v_self_TKE: jax.Array, xsa: Projection, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """z of some tokens from their attention output y, computed in float32 and rounded once.

    Args:
      y_THE: attention's output before the output projection, [..., H, E] with any leading axes. Pass it in float32 if the kernel
        can return it: for a token that attends mostly to itself z is a small difference, and the rounding error of y stays whole.
      v_self_TKE: the values of these same tokens, [..., K, E], exactly as attention averaged them: those of this step, after a
        value residual, and as a quantised cache returns them.
      xsa: the projection that the model was trained with.
      dtype: the dtype of z; by default that of `v_self_TKE`.

    Returns:
      z_THE.

    Raises:
      ValueError: when shapes do not fit, naming the argument.
    """
    need(xsa is not None, "xsa", xsa, "a Projection")
    check_projection(xsa)
    (*tokens, H, E), K = y_THE.shape, v_self_TKE.shape[-2]
    need(v_self_TKE.shape == (*tokens, K, E), "v_self_TKE", v_self_TKE.shape, f"{(*tokens, 'K', E)} to fit y_THE {y_THE.shape}")
    need(H % K == 0, "y_THE", f"{H} heads", f"a multiple of the {K} KV heads of v_self_TKE")
    need(jnp.shape(xsa.alpha) in ((), (H,)), "xsa.alpha", jnp.shape(xsa.alpha), f"one number or {(H,)}")
    y_TKGE = y_THE.reshape(*tokens, K, H // K, E).astype(jnp.promote_types(y_THE.dtype, jnp.float32))
    return reference.project(y_TKGE, v_self_TKE, xsa).reshape(y_THE.shape).astype(dtype or v_self_TKE.dtype)
