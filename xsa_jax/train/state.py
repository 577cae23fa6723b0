"""Everything that training changes, as one pytree, and where each leaf of it lives."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from xsa_jax.model.transformer import Model, Params
from xsa_jax.parallel.mesh import Axes, sharding

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    step: Array  # int32, how many updates were made
    params: Params
    opt_state: Any
    rng: Array  # uint32, the raw data of a PRNG key: checkpoints hold plain arrays


def abstract_params(model: Model, mesh: Mesh) -> Params:
    """The weights' shapes, types and shardings without their values: the target of a restore."""
    return jax.tree.map(functools.partial(_place, mesh), model.abstract_params, model.axes)


def abstract_state(model: Model, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state's shapes, types and shardings without its values: the target of a restore, and of `init_state`."""
    place = functools.partial(_place, mesh)

    def whole(leaf):
        return place(leaf, (None,) * leaf.ndim)

    shapes = jax.eval_shape(lambda: _fresh(model, tx, seed=0))
    return TrainState(
        step=whole(shapes.step),
        params=abstract_params(model, mesh),
        opt_state=optax.tree_utils.tree_map_params(tx, place, shapes.opt_state, model.axes, transform_non_params=whole),
        rng=whole(shapes.rng),
    )


def init_state(model: Model, tx: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
    """A state at step 0, each leaf made where it lives: no device ever holds the whole model.

    `seed` decides the initial weights and the dropout of the whole run.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, tx, mesh))
    return jax.jit(lambda: _fresh(model, tx, seed), out_shardings=shardings)()


def _place(mesh: Mesh, leaf: jax.ShapeDtypeStruct, axes: Axes) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(mesh, axes, leaf.shape))


def _fresh(model: Model, tx: optax.GradientTransformation, seed: int) -> TrainState:
    weights, noise = jax.random.split(jax.random.key(seed))
    params = model.init(weights)
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key_data(noise))
