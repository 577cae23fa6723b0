"""Multi-head attention with or without the exclusive projection, computed by `xsa_kernels`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import xsa_kernels
from xsa_jax.config import AttentionConfig, ModelConfig
from xsa_jax.config.layer_selection import projecting_layers
from xsa_jax.errors import ConfigError
from xsa_jax.model import layers

Array = jax.Array

# Measures the attention of one layer: (q_BTHE, k_BTKE, v_BTKE, z_BTHE, mask, sinks_H, softcap) -> named statistics, where z is the
# output of attention.
Probe = Callable[..., dict[str, Array]]


class Context(NamedTuple):
    """Inputs that all layers of one forward pass share."""

    phases: tuple[Array, Array]  # rotary cosine and sine, each [B or 1, T, 1, E/2]
    segment_ids_BT: Array | None  # int32 index of each token's document; None if a row is one document
    dropout_key: Array | None  # None turns dropout off
    probe: Probe | None
    sharding: xsa_kernels.Sharding  # mesh axes that split batch and heads, if there is a mesh


class Attention(nnx.Module):
    """Causal attention of one layer.

    The module holds only the parameters of its variant, so an SA model has no parameter and no operation of XSA. An SA and an XSA
    model with the same seed start from the same weights.
    """

    def __init__(self, model: ModelConfig, config: AttentionConfig, *, rngs: nnx.Rngs):
        D, H, K, E = model.d_model, config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.projects = projecting_layers(config, model.num_layers)
        self.q = layers.matrix(rngs, (D, H, E), ("embed", "heads", None), layers.fan_in_std(D))
        self.k = layers.matrix(rngs, (D, K, E), ("embed", "kv_heads", None), layers.fan_in_std(D))
        self.v = layers.matrix(rngs, (D, K, E), ("embed", "kv_heads", None), layers.fan_in_std(D))
        self.out = layers.matrix(rngs, (H, E, D), ("heads", None, "embed"), layers.residual_std(H * E, model.num_layers))
        if config.qk_norm:
            self.q_norm = layers.Norm("rmsnorm", E)
            self.k_norm = layers.Norm("rmsnorm", E)
        if config.sinks:
            self.sinks = layers.vector(0.0, (H,), ("heads",))
        if config.value_residual:
            self.value_mix = layers.vector(0.5, (), ())
        if any(self.projects) and config.xsa.strength == "learned":
            self.gate = layers.vector(0.0, (H,), ("heads",))

    def __call__(
        self, x_BTD: Array, v_first_BTKE: Array | None, layer: Array, context: Context
    ) -> tuple[Array, Array | None, dict[str, Array]]:
        """Applies the attention of one layer.

        Args:
          x_BTD: normalised residual stream.
          v_first_BTKE: values of layer 0, or any array of that shape in layer 0; None turns the value residual off.
          layer: int32 scalar, the index of this layer; it may be traced.
          context: inputs that all layers share.

        Returns:
          The addition to the residual stream [B, T, D], the values of layer 0, and the statistics of the probe.
        """
        config, dtype = self.config, x_BTD.dtype
        q_BTHE, k_BTKE, v_BTKE = (layers.linear(x_BTD, weight[...]) for weight in (self.q, self.k, self.v))
        if config.qk_norm:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        q_BTHE, k_BTKE = layers.rotate(q_BTHE, context.phases), layers.rotate(k_BTKE, context.phases)
        if v_first_BTKE is not None:
            v_first_BTKE = jnp.where(layer == 0, v_BTKE, v_first_BTKE)
            v_BTKE = v_BTKE + self.value_mix[...].astype(dtype) * (v_first_BTKE - v_BTKE)

        q_BTHE, k_BTKE, v_BTKE = (checkpoint_name(x, "attention_in") for x in (q_BTHE, k_BTKE, v_BTKE))  # for model.remat

        # XSA uses the v that attention averages, which includes the value residual and is not rotated.
        mask = xsa_kernels.MaskSpec(causal=True, window=config.window or None, segment_ids=context.segment_ids_BT)
        sinks_H = self.sinks[...] if config.sinks else None
        softcap = config.logit_softcap or None

        def attend(xsa: xsa_kernels.Projection | None) -> Array:
            return xsa_kernels.attention(
                q_BTHE, k_BTKE, v_BTKE, mask=mask, xsa=xsa, sinks_H=sinks_H, softcap=softcap,
                sharding=context.sharding, impl=config.impl,
            )  # fmt: skip

        if all(self.projects):
            z_BTHE = attend(self._projection())
        elif not any(self.projects):
            z_BTHE = attend(None)
        else:
            # The scan compiles one body for both kinds of layer. A device runs only the branch that the current layer takes.
            projects = jnp.asarray(self.projects)[layer]
            z_BTHE = jax.lax.cond(projects, lambda: attend(self._projection()), lambda: attend(None))

        stats = {}
        if context.probe is not None:
            stats = context.probe(q_BTHE, k_BTKE, v_BTKE, z_BTHE, mask=mask, sinks_H=sinks_H, softcap=softcap)
        return layers.linear(z_BTHE, self.out[...], num_input_axes=2), v_first_BTKE, stats

    def _projection(self) -> xsa_kernels.Projection:
        xsa = self.config.xsa
        alpha = jnp.tanh(self.gate[...]) if xsa.strength == "learned" else xsa.alpha
        return xsa_kernels.Projection(alpha=alpha, zero_rule=xsa.zero_rule, eps=xsa.eps)


def check_implementation(model: ModelConfig, attention: AttentionConfig, *, segments: bool, seq_len: int, platform: str) -> None:
    """Checks, before anything is compiled, that the attention implementation supports the config on these devices.

    Args:
      model: the `model` group of the config.
      attention: the `attention` group of the config.
      segments: whether attention stays inside documents.
      seq_len: context length T.
      platform: platform of the devices: "cpu", "gpu" or "tpu".

    Raises:
      ConfigError: the implementation lacks a feature. The message names `attention.impl` and the feature.
    """
    features = xsa_kernels.Features(
        dtype=model.dtype,
        head_dim=attention.head_dim,
        causal=True,
        window=attention.window or None,
        segments=segments,
        sinks=attention.sinks,
        softcap=attention.logit_softcap or None,
        lengths=(seq_len, seq_len),
    )
    try:
        xsa_kernels.check(attention.impl, features, device=platform)
    except ValueError as error:
        raise ConfigError(f"attention.impl={attention.impl!r} at data.seq_len={seq_len}: {error}") from None
