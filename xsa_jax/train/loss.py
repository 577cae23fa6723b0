"""Next-token cross-entropy, computed in chunks of positions and returned as sums and counts."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xsa_jax.model.transformer import Transformer

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


def token_nll(transformer: Transformer, hidden_BTD: Array, targets_BT: Array, chunk: int) -> tuple[Array, Array]:
    """Negative log-likelihood and log(Z) of each target, both float32 [B, T], in nats. Z is the softmax normaliser.

    Logits are in memory for `chunk` positions per row at a time, in the forward and the backward pass. With V = 50304, float32
    logits [B, T, V] would be the largest array of the step.
    """
    B, T, _ = hidden_BTD.shape

    def nll(hidden_BCD: Array, targets_BC: Array) -> tuple[Array, Array]:
        logits_BCV = transformer.logits(hidden_BCD)
        logz_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        # A sum over a mask, not an index: its gradient is elementwise, where that of an index is a scatter.
        is_target_BCV = jnp.arange(logits_BCV.shape[-1]) == targets_BC[..., None]
        picked_BC = jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0), axis=-1)
        return logz_BC - picked_BC, logz_BC

    if chunk >= T:
        return nll(hidden_BTD, targets_BT)
    padding = -T % chunk

    def in_chunks(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), 1, 0)

    _, chunks = jax.lax.scan(
        lambda _, scanned: (None, jax.checkpoint(nll)(*scanned)), None, (in_chunks(hidden_BTD), in_chunks(targets_BT))
    )
    nll_BT, logz_BT = (jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :T] for x in chunks)
    return nll_BT, logz_BT


def loss_sums(transformer: Transformer, batch: Batch, chunk: int, dropout_key: Array | None = None) -> LossSums:
    """Loss sums of one batch.

    Args:
      transformer: decoder with its weights.
      batch: as for `shift`.
      chunk: number of positions per row whose logits are in memory at once.
      dropout_key: random key of dropout; None turns dropout off.
    """
    inputs_BT, targets_BT, segment_ids_BT, weights_BT = shift(batch)
    hidden_BTD, _ = transformer(inputs_BT, segment_ids_BT, dropout_key=dropout_key)
    nll_BT, logz_BT = token_nll(transformer, hidden_BTD, targets_BT, chunk)
    return LossSums(
        nll=jnp.sum(nll_BT * weights_BT), z=jnp.sum(jnp.square(logz_BT) * weights_BT), tokens=jnp.sum(weights_BT)
    )  # fmt: skip
