"""The loss on held-out rows, by position in the context."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from xsa_jax.model.transformer import Model, Params
from xsa_jax.parallel.mesh import constrain, put_batch
from xsa_jax.train.loss import shift, token_nll

Evaluator = Callable[[Params, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class PositionSums:
    """Summed loss in nats, and number of counted targets, at each position of the context. Both are float64 [T]."""

    nll_T: np.ndarray
    tokens_T: np.ndarray

    def loss(self, start: int = 0, stop: int | None = None) -> float:
        """Loss in nats per token over the positions [start, stop); nan if no target is counted there."""
        tokens = self.tokens_T[start:stop].sum()
        return float(self.nll_T[start:stop].sum() / tokens) if tokens else math.nan

    def totals(self, bytes_per_token: float) -> dict[str, float]:
        """`loss` in nats per token, `bits_per_byte` of text, `perplexity`, and the number of counted targets, `tokens`."""
        loss = self.loss()
        return {
            "loss": loss,
            "bits_per_byte": loss / math.log(2) / bytes_per_token,
            "perplexity": math.exp(min(loss, 700.0)),  # bounded to avoid float64 overflow; an untrained model can be this bad
            "tokens": int(self.tokens_T.sum()),
        }


def make_evaluator(model: Model, chunk_tokens: int) -> Evaluator:
    """A jitted function (params, batch) -> (nll_T, tokens_T): summed loss in nats and counted targets by position, float32 [T].

    `batch["valid"]`, float32 [B], is 0 for rows of padding. Logits are in memory for `chunk_tokens` tokens of a device at a time.
    """

    def sums(params: Params, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        transformer = model.bind(params)
        inputs_BT, targets_BT, segment_ids_BT, weights_BT = shift(batch)
        hidden_BTD, _ = transformer(inputs_BT, segment_ids_BT)
        nll_BT, _ = token_nll(transformer, hidden_BTD, targets_BT, chunk_tokens)
        weights_BT = weights_BT * batch["valid"][:, None]
        # Every device holds the sums, so that every process can read them.
        return constrain(jnp.sum(nll_BT * weights_BT, axis=0), None), constrain(jnp.sum(weights_BT, axis=0), None)

    return jax.jit(sums)


def validate(
    evaluator: Evaluator, params: Params, batches: Iterable[Mapping[str, np.ndarray]], rows: int, mesh: Mesh
) -> PositionSums:
    """Sums the loss over batches. Every counted target has the same weight.

    Args:
      evaluator: result of `make_evaluator`.
      params: weights of the decoder.
      batches: batches of a validation loader; the last one may have fewer rows.
      rows: number of rows that this process has in a full batch, those of `xsa_jax.parallel.mesh.batch_rows`.
      mesh: mesh of the weights.
    """
    nll, tokens = 0.0, 0.0
    for batch in batches:
        sums = jax.device_get(evaluator(params, put_batch(mesh, _padded(batch, rows))))
        nll, tokens = nll + sums[0].astype(np.float64), tokens + sums[1].astype(np.float64)
    return PositionSums(np.atleast_1d(nll), np.atleast_1d(tokens))


def _padded(batch: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    num_rows = len(batch["tokens"])
    padded = {name: np.pad(x, ((0, rows - num_rows), (0, 0))) for name, x in batch.items()}
    return padded | {"valid": (np.arange(rows) < num_rows).astype(np.float32)}
