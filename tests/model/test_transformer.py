"""SA beside XSA, and the machinery around the layers: what the program contains, what the backward pass keeps, how it grows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assembled, assert_trees_close, assert_trees_equal, model_of, random_batch, random_params, tiny_config
from xsa_jax.config import Config
from xsa_jax.errors import ConfigError
from xsa_jax.model import layers
from xsa_jax.model.transformer import Model, Params, build
from xsa_jax.train.loss import loss_sums

XSA: dict[str, Any] = {"attention.kind": "xsa"}
LEARNED = XSA | {"attention.xsa.strength": "learned"}


def _logits(model: Model, params: Params, tokens_BT, dropout_key=None) -> np.ndarray:
    @jax.jit
    def program(params, tokens_BT):
        transformer = model.bind(params)
        return transformer.logits(transformer(tokens_BT, dropout_key=dropout_key)[0])

    return np.asarray(program(params, tokens_BT))


def _grad(model: Model):
    return jax.jit(jax.value_and_grad(lambda params, batch: loss_sums(model.bind(params), batch, 8).nll))


def _lowered_step(config: Config) -> str:
    """The text of the whole train step, from shapes alone."""
    return assembled(config).lower().as_text()


def _leaves(tree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.fast
def test_every_optional_parameter_leaves_the_weights_of_a_seed_as_they_were():
    plain = _leaves(model_of(tiny_config()).init(jax.random.key(0)))
    assert not any("gate" in name for name in plain)
    for overrides, added in (
        (XSA, 0),
        (LEARNED, 1),
        ({"attention.sinks": True}, 1),
        ({"attention.value_residual": True}, 1),
        ({"attention.qk_norm": True}, 2),
        ({"model.tie_embeddings": False}, 1),
        ({"model.norm": "rmsnorm"}, 0),
        (LEARNED | {"attention.sinks": True, "attention.value_residual": True, "attention.qk_norm": True}, 5),
    ):
        other = _leaves(model_of(tiny_config(overrides)).init(jax.random.key(0)))
        assert len(other) == len(plain) + added, overrides
        for name, weights in plain.items():
            np.testing.assert_array_equal(other[name], weights, err_msg=f"{overrides} {name}")
    assert (_leaves(model_of(tiny_config()).init(jax.random.key(1)))["['embed']"] != plain["['embed']"]).any()


@pytest.mark.fast
def test_abstract_params_and_axes_describe_what_init_makes():
    model = model_of(tiny_config(LEARNED | {"attention.sinks": True, "attention.value_residual": True, "attention.qk_norm": True}))
    params = model.init(jax.random.key(0))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), model.abstract_params)
    jax.tree.map(lambda leaf, axes: None if len(axes) == leaf.ndim else pytest.fail(f"{axes} {leaf.shape}"), params, model.axes)
    assert model.axes["blocks"]["attention"]["k"] == ("layers", "embed", "kv_heads", None)
    assert model.axes["embed"] == ("vocab", None)


@pytest.mark.fast
def test_the_sa_program_has_nothing_of_xsa():
    marker = {"attention.xsa.eps": 1.2345e-7}  # a number that nothing else in the program has
    plain = _lowered_step(tiny_config())
    unread = {"attention.xsa.layers": "first:1", "attention.xsa.strength": "learned", "attention.xsa.zero_rule": "add"}
    assert _lowered_step(tiny_config(marker | unread)) == plain
    assert "1.2345" not in plain
    projected = _lowered_step(tiny_config(XSA | marker))
    assert "1.2345" in projected
    assert projected.count("\n") > plain.count("\n") + 10


@pytest.mark.fast
def test_alpha_zero_and_a_fresh_gate_compute_sa():
    tokens_BT = random_batch(tiny_config())["tokens"]
    sa = model_of(tiny_config())
    params = random_params(sa)
    expected = _logits(sa, params, tokens_BT)
    for overrides in (XSA | {"attention.xsa.strength": "fixed", "attention.xsa.alpha": 0.0}, LEARNED):
        model = model_of(tiny_config(overrides))
        fresh = jax.tree.map(lambda x: x, params)
        if overrides is LEARNED:
            fresh["blocks"]["attention"]["gate"] = jnp.zeros(model.abstract_params["blocks"]["attention"]["gate"].shape)
        np.testing.assert_array_equal(_logits(model, fresh, tokens_BT), expected)
    assert np.abs(_logits(model_of(tiny_config(XSA)), params, tokens_BT) - expected).max() > 0.01


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("overrides", [{}, LEARNED], ids=["sa", "learned"])
def test_grouped_queries_equal_repeated_key_value_heads(kv_heads, overrides):
    grouped = model_of(tiny_config({"attention.num_kv_heads": kv_heads, **overrides}))
    full = model_of(tiny_config({"attention.num_kv_heads": 4, **overrides}))
    params = random_params(grouped)
    repeated = jax.tree.map(lambda x: x, params)
    for name in "kv":
        repeated["blocks"]["attention"][name] = jnp.repeat(params["blocks"]["attention"][name], 4 // kv_heads, axis=2)
    tokens_BT = random_batch(tiny_config())["tokens"]
    np.testing.assert_allclose(_logits(grouped, params, tokens_BT), _logits(full, repeated, tokens_BT), atol=1e-5)


@pytest.mark.parametrize(
    ("zero_rule", "impl"), [("clamp", "reference"), ("clamp", "xla"), ("add", "xla"), ("exact", "reference"), ("exact", "xla")]
)
def test_gradients_are_finite_where_every_value_is_zero(zero_rule, impl):
    model = model_of(tiny_config(XSA | {"attention.xsa.zero_rule": zero_rule, "attention.impl": impl, "model.num_layers": 1}))
    params = random_params(model)
    params["blocks"]["attention"]["v"] = jnp.zeros_like(params["blocks"]["attention"]["v"])
    nll, grads = _grad(model)(params, random_batch(tiny_config(), documents=3))
    assert jnp.isfinite(nll)
    for name, gradient in _leaves(grads).items():
        assert jnp.isfinite(gradient).all(), name
        assert jnp.abs(gradient).max() < 1e4, name


def test_the_gate_learns_from_its_start_at_zero():
    model = model_of(tiny_config(LEARNED))
    params = random_params(model)
    gates = params["blocks"]["attention"]
    gates["gate"] = jnp.zeros_like(gates["gate"])
    _, grads = _grad(model)(params, random_batch(tiny_config()))
    assert (jnp.abs(grads["blocks"]["attention"]["gate"]) > 1e-4).all()


def test_remat_changes_memory_and_nothing_else():
    shape = {"model.num_layers": 12, "data.seq_len": 64, "model.d_ff": 256} | XSA
    batch = random_batch(tiny_config(shape), documents=2)
    results, temporary = {}, {}
    for policy in ("none", "full", "dots", "attention", "offload"):
        model = model_of(tiny_config({**shape, "model.remat": policy}))
        params = random_params(model)
        compiled = _grad(model).lower(params, batch).compile()
        temporary[policy] = compiled.memory_analysis().temp_size_in_bytes
        results[policy] = compiled(params, batch)
    for policy in ("full", "dots", "attention", "offload"):
        assert_trees_close(results[policy], results["none"], 1e-5)
    assert temporary["full"] < 0.5 * temporary["none"], temporary
    assert temporary["full"] < temporary["attention"] < temporary["none"], temporary
    assert temporary["full"] < temporary["dots"] < temporary["none"], temporary


@pytest.mark.fast
@pytest.mark.parametrize("pattern", ["all", "every:4"])
def test_the_program_does_not_grow_with_depth(pattern):
    shallow, deep = (
        len(_lowered_step(tiny_config(XSA | {"attention.xsa.layers": pattern, "model.num_layers": depth}))) for depth in (9, 32)
    )
    assert deep <= 1.02 * shallow


@pytest.mark.fast
@pytest.mark.parametrize(
    ("scan_unroll", "num_layers", "remat", "platform", "expected"),
    [(0, 8, "none", "cpu", 8), (0, 8, "full", "cpu", 1), (0, 9, "none", "cpu", 1), (0, 8, "none", "tpu", 1),
     (0, 8, "none", None, 1), (3, 8, "none", "tpu", 3), (3, 2, "dots", "cpu", 2)],
)  # fmt: skip
def test_layers_per_iteration(scan_unroll, num_layers, remat, platform, expected):
    config = tiny_config({"model.scan_unroll": scan_unroll, "model.num_layers": num_layers, "model.remat": remat})
    assert build(config.model, config.attention, platform).unroll == expected


@pytest.mark.parametrize(
    "overrides", [{}, {"attention.xsa.layers": "every:2", "model.dropout": 0.2, "attention.value_residual": True}]
)
def test_an_unrolled_model_computes_what_a_loop_computes(overrides):
    shape = XSA | {"model.num_layers": 3} | overrides
    batch, results = random_batch(tiny_config(), documents=2), []
    for unroll in (1, 2, 3):
        model = model_of(tiny_config(shape | {"model.scan_unroll": unroll}))
        loss = lambda params, model=model: loss_sums(model.bind(params), batch, 8, jax.random.key(1)).nll  # noqa: E731
        results.append(jax.jit(jax.value_and_grad(loss))(random_params(model)))
    for other in results[1:]:
        assert_trees_close(other, results[0], 1e-5)


def test_dropout_follows_its_key():
    model = model_of(tiny_config({"model.dropout": 0.3}))
    params = random_params(model)
    tokens_BT = random_batch(tiny_config())["tokens"]
    once, again, other = (_logits(model, params, tokens_BT, jax.random.key(seed)) for seed in (0, 0, 1))
    off, plain = _logits(model, params, tokens_BT), _logits(model_of(tiny_config()), params, tokens_BT)
    np.testing.assert_array_equal(once, again)
    np.testing.assert_array_equal(off, plain)
    assert np.abs(once - other).max() > 0.1
    assert np.abs(once - off).max() > 0.1


def test_each_layer_and_branch_has_its_own_dropout_key(monkeypatch):
    used: list[tuple[int, ...]] = []

    def spy(x, rate, key):
        jax.debug.callback(lambda data: used.append(tuple(data.tolist())), jax.random.key_data(key))
        return x

    monkeypatch.setattr(layers, "dropout", spy)
    model = model_of(tiny_config({"model.dropout": 0.3, "model.num_layers": 3}))
    _logits(model, random_params(model), random_batch(tiny_config())["tokens"], jax.random.key(0))
    jax.effects_barrier()
    assert len(set(used)) == len(used) == 2 * 3 + 1


def test_the_loss_in_bfloat16_is_near_that_in_float32():
    overrides = XSA | {"attention.value_residual": True, "model.num_layers": 1}
    low, high = model_of(tiny_config({**overrides, "model.dtype": "bfloat16"})), model_of(tiny_config(overrides))
    params, batch = random_params(high), random_batch(tiny_config())
    (nll_low, grads_low), (nll_high, grads_high) = _grad(low)(params, batch), _grad(high)(params, batch)
    assert float(nll_low) == pytest.approx(float(nll_high), rel=0.01)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads_low))
    assert_trees_close(grads_low, grads_high, 0.1)


@pytest.mark.fast
def test_an_implementation_that_cannot_is_refused_when_the_run_is_assembled():
    splash = {"attention.impl": "splash", "data.seq_len": 128, "train.loss_chunk_tokens": 1024}
    assembled(tiny_config(splash))
    for overrides, feature in (
        ({"attention.impl": "cudnn"}, "device=cpu, dtype=float32"),
        ({"attention.impl": "hopper", "model.dtype": "bfloat16", "attention.head_dim": 64}, "device=cpu, expected"),
        ({"attention.impl": "tokamax", "data.documents": "isolate"}, "tokamax"),
        ({"data.seq_len": 64, "train.loss_chunk_tokens": 512}, "queries no multiple of 128"),
    ):
        config = {**splash, **overrides}
        with pytest.raises(
            ConfigError, match=rf"attention\.impl='{config['attention.impl']}' at data.seq_len={config['data.seq_len']}.*{feature}"
        ):
            assembled(tiny_config(config))


@pytest.mark.fast
def test_models_of_one_config_are_equal_descriptions():
    """The step is compiled once per description: two builds of one config must not count as two."""
    one, two = model_of(tiny_config(XSA)), model_of(tiny_config(XSA))
    assert one.graphdef == two.graphdef
    assert hash(one.graphdef) == hash(two.graphdef)
    assert dataclasses.replace(one, config=two.config) == two
    params = random_params(one)
    assert_trees_equal(random_params(two), params)
