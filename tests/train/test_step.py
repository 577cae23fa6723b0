"""The train step: the same numbers on eight devices as on one, state that stays where it lives, and what each metric says."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.helpers import assembled, assert_trees_close, assert_trees_equal, model_of, random_batch, random_params, tiny_config
from xsa_jax.config import Config
from xsa_jax.parallel.mesh import put_batch
from xsa_jax.train import optim
from xsa_jax.train.loss import loss_sums
from xsa_jax.train.state import TrainState

CUBE = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
# Adam divides by the size of the gradient: with a larger eps, rounding of a gradient near zero stays rounding.
SMOOTH = {"optim.eps": 1e-2, "optim.warmup_steps": 0}

CASES: dict[str, dict[str, Any]] = {
    "sa-heads": {"attention.num_kv_heads": 4},
    "xsa-grouped": {"attention.kind": "xsa", "data.documents": "isolate"},
    "learned-one-kv-head": {"attention.kind": "xsa", "attention.xsa.strength": "learned", "attention.num_kv_heads": 1},
    "everything": {
        "attention.kind": "xsa", "attention.xsa.layers": "last:1", "attention.xsa.strength": "learned", "data.documents": "isolate",
        "attention.window": 6, "attention.sinks": True, "attention.logit_softcap": 2.0, "attention.qk_norm": True,
        "attention.value_residual": True, "model.logit_softcap": 3.0, "model.norm": "rmsnorm", "model.mlp": "swiglu",
        "model.tie_embeddings": False, "model.remat": "full", "model.dropout": 0.2, "train.z_loss": 1e-3,
    },
}  # fmt: skip


class Run(NamedTuple):
    state: TrainState  # on the devices
    metrics: list[dict[str, float]]
    first_state_was_donated: bool


@functools.cache
def _step(devices: int, overrides: tuple[tuple[str, Any], ...]):
    """(config, mesh, fresh state, jitted step), compiled once per config and number of devices."""
    config = tiny_config({**SMOOTH, **(CUBE if devices == 8 else {}), **dict(overrides)})
    setup = assembled(config, devices)

    def fresh() -> TrainState:
        params = random_params(setup.model)
        state = TrainState(jnp.zeros((), jnp.int32), params, setup.tx.init(params), jax.random.key_data(jax.random.key(7)))
        return jax.tree.map(lambda x, described: jax.device_put(x, described.sharding), state, setup.abstract_state)

    return config, setup.mesh, fresh, setup.step


def _train(devices: int, overrides: dict[str, Any], batches: list[dict[str, np.ndarray]]) -> Run:
    _, mesh, fresh, step = _step(devices, tuple(overrides.items()))
    state = first = fresh()
    metrics = []
    with jax.set_mesh(mesh):
        for batch in batches:
            state, values = step(state, put_batch(mesh, batch))
            metrics.append({name: float(value) for name, value in values.items()})
    return Run(state, metrics, all(leaf.is_deleted() for leaf in jax.tree.leaves(first)))


def _batches(config: Config, steps: int = 2) -> list[dict[str, np.ndarray]]:
    documents = 3 if config.data.documents == "isolate" else 1
    return [random_batch(config, seed, documents) for seed in range(steps)]


MARKS = {"xsa-grouped": pytest.mark.fast, "learned-one-kv-head": pytest.mark.long}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, [])) for name in CASES])
def pair(request) -> tuple[Run, Run]:
    overrides = CASES[request.param]
    batches = _batches(tiny_config(overrides))
    return _train(1, overrides, batches), _train(8, overrides, batches)


def test_eight_devices_equal_one(pair):
    one, eight = pair
    assert_trees_close(eight.state.params, one.state.params, 2e-5)
    assert_trees_close(eight.state.opt_state, one.state.opt_state, 2e-4)
    assert_trees_equal((eight.state.step, eight.state.rng), (one.state.step, one.state.rng))
    for on_eight, on_one in zip(eight.metrics, one.metrics, strict=True):
        assert on_eight == pytest.approx(on_one, rel=1e-5)


def test_state_is_donated_and_stays_where_it_lives(pair):
    for run in pair:
        assert run.first_state_was_donated
        assert int(run.state.step) == 2
    eight = pair[1].state
    params, adam = eight.params, optax.tree.get(eight.opt_state, "ScaleByAdamState")
    whole = {name: params["blocks"]["attention"][name].shape for name in "qkv"}
    shards = {name: params["blocks"]["attention"][name].addressable_shards[0].data.shape for name in "qkv"}
    K = whole["k"][2]
    assert shards == {"q": (2, 16, 2, 6), "k": (2, 16, max(K // 2, 1), 6), "v": (2, 16, max(K // 2, 1), 6)}
    assert params["embed"].addressable_shards[0].data.shape == (15, 32)
    assert params["blocks"]["mlp"]["down"].addressable_shards[0].data.shape == (2, 24, 16)
    assert params["final_norm"]["scale"].sharding.is_fully_replicated
    for moments in (adam.mu, adam.nu):
        jax.tree.map(lambda p, m: m.sharding.is_equivalent_to(p.sharding, p.ndim) or pytest.fail(f"{m.sharding}"), params, moments)


def test_two_runs_are_bit_equal():
    overrides = CASES["xsa-grouped"]
    batches = _batches(tiny_config(overrides))
    one, two = (_train(1, overrides, batches) for _ in range(2))
    assert_trees_equal(two.state, one.state)
    assert two.metrics == one.metrics


def test_a_repeated_batch_is_learned_and_every_metric_says_what_it_should():
    overrides = CASES["xsa-grouped"] | {"optim.warmup_steps": 2}
    config = tiny_config({**SMOOTH, **overrides})
    steps = 16
    run = _train(1, overrides, _batches(config)[:1] * steps)
    losses = [metrics["loss"] for metrics in run.metrics]
    assert losses[1] < losses[0]  # the first update moves already
    assert losses[-1] < losses[0] - 0.5
    lr = optim.schedule(config.optim, config.train.num_steps)
    assert [metrics["lr"] for metrics in run.metrics] == pytest.approx([float(lr(step)) for step in range(steps)], rel=1e-6)
    assert {metrics["tokens"] for metrics in run.metrics} == {8 * (16 - 2)}
    assert int(run.state.step) == steps
    assert run.metrics[0].keys() == {"loss", "z", "grad_norm", "lr", "tokens"}


def test_the_random_state_moves_and_drives_dropout():
    overrides = {"model.dropout": 0.5, "optim.peak_lr": 1e-9}
    batch = _batches(tiny_config())[0]
    first, second = (metrics["loss"] for metrics in _train(1, overrides, [batch, batch]).metrics)
    assert abs(first - second) > 1e-3  # the weights are the same, the dropped elements are not
    one, two = (_train(1, overrides, [batch] * steps).state.rng for steps in (1, 2))
    assert (np.asarray(one) != np.asarray(two)).any()


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_gradient_is_that_of_the_mean_over_all_counted_tokens_clipped_once(clip):
    """Taken as two micro-batches with unequal counts, added as sums, divided once."""
    overrides = CASES["xsa-grouped"] | {"train.z_loss": 0.01, "optim.clip_norm": clip}
    config = tiny_config({**SMOOTH, **overrides})
    model = model_of(config)
    batch = _batches(config)[0]
    batch["segment_ids"][4:] = 1
    run = _train(1, overrides, [batch])

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def micro(params, batch):
        sums = loss_sums(model.bind(params), batch, 8)
        return sums.nll + 0.01 * sums.z, sums

    (_, first), first_grads = micro(random_params(model), {name: x[:4] for name, x in batch.items()})
    (_, second), second_grads = micro(random_params(model), {name: x[4:] for name, x in batch.items()})
    assert (float(first.tokens), float(second.tokens)) == (4 * 14, 4 * 16)
    tokens = 4 * 14 + 4 * 16
    grads = jax.tree.map(lambda a, b: (a + b) / tokens, first_grads, second_grads)
    norm = float(optax.tree.norm(grads))
    assert norm > 0.05  # so that a clip at 0.05 bites
    kept = jax.tree.map(lambda g: g * (clip / norm if clip else 1.0), grads)
    adam = optax.tree.get(run.state.opt_state, "ScaleByAdamState")
    assert_trees_close(jax.tree.map(lambda m: m / (1 - config.optim.beta1), adam.mu), kept, 2e-5)
    expected = {
        "loss": float(first.nll + second.nll) / tokens,
        "z": float(first.z + second.z) / tokens,
        "grad_norm": norm,  # as it was before the clip
        "tokens": tokens,
        "lr": config.optim.peak_lr,
    }
    assert run.metrics[0] == pytest.approx(expected, rel=1e-5)


def test_a_batch_in_which_no_target_counts_changes_nothing_but_decay():
    overrides = CASES["xsa-grouped"]
    batch = _batches(tiny_config(overrides))[0]
    batch["segment_ids"][:] = np.arange(17)
    run = _train(1, overrides, [batch])
    assert run.metrics[0]["tokens"] == run.metrics[0]["loss"] == run.metrics[0]["grad_norm"] == 0
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(run.state.params))
