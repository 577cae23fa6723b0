"""Next-token cross-entropy, computed in chunks of positions and returned as sums and counts."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xsa_jax.model.transformer import Transformer
from xsa_jax.parallel.mesh import VocabShard, with_vocab_table

Array = jax.Array
Batch = Mapping[str, Array]


class LossSums(NamedTuple):
    """Sums over the counted targets of a batch. Divide by `tokens` only after adding batches, hosts or micro-batches."""

    nll: Array  # float32 scalar, sum of the negative log-likelihood in nats
    z: Array  # float32 scalar, sum of log(Z)^2, where Z is the softmax normaliser
    tokens: Array  # float32 scalar, number of counted targets


class Targets(NamedTuple):
    """Rows of T+1 tokens, split into T inputs and T targets: the next tokens that the model must predict."""

    inputs_BT: Array
    targets_BT: Array
    segment_ids_BT: Array | None
    weights_BT: Array  # float32; 0 where the target belongs to another document than its input


def shift(batch: Batch) -> Targets:
    """Splits the rows of a batch into inputs and targets.

    Args:
      batch: "tokens", int32 [B, T+1], and optionally "segment_ids" of the same shape.
    """
    tokens, segments = batch["tokens"], batch.get("segment_ids")
    if segments is None:
        weights = jnp.ones(tokens[:, 1:].shape, jnp.float32)
        return Targets(tokens[:, :-1], tokens[:, 1:], None, weights)
    weights = (segments[:, :-1] == segments[:, 1:]).astype(jnp.float32)
    return Targets(tokens[:, :-1], tokens[:, 1:], segments[:, :-1], weights)


def token_nll(transformer: Transformer, hidden_BTD: Array, targets_BT: Array, chunk_tokens: int) -> tuple[Array, Array]:
    """Negative log-likelihood and log(Z) of each target, both float32 [B, T], in nats. Z is the softmax normaliser.

    On each device logits are in memory for about `chunk_tokens` tokens at a time, in the forward and the backward pass: for as many
    positions of all its rows as that gives, and at least one. With V = 50304, float32 logits [B, T, V] would be the largest array
    of the step.
    """

    def chunked(shard: VocabShard, hidden_bTD: Array, targets_bT: Array) -> tuple[Array, Array]:
        b, T = targets_bT.shape
        chunk = max(1, chunk_tokens // b)
        if chunk >= T:
            return _nll(transformer, shard, hidden_bTD, targets_bT)
        padding = -T % chunk

        def in_chunks(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
            return jnp.moveaxis(x.reshape(b, -1, chunk, *x.shape[2:]), 1, 0)

        # The table is an argument of each chunk, so that its gradient is summed over the chunks in its own type, float32.
        one = jax.checkpoint(lambda table_VD, *xs: _nll(transformer, shard._replace(table_VD=table_VD), *xs))
        _, chunks = jax.lax.scan(
            lambda _, xs: (None, one(shard.table_VD, *xs)), None, (in_chunks(hidden_bTD), in_chunks(targets_bT))
        )
        nll_bT, logz_bT = (jnp.moveaxis(x, 0, 1).reshape(b, -1)[:, :T] for x in chunks)
        return nll_bT, logz_bT

    return with_vocab_table(chunked, transformer.unembedding_VD, transformer.config.dtype, hidden_BTD, targets_BT)


def _nll(transformer: Transformer, shard: VocabShard, hidden_bCD: Array, targets_bC: Array) -> tuple[Array, Array]:
    logits_bCV = transformer.logits(hidden_bCD, shard.table_VD)
    # A sum over a mask, not an index: its gradient is elementwise, where that of an index is a scatter.
    is_target_bCV = jnp.arange(logits_bCV.shape[-1]) == (targets_bC - shard.first)[..., None]
    picked_bC = shard.total(jnp.sum(jnp.where(is_target_bCV, logits_bCV, 0), axis=-1))
    if not shard.axes:
        logz_bC = jax.nn.logsumexp(logits_bCV, axis=-1)
    else:
        largest_bC = shard.largest(jnp.max(logits_bCV, axis=-1))
        logz_bC = largest_bC + jnp.log(shard.total(jnp.sum(jnp.exp(logits_bCV - largest_bC[..., None]), axis=-1)))
    return logz_bC - picked_bC, logz_bC


def loss_sums(transformer: Transformer, batch: Batch, chunk_tokens: int, dropout_key: Array | None = None) -> LossSums:
    """Loss sums of one batch.

    Args:
      transformer: decoder with its weights.
      batch: as for `shift`.
      chunk_tokens: number of tokens whose logits are in the memory of a device at once.
      dropout_key: random key of dropout; None turns dropout off.
    """
    inputs_BT, targets_BT, segment_ids_BT, weights_BT = shift(batch)
    hidden_BTD, _ = transformer(inputs_BT, segment_ids_BT, dropout_key=dropout_key)
    nll_BT, logz_BT = token_nll(transformer, hidden_BTD, targets_BT, chunk_tokens)
    return LossSums(
        nll=jnp.sum(nll_BT * weights_BT), z=jnp.sum(jnp.square(logz_BT) * weights_BT), tokens=jnp.sum(weights_BT)
    )  # fmt: skip
