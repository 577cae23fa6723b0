"""The train state: all arrays that a step updates, as one pytree, with the sharding of each leaf."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from xsa_jax.model.transformer import Model, Params
from xsa_jax.parallel.mesh import Axes, platform, sharding

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All arrays that a train step updates."""

    step: Array  # int32 scalar, number of updates so far
    params: Params  # float32 weights
    opt_state: Any  # state of the optimiser
    rng: Array  # uint32, the raw data of a PRNG key: checkpoints hold plain arrays


def abstract_params(model: Model, mesh: Mesh) -> Params:
    """Shapes, types and shardings of the weights, for a restore."""
    return jax.tree.map(functools.partial(_place, mesh), model.abstract_params, model.axes)


def abstract_state(model: Model, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of the train state, for a restore and for `init_state`."""
    place = functools.partial(_place, mesh)

    def replicated(leaf):
        return place(leaf, (None,) * leaf.ndim)

    shapes = jax.eval_shape(lambda: _initial_state(model, tx, seed=0))
    return TrainState(
        step=replicated(shapes.step),
        params=abstract_params(model, mesh),
        opt_state=optax.tree_utils.tree_map_params(tx, place, shapes.opt_state, model.axes, transform_non_params=replicated),
        rng=replicated(shapes.rng),
    )


def init_state(model: Model, tx: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
    """The train state at step 0. Each leaf is created with its sharding, so no device ever holds the whole model.

    Args:
      model: description of the decoder.
      tx: optimiser.
      mesh: mesh that holds the state.
      seed: random seed of the initial weights and of dropout.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, tx, mesh))
    # The generator of random numbers is a long program that runs once. A CPU's compiler takes longer to optimise it than it runs.
    options = {"xla_backend_optimization_level": 1} if platform(mesh) == "cpu" else None
    return jax.jit(lambda: _initial_state(model, tx, seed), out_shardings=shardings, compiler_options=options)()


def _place(mesh: Mesh, leaf: jax.ShapeDtypeStruct, axes: Axes) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(mesh, axes, leaf.shape))


def _initial_state(model: Model, tx: optax.GradientTransformation, seed: int) -> TrainState:
    weights, noise = jax.random.split(jax.random.key(seed))
    params = model.init(weights)
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key_data(noise))
