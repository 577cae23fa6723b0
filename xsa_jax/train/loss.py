"""Next-token cross-entropy, a few positions at a time, as sums and counts."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xsa_jax.model.transformer import Transformer

Array = jax.Array
Batch = Mapping[str, Array]


class LossSums(NamedTuple):
    """Sums over the counted targets of a batch. Divide by `tokens` only after adding batches, hosts or micro-batches."""

    nll: Array  # float32 scalar, nats
    z: Array  # float32 scalar, sum of log(Z)^2
    tokens: Array  # float32 scalar, how many targets counted


class Targets(NamedTuple):
    """Rows of T+1 tokens as inputs of the model and the next tokens that it must predict."""

    inputs_BT: Array
    targets_BT: Array
    segment_ids_BT: Array | None
    weights_BT: Array  # float32; 0 where the target belongs to another document than its input


def shift(batch: Batch) -> Targets:
    """Shifts `batch["tokens"]`, int32 [B, T+1], and reads `batch["segment_ids"]` of the same shape where it is there."""
    tokens, segments = batch["tokens"], batch.get("segment_ids")
    if segments is None:
        weights = jnp.ones(tokens[:, 1:].shape, jnp.float32)
        return Targets(tokens[:, :-1], tokens[:, 1:], None, weights)
    weights = (segments[:, :-1] == segments[:, 1:]).astype(jnp.float32)
    return Targets(tokens[:, :-1], tokens[:, 1:], segments[:, :-1], weights)


def token_nll(transformer: Transformer, hidden_BTD: Array, targets_BT: Array, chunk: int) -> tuple[Array, Array]:
    """Negative log-likelihood and log(Z) of each target, float32 [B, T], in nats.

    Logits exist for `chunk` positions at a time, forward and backward: at V = 50304 the whole [B, T, V] in float32 would be
    the largest array of the step.
    """
    B, T, _ = hidden_BTD.shape
    chunk = min(chunk, T)
    padding = -T % chunk

    def in_chunks(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def body(_, scanned):
        hidden_BCD, targets_BC = scanned
        logits_BCV = transformer.logits(hidden_BCD)
        logz_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        picked_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
        return None, (logz_BC - picked_BC, logz_BC)

    _, chunks = jax.lax.scan(body, None, (in_chunks(hidden_BTD), in_chunks(targets_BT)))
    nll_BT, logz_BT = (jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :T] for x in chunks)
    return nll_BT, logz_BT


def loss_sums(transformer: Transformer, batch: Batch, chunk: int, dropout_key: Array | None = None) -> LossSums:
    """The sums of one batch (see `shift` for its form)."""
    inputs_BT, targets_BT, segment_ids_BT, weights_BT = shift(batch)
    hidden_BTD, _ = transformer(inputs_BT, segment_ids_BT, dropout_key=dropout_key)
    nll_BT, logz_BT = token_nll(transformer, hidden_BTD, targets_BT, chunk)
    return LossSums(
        nll=jnp.sum(nll_BT * weights_BT), z=jnp.sum(jnp.square(logz_BT) * weights_BT), tokens=jnp.sum(weights_BT)
    )  # fmt: skip
