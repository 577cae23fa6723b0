"""The schedule at its corners, and AdamW against one written out by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.helpers import assert_trees_close, model_of, random_params, tiny_config
from xsa_jax.train import optim

pytestmark = pytest.mark.fast

PARTS = {
    "model.norm": "layernorm", "model.tie_embeddings": False, "attention.kind": "xsa", "attention.xsa.strength": "learned",
    "attention.sinks": True, "attention.value_residual": True, "attention.qk_norm": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.01 / 11),
        (5, 0.06 / 11),
        (10, 0.01),
        (60, 0.01 * (0.1 + 0.9 * 0.5)),
        (35, 0.01 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))),
        (110, 0.001),
        (500, 0.001),
    ],
)
def test_cosine(step, expected):
    config = tiny_config({"optim.warmup_steps": 10, "train.num_steps": 110})
    lr = optim.schedule(config.optim, config.train.num_steps)
    assert float(lr(step)) == pytest.approx(expected, rel=1e-5)
    assert float(lr(jnp.asarray(step, jnp.int32))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("step", "expected"), [(0, 0.01 / 11), (5, 0.06 / 11), (10, 0.01), (11, 0.01), (10_000, 0.01)])
def test_constant(step, expected):
    config = tiny_config({"optim.warmup_steps": 10, "optim.schedule": "constant"})
    assert float(optim.schedule(config.optim, 20)(step)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_no_warm_up_starts_at_the_peak(schedule):
    config = tiny_config({"optim.warmup_steps": 0, "optim.schedule": schedule})
    assert float(optim.schedule(config.optim, 20)(0)) == pytest.approx(0.01, rel=1e-5)


def _model_and_tx(overrides):
    config = tiny_config({**PARTS, "optim.warmup_steps": 0, **overrides})
    model = model_of(config)
    tx = optim.optimizer(config.optim, config.train.num_steps, model.axes)
    return config, random_params(model), tx


def _is_matrix(name: str) -> bool:
    return name.split("['")[-1].rstrip("']") in {"embed", "unembed", "q", "k", "v", "out", "up", "down"}


def test_decay_touches_matrices_and_nothing_else():
    config, params, tx = _model_and_tx({"optim.weight_decay": 0.5})
    updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    after = optax.apply_updates(params, updates)
    matrices = 0
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(after), strict=True):
        name = jax.tree_util.keystr(path)
        matrices += _is_matrix(name)
        factor = 1 - config.optim.peak_lr * 0.5 if _is_matrix(name) else 1.0
        np.testing.assert_allclose(new, old * factor, rtol=1e-6, err_msg=name)
    assert (matrices, len(jax.tree.leaves(params))) == (8, 17)


def test_adamw_equals_the_one_written_out_with_the_clip_before_the_moments():
    overrides = {"optim.clip_norm": 3.0, "optim.beta2": 0.9, "optim.eps": 1e-3, "optim.schedule": "constant"}
    config, params, tx = _model_and_tx(overrides)
    update_by_optax = jax.jit(tx.update)
    o, rng = config.optim, np.random.default_rng(5)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    by_hand = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]
    mu, nu = [np.zeros_like(p) for p in by_hand], [np.zeros_like(p) for p in by_hand]
    state = tx.init(params)
    for step, size in enumerate((0.001, 1.0, 0.1), 1):  # below the clip, far above it, near it
        grads = jax.tree.map(lambda p, size=size: jnp.asarray(rng.normal(0, size, p.shape), jnp.float32), params)
        updates, state = update_by_optax(grads, state, params)
        params = optax.apply_updates(params, updates)

        flat = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)]
        norm = math.sqrt(sum((g**2).sum() for g in flat))
        assert (norm > 3.0) == (size > 0.01)
        for i, (name, g) in enumerate(zip(names, flat, strict=True)):
            g = g * min(1.0, 3.0 / norm)
            mu[i] = o.beta1 * mu[i] + (1 - o.beta1) * g
            nu[i] = o.beta2 * nu[i] + (1 - o.beta2) * g**2
            update = mu[i] / (1 - o.beta1**step) / (np.sqrt(nu[i] / (1 - o.beta2**step)) + o.eps)
            by_hand[i] = by_hand[i] - o.peak_lr * (update + (o.weight_decay * by_hand[i] if _is_matrix(name) else 0.0))
        assert_trees_close(jax.tree.leaves(params), by_hand, 1e-5)


def test_a_clip_of_zero_is_no_clip():
    _, params, clipped = _model_and_tx({"optim.clip_norm": 1e9})
    _, _, free = _model_and_tx({"optim.clip_norm": 0.0})
    grads = jax.tree.map(jnp.ones_like, params)
    without, far_off = (jax.jit(tx.update)(grads, tx.init(params), params)[0] for tx in (free, clipped))
    assert_trees_close(without, far_off, 1e-6)
