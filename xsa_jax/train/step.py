"""One update, as a pure function of (state, batch)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from xsa_jax.config import TrainConfig
from xsa_jax.model.transformer import Model
from xsa_jax.parallel.mesh import constrain
from xsa_jax.train.loss import Batch, loss_sums
from xsa_jax.train.state import TrainState

Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_step(model: Model, tx: optax.GradientTransformation, lr: optax.Schedule, config: TrainConfig) -> Step:
    """The train step, not yet jitted.

    The step returns its metrics as float32 scalars: `loss` in nats per token, `z` (the mean of log(Z)^2), `grad_norm` before
    clipping, `lr` (the learning rate of the update) and `tokens` (the number of counted targets).

    Args:
      model: description of the decoder.
      tx: optimiser.
      lr: learning-rate schedule of `tx`, for the metrics.
      config: the `train` group of the run's config.
    """
    dropout = model.config.dropout > 0

    def objective(params, batch, key):
        sums = loss_sums(model.bind(params), batch, config.loss_chunk_tokens, key if dropout else None)
        return sums.nll + config.z_loss * sums.z, sums

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rng, key = jax.random.split(jax.random.wrap_key_data(state.rng))
        batch = {name: constrain(x, "batch", None) for name, x in batch.items()}
        (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(state.params, batch, key)
        # The gradient of the sum, divided once by the number of tokens, gives every token of the batch the same weight.
        tokens = jnp.maximum(sums.tokens, 1.0)
        grads = jax.tree.map(lambda g: g / tokens, grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        metrics = {
            "loss": sums.nll / tokens,
            "z": sums.z / tokens,
            "grad_norm": optax.tree.norm(grads),
            "lr": jnp.asarray(lr(state.step), jnp.float32),
            "tokens": sums.tokens,
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state, jax.random.key_data(rng)), metrics

    return step
