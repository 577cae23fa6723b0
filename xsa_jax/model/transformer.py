"""The decoder: embedding, scanned blocks, final norm.

NNX describes the model (`Transformer`); everything that trains or evaluates it holds plain parameter trees and binds them
with `Model.bind(params)`, so jit, grad, sharding and checkpoints see nothing but nested dicts of arrays.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xsa_jax.config import AttentionConfig, ModelConfig
from xsa_jax.model import layers
from xsa_jax.model.attention import Attention, Context, Probe
from xsa_jax.parallel.mesh import Axes, attention_sharding, constrain

Array = jax.Array
Params = dict[str, Any]


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention: AttentionConfig, *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.attention_norm = layers.Norm(config.norm, config.d_model)
        self.attention = Attention(config, attention, rngs=rngs)
        self.mlp_norm = layers.Norm(config.norm, config.d_model)
        self.mlp = layers.MLP(config, rngs=rngs)

    def __call__(
        self, x_BTD: Array, v_first_BTKE: Array | None, layer: Array, context: Context
    ) -> tuple[Array, Array | None, dict[str, Array]]:
        attention_key = mlp_key = None
        if context.dropout_key is not None:
            attention_key, mlp_key = jax.random.split(jax.random.fold_in(context.dropout_key, layer))
        x_BTD = constrain(x_BTD, "batch", None, None)
        out_BTD, v_first_BTKE, stats = self.attention(self.attention_norm(x_BTD), v_first_BTKE, layer, context)
        x_BTD = x_BTD + layers.dropout(out_BTD, self.dropout, attention_key)
        x_BTD = x_BTD + layers.dropout(self.mlp(self.mlp_norm(x_BTD)), self.dropout, mlp_key)
        return constrain(x_BTD, "batch", None, None), v_first_BTKE, stats


class Transformer(nnx.Module):
    """Decoder-only language model; parameters float32, activations in `config.dtype`."""

    def __init__(self, config: ModelConfig, attention: AttentionConfig, *, rngs: nnx.Rngs):
        V, D = config.vocab_size, config.d_model
        self.config = config
        self.attention = attention
        self.embed = layers.matrix(rngs, (V, D), ("vocab", "embed"), 0.02)
        if config.embed_norm:
            self.embed_norm = layers.Norm(config.norm, D)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, attention, rngs=rngs)

        self.blocks = stack(rngs)
        self.final_norm = layers.Norm(config.norm, D)
        if not config.tie_embeddings:
            self.unembed = layers.matrix(rngs, (D, V), ("embed", "vocab"), 0.02)

    def __call__(
        self,
        tokens_BT: Array,
        segment_ids_BT: Array | None = None,
        *,
        dropout_key: Array | None = None,
        probe: Probe | None = None,
        whole_batch: bool = False,
    ) -> tuple[Array, dict[str, Array]]:
        """Runs the stack.

        Args:
          tokens_BT: int32 token ids.
          segment_ids_BT: int32, never decreasing along T; tokens attend only inside equal ids and positions restart with each.
          dropout_key: turns dropout on.
          probe: see `xsa_jax.model.attention.Probe`.
          whole_batch: every device of a mesh computes all rows, for batches that the mesh need not divide.

        Returns:
          The normed last hidden state [B, T, D] in the compute type, for `logits` or a chunked loss, and the probe's
          statistics stacked over layers ({} without a probe).
        """
        config = self.config
        dtype = jnp.dtype(config.dtype)
        if segment_ids_BT is None:
            position_BT = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        else:
            position_BT = layers.positions(segment_ids_BT)
        phases = layers.rope_phases(position_BT, self.attention.head_dim, self.attention.rope_theta)
        context = Context(phases, segment_ids_BT, dropout_key, probe, attention_sharding(whole_batch=whole_batch))

        # Gathered over fsdp first: rows looked up in a table that is cut along its width would move twice.
        embed_VD = constrain(self.embed[...], "vocab", None)
        x_BTD = embed_VD[tokens_BT].astype(dtype)
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

        body = _REMAT[config.remat](body)
        layer_L = jnp.arange(config.num_layers, dtype=jnp.int32)
        (x_BTD, _), stats = jax.lax.scan(body, (x_BTD, v_first_BTKE), (stacked, layer_L))
        return self.final_norm(x_BTD), stats

    @property
    def unembedding_DV(self) -> Array:
        return self.embed[...].T if self.config.tie_embeddings else self.unembed[...]

    def logits(self, hidden: Array) -> Array:
        """Float32 logits [..., V] of a hidden state [..., D], soft-capped where the config says so."""
        logits = jnp.matmul(hidden, self.unembedding_DV.astype(hidden.dtype), preferred_element_type=jnp.float32)
        cap = self.config.logit_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits


@dataclasses.dataclass(frozen=True)
class Model:
    """The description of a decoder apart from its weights."""

    config: ModelConfig
    attention: AttentionConfig
    graphdef: nnx.GraphDef
    abstract_params: Params  # ShapeDtypeStructs
    axes: dict[str, Any]  # logical axes of each parameter, in a tree of the same form

    def init(self, key: Array) -> Params:
        """Fresh float32 parameters; the same key gives SA and XSA the same weights."""
        return nnx.to_pure_dict(nnx.state(_transformer(self.config, self.attention, key)))

    def bind(self, params: Params) -> Transformer:
        """The decoder with these weights."""
        return nnx.merge(self.graphdef, params)


def build(config: ModelConfig, attention: AttentionConfig) -> Model:
    """Describes the model without allocating anything.

    Raises:
      ConfigError: `attention.xsa.layers` chooses no layers of this model.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _transformer(config, attention, jax.random.key(0))))
    params = nnx.to_pure_dict(state)
    axes = nnx.to_pure_dict(jax.tree.map(_axes, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))
    return Model(config, attention, graphdef, params, axes)


def _transformer(config: ModelConfig, attention: AttentionConfig, key: Array) -> Transformer:
    return Transformer(config, attention, rngs=nnx.Rngs(params=key))


def _axes(variable: nnx.Variable) -> Axes:
    stacked = variable.get_value().ndim - len(variable.axes)
    return ("layers",) * stacked + variable.axes


def _checkpointed(policy):
    # The scan already keeps the compiler from merging the recomputation with the forward pass.
    return lambda body: jax.checkpoint(body, policy=policy, prevent_cse=False)


# model.remat: what the backward pass finds stored of each layer; the rest it computes again.
_REMAT = {
    "none": lambda body: body,
    "full": _checkpointed(jax.checkpoint_policies.nothing_saveable),
    "dots": _checkpointed(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "attention": _checkpointed(jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse", "attention_c")),
}
