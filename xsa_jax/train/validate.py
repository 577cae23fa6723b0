"""Loss on held-out rows, by position in the context."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from xsa_jax.model.transformer import Model, Params
from xsa_jax.parallel.mesh import put_batch
from xsa_jax.train.loss import shift, token_nll

Evaluator = Callable[[Params, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class PositionSums:
    """Summed loss and counted targets at each position of the context, both float64 [T]."""

    nll_T: np.ndarray
    tokens_T: np.ndarray

    def loss(self, start: int = 0, stop: int | None = None) -> float:
        """Nats per token over the positions [start, stop); nan where none counted."""
        tokens = self.tokens_T[start:stop].sum()
        return float(self.nll_T[start:stop].sum() / tokens) if tokens else math.nan

    def totals(self, bytes_per_token: float) -> dict[str, float]:
        """`loss` in nats per token, `bits_per_byte` of text, and `perplexity` per token."""
        loss = self.loss()
        return {
            "loss": loss,
            "bits_per_byte": loss / math.log(2) / bytes_per_token,
            "perplexity": math.exp(min(loss, 700.0)),  # below float64's overflow; an untrained model can be this bad
            "tokens": int(self.tokens_T.sum()),
        }


def make_evaluator(model: Model, loss_chunk: int) -> Evaluator:
    """A jitted (params, batch) -> (nll_T, tokens_T).

    `batch["valid"]`, float32 [B], is 0 for rows that only fill the batch. Logits exist for `loss_chunk` positions at a time.
    """

    def sums(params: Params, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        transformer = model.bind(params)
        inputs_BT, targets_BT, segment_ids_BT, weights_BT = shift(batch)
        hidden_BTD, _ = transformer(inputs_BT, segment_ids_BT)
        nll_BT, _ = token_nll(transformer, hidden_BTD, targets_BT, loss_chunk)
        weights_BT = weights_BT * batch["valid"][:, None]
        return jnp.sum(nll_BT * weights_BT, axis=0), jnp.sum(weights_BT, axis=0)

    return jax.jit(sums)


def validate(
    evaluator: Evaluator, params: Params, batches: Iterable[Mapping[str, np.ndarray]], rows: int, mesh: Mesh
) -> PositionSums:
    """Adds up the batches, weighting each token alike.

    Args:
      evaluator: from `make_evaluator`.
      params: the weights.
      batches: what a validation loader yields; the last may have fewer rows.
      rows: rows of a full batch of this process, a multiple of its batch shards.
      mesh: where to run.
    """
    nll, tokens = 0.0, 0.0
    for batch in batches:
        sums = jax.device_get(evaluator(params, put_batch(mesh, _filled(batch, rows))))
        nll, tokens = nll + sums[0].astype(np.float64), tokens + sums[1].astype(np.float64)
    return PositionSums(np.atleast_1d(nll), np.atleast_1d(tokens))


def _filled(batch: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    have = len(batch["tokens"])
    filled = {name: np.pad(x, ((0, rows - have), (0, 0))) for name, x in batch.items()}
    return filled | {"valid": (np.arange(rows) < have).astype(np.float32)}
