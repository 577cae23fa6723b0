"""The state is made where it lives, the same on any mesh, and its description matches it."""

import jax
import numpy as np
import pytest

from tests.helpers import assert_trees_equal, mesh_of, model_of, tiny_config
from xsa_jax.train import optim
from xsa_jax.train.state import abstract_state, init_state

CUBE = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


def _described(overrides, devices):
    config = tiny_config({"attention.kind": "xsa", "attention.xsa.strength": "learned", "attention.sinks": True, **overrides})
    model = model_of(config)
    tx = optim.optimizer(config.optim, config.train.num_steps, model.axes)
    return model, tx, mesh_of(config, devices), config.seed


@pytest.mark.fast
def test_a_mesh_starts_from_the_state_of_one_device():
    one, eight = init_state(*_described({}, 1)), init_state(*_described(CUBE, 8))
    assert_trees_equal(eight, one)
    for leaf, described in zip(jax.tree.leaves(eight), jax.tree.leaves(abstract_state(*_described(CUBE, 8)[:3])), strict=True):
        assert (leaf.shape, leaf.dtype) == (described.shape, described.dtype)
        assert leaf.sharding.is_equivalent_to(described.sharding, leaf.ndim)
    assert eight.params["embed"].addressable_shards[0].data.shape == (15, 32)
    assert (int(eight.step), eight.rng.dtype) == (0, np.uint32)


@pytest.mark.fast
def test_moments_are_described_where_their_parameters_live():
    state = abstract_state(*_described(CUBE, 8)[:3])
    specs = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(state.params)}
    assert len(specs) > 4  # this mesh does shard
    by_name: dict[str, set[str]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path({"params": state.params, "opt": state.opt_state}):
        name = jax.tree_util.keystr(path)
        for prefix in ("['params']", ".mu", ".nu"):
            if prefix in name:
                by_name.setdefault(name.split(prefix)[1], set()).add(str(leaf.sharding))
    assert len(by_name) == len(jax.tree.leaves(state.params))
    assert {len(shardings) for shardings in by_name.values()} == {1}
    assert state.step.sharding.is_fully_replicated
    assert state.rng.sharding.is_fully_replicated


def test_another_seed_is_another_state():
    one, two = (init_state(*_described({"seed": seed}, 1)) for seed in (0, 1))
    assert (np.asarray(one.params["embed"]) != np.asarray(two.params["embed"])).any()
    assert (np.asarray(one.rng) != np.asarray(two.rng)).any()
