"""The decoder: embedding, scanned blocks, final norm.

NNX describes the model (`Transformer`). Training and evaluation hold plain parameter trees and bind them by `Model.bind(params)`,
so jit, grad, sharding and checkpoints see only nested dicts of arrays.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from xsa_jax.config import AttentionConfig, ModelConfig
from xsa_jax.model import layers
from xsa_jax.model.attention import Attention, Context, Probe
from xsa_jax.parallel.mesh import Axes, VocabShard, attention_sharding, constrain, with_vocab_table

Array = jax.Array
Params = dict[str, Any]

_EMBED_STD = 0.02  # GPT-2's


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention: AttentionConfig, *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.attention_norm = layers.Norm(config.norm, config.d_model)
        self.attention = Attention(config, attention, rngs=rngs)
        self.mlp_norm = layers.Norm(config.norm, config.d_model)
        self.mlp = layers.MLP(config, rngs=rngs)

    def __call__(
        self, x_BTD: Array, v_first_BTKE: Array | None, layer: Array, context: Context
    ) -> tuple[Array, Array | None, dict[str, Array]]:
        """Applies the layer to the residual stream x_BTD. The arguments and the other results are those of `Attention`."""
        attention_key = mlp_key = None
        if context.dropout_key is not None:
            attention_key, mlp_key = jax.random.split(jax.random.fold_in(context.dropout_key, layer))
        x_BTD = checkpoint_name(constrain(x_BTD, "batch", None, None), "layer_in")
        out_BTD, v_first_BTKE, stats = self.attention(self.attention_norm(x_BTD), v_first_BTKE, layer, context)
        x_BTD = checkpoint_name(x_BTD + layers.dropout(out_BTD, self.dropout, attention_key), "mlp_in")
        x_BTD = x_BTD + layers.dropout(self.mlp(self.mlp_norm(x_BTD)), self.dropout, mlp_key)
        return constrain(x_BTD, "batch", None, None), v_first_BTKE, stats


class Transformer(nnx.Module):
    """A decoder-only language model. Parameters are float32, and activations have the type `config.dtype`."""

    def __init__(self, config: ModelConfig, attention: AttentionConfig, unroll: int, *, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.d_model
        self.config = config
        self.attention = attention
        self.unroll = unroll
        self.embed = layers.matrix(rngs, (V, D), ("vocab", None), _EMBED_STD)
        if config.embed_norm:
            self.embed_norm = layers.Norm(config.norm, D)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, attention, rngs=rngs)

        self.blocks = stack(rngs)
        if config.tie_embeddings:
            self.final_norm = layers.Norm(config.norm, D, start=layers.tied_head_scale(V, D, _EMBED_STD))
        else:
            self.final_norm = layers.Norm(config.norm, D)
            self.unembed = layers.matrix(rngs, (D, V), (None, "vocab"), 1 / D)  # logits of 1 / sqrt(D), as in muP

    def __call__(
        self,
        tokens_BT: Array,
        segment_ids_BT: Array | None = None,
        *,
        dropout_key: Array | None = None,
        probe: Probe | None = None,
        whole_batch: bool = False,
    ) -> tuple[Array, dict[str, Array]]:
        """Runs the decoder up to its final norm.

        Args:
          tokens_BT: int32 token ids.
          segment_ids_BT: int32 index of each token's document, never decreasing along T. A token attends only to its document, and
            positions restart with each document. None: a row is one document.
          dropout_key: random key of dropout; None turns dropout off.
          probe: function that measures each layer, see `xsa_jax.model.attention.Probe`.
          whole_batch: whether every device of a mesh computes all rows, as for a batch size that the mesh does not divide.

        Returns:
          The normalised last hidden state [B, T, D] in the compute type, for `logits` or a chunked loss, and the statistics of
          the probe stacked over layers ({} without a probe).
        """
        config = self.config
        dtype = jnp.dtype(config.dtype)
        if segment_ids_BT is None:
            position_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        else:
            position_BT = layers.positions(segment_ids_BT)
        phases = layers.rope_phases(position_BT, self.attention.head_dim, self.attention.rope_theta)
        context = Context(phases, segment_ids_BT, dropout_key, probe, attention_sharding(whole_batch=whole_batch))

        x_BTD = self._embedded(tokens_BT, whole_batch).astype(dtype)
        if config.embed_norm:
            x_BTD = self.embed_norm(x_BTD)
        if dropout_key is not None:
            x_BTD = layers.dropout(x_BTD, config.dropout, jax.random.fold_in(dropout_key, config.num_layers))
        x_BTD = constrain(x_BTD, "batch", None, None)
        v_first_BTKE = None
        if self.attention.value_residual:
            v_first_BTKE = jnp.zeros((*tokens_BT.shape, self.attention.num_kv_heads, self.attention.head_dim), dtype)

        graphdef, stacked = nnx.split(self.blocks)

        def body(carry, scanned):
            x_BTD, v_first_BTKE = carry
            block_params, layer = scanned
            block = nnx.merge(graphdef, block_params)
            x_BTD, v_first_BTKE, stats = block(x_BTD, v_first_BTKE, layer, context)
            return (x_BTD, v_first_BTKE), stats

        if config.remat in _REMAT:
            # A loop already keeps the compiler from merging the recomputation with the forward pass.
            body = jax.checkpoint(body, policy=_REMAT[config.remat], prevent_cse=self.unroll == config.num_layers)
        layer_L = jnp.arange(config.num_layers, dtype=jnp.int32)
        (x_BTD, _), stats = jax.lax.scan(body, (x_BTD, v_first_BTKE), (stacked, layer_L), unroll=self.unroll)
        return self.final_norm(x_BTD), stats

    def _embedded(self, tokens_BT: Array, whole_batch: bool) -> Array:
        """The rows [B, T, D] of the embedding, rounded to the compute type where a mesh moves them."""
        table_VD = self.embed[...]
        if whole_batch:
            return constrain(table_VD, None, None)[tokens_BT]

        def look_up(shard: VocabShard, tokens_bT: Array) -> Array:
            if not shard.axes:
                return shard.table_VD[tokens_bT]
            index_bT = tokens_bT - shard.first
            here_bT = (index_bT >= 0) & (index_bT < shard.table_VD.shape[0])
            rows_bTD = shard.table_VD[jnp.where(here_bT, index_bT, 0)]
            return shard.total(jnp.where(here_bT[..., None], rows_bTD, 0).astype(self.config.dtype))

        return with_vocab_table(look_up, table_VD, self.config.dtype, tokens_BT)

    @property
    def unembedding_VD(self) -> Array:
        """The float32 output matrix [V, D], one row per token; with tied embeddings, the embedding."""
        return self.embed[...] if self.config.tie_embeddings else self.unembed[...].T

    def logits(self, hidden: Array, rows_VD: Array | None = None) -> Array:
        """Float32 logits [..., V] of a hidden state [..., D], with the soft cap of `config.logit_softcap`.

        Args:
          hidden: normalised last hidden state.
          rows_VD: rows of the output matrix; None for all.
        """
        rows_VD = self.unembedding_VD if rows_VD is None else rows_VD
        logits = layers.linear(hidden, rows_VD.T, dtype=jnp.float32)
        cap = self.config.logit_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits


@dataclasses.dataclass(frozen=True)
class Model:
    """The description of a decoder without its weights."""

    config: ModelConfig
    attention: AttentionConfig
    unroll: int  # number of layers in one iteration of the scan
    graphdef: nnx.GraphDef
    abstract_params: Params  # ShapeDtypeStructs
    axes: dict[str, Any]  # logical axes of each parameter, in a tree of the same structure

    def init(self, key: Array) -> Params:
        """Initial float32 parameters. The same key gives SA and XSA the same weights."""
        return nnx.to_pure_dict(nnx.state(_transformer(self.config, self.attention, self.unroll, key)))

    def bind(self, params: Params) -> Transformer:
        """The decoder with these weights."""
        return nnx.merge(self.graphdef, params)


def build(config: ModelConfig, attention: AttentionConfig, platform: str | None = None) -> Model:
    """Describes a decoder without allocating its weights.

    Args:
      config: the `model` group of the config.
      attention: the `attention` group of the config.
      platform: platform of the devices that run the decoder, for `model.scan_unroll=0`; None: unknown.

    Raises:
      ConfigError: `attention.xsa.layers` is invalid for this number of layers.
    """
    # Unrolled, XLA for CPUs computes the recomputation of model.remat early, and saves no memory.
    unrolls = platform == "cpu" and config.remat not in _REMAT and config.num_layers <= 8
    unroll = min(config.scan_unroll, config.num_layers) or (config.num_layers if unrolls else 1)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _transformer(config, attention, unroll, jax.random.key(0))))
    params = nnx.to_pure_dict(state)
    axes = nnx.to_pure_dict(jax.tree.map(_axes, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))
    return Model(config, attention, unroll, graphdef, params, axes)


def _transformer(config: ModelConfig, attention: AttentionConfig, unroll: int, key: Array) -> Transformer:
    return Transformer(config, attention, unroll, rngs=nnx.Rngs(params=key))


def _axes(variable: nnx.Variable) -> Axes:
    stacked = variable.get_value().ndim - len(variable.axes)
    return ("layers",) * stacked + variable.axes


_ATTENTION_OUT = ("attention_out", "attention_lse", "attention_c")  # the residuals of xsa_kernels.attention
_policies = jax.checkpoint_policies
# By model.remat: which activations of a layer are stored for the backward pass. It recomputes the others.
_REMAT = {
    "full": _policies.nothing_saveable,
    "attention": _policies.save_only_these_names(*_ATTENTION_OUT),
    # With attention's outputs, without which its forward kernel would run a second time.
    "dots": _policies.save_from_both_policies(
        _policies.dots_with_no_batch_dims_saveable, _policies.save_only_these_names(*_ATTENTION_OUT)
    ),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["attention_lse", "attention_c"],  # a number per head: small, and the host has no such layout
        names_which_can_be_offloaded=["layer_in", "attention_in", "attention_out", "mlp_in"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
