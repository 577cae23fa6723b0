"""The small parts: positions, rotary phases, norms, dropout, and the sizes of fresh weights."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import mesh_of, model_of, tiny_config
from xsa_jax.model import layers

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([4, 4, 4, 4], [0, 1, 2, 3]),
        ([0, 0, 1, 1], [0, 1, 0, 1]),
        ([1, 2, 3, 4], [0, 0, 0, 0]),
        ([-1, -1, -1, 0], [0, 1, 2, 0]),  # a border at the last token
        ([7, 9, 9, 9], [0, 0, 1, 2]),  # and at the second
    ],
)
def test_positions_restart_with_each_document(segments, expected):
    position_BT = layers.positions(jnp.array([segments, [1, 1, 1, 1]], jnp.int32))
    assert position_BT.dtype == jnp.int32
    assert position_BT.tolist() == [expected, [0, 1, 2, 3]]


def test_rope_phases_at_a_hundred_thousand():
    position_T = np.array([0, 1, 257, 99_999, 100_000])
    E, theta = 64, 10_000.0
    angle = position_T[:, None] * theta ** (-np.arange(0, E, 2) / E)
    for phase_BT1e, exact in zip(layers.rope_phases(jnp.array(position_T)[None], E, theta), (np.cos, np.sin), strict=True):
        assert phase_BT1e.shape == (1, 5, 1, E // 2)
        assert phase_BT1e.dtype == jnp.float32
        # Half a unit in the last place of the frequency and of the angle: what float32 can hold.
        limit = angle * 2.0**-23 + 2.0**-22
        assert (np.abs(phase_BT1e[0, :, 0] - exact(angle)) <= limit).all()


def test_scores_depend_on_the_distance_alone():
    E = 16
    q_E, k_E = np.random.default_rng(0).normal(size=(2, E)).astype(np.float32)

    def score(q_position: int, k_position: int) -> float:
        q, k = (
            layers.rotate(jnp.array(x)[None, None, None], layers.rope_phases(jnp.array([[position]]), E, 10_000.0))
            for x, position in ((q_E, q_position), (k_E, k_position))
        )
        return float(jnp.vdot(q, k))

    assert score(3, 0) == pytest.approx(score(503, 500), abs=1e-3)
    assert score(0, 0) == pytest.approx(float(q_E @ k_E), abs=1e-5)
    assert abs(score(3, 0) - score(9, 0)) > 0.1
    assert abs(score(3, 0) - score(0, 3)) > 0.1  # forwards is not backwards


def test_the_product_with_a_permutation_turns_as_the_halves_do(monkeypatch):
    """The form for TPUs: in bfloat16 each term is rounded as in the other form, and so are the sums but for a fused product."""
    x_BTHE = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
    phases = layers.rope_phases(jnp.arange(5)[None], 8, 10_000.0)
    for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)):
        x = jnp.array(x_BTHE, dtype)
        halves, pullback = jax.vjp(lambda x: layers.rotate(x, phases), x)
        with monkeypatch.context() as patch:
            patch.setattr(layers, "traced_for", lambda: "tpu")
            product, other = jax.vjp(lambda x: layers.rotate(x, phases), x)
            lowered = jax.jit(lambda x: layers.rotate(x, phases)).lower(x).as_text()
        assert product.dtype == dtype
        assert "dot_general" in lowered
        np.testing.assert_allclose(product.astype(np.float32), halves.astype(np.float32), atol=tolerance, rtol=tolerance)
        for a, b in zip(other(product), pullback(product), strict=True):
            np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=2 * tolerance, rtol=2 * tolerance)


def test_bfloat16_tokens_far_out_are_turned_by_float32_phases():
    x_BTHE = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    turned = layers.rotate(x_BTHE, layers.rope_phases(jnp.array([[1000, 1001]]), 8, 10_000.0))
    assert turned.dtype == jnp.bfloat16
    assert (turned[0, 0] != turned[0, 1]).any()


def test_norms_keep_their_statistics_in_float32():
    x = np.random.default_rng(0).normal(3.0, 1.0, (4, 64)).astype(np.float32) * 1e4
    for kind, centred in (("layernorm", x - x.mean(-1, keepdims=True)), ("rmsnorm", x)):
        norm = layers.Norm(kind, 64)
        exact = centred / np.sqrt((centred**2).mean(-1, keepdims=True))
        np.testing.assert_allclose(norm(jnp.array(x)), exact, atol=1e-5)
        low = norm(jnp.array(x, jnp.bfloat16))
        assert low.dtype == jnp.bfloat16
        np.testing.assert_allclose(low.astype(jnp.float32), exact, atol=0.04)


def test_a_norm_of_zeros_is_zero_with_a_finite_gradient():
    for kind in ("layernorm", "rmsnorm"):
        norm = layers.Norm(kind, 8)
        value, gradient = jax.value_and_grad(lambda x, norm=norm: norm(x).sum())(jnp.zeros(8))
        assert value == 0
        assert jnp.isfinite(gradient).all()


def test_dropout():
    x = jnp.ones((200, 200))
    key = jax.random.key(0)
    once, again, other = (layers.dropout(x, 0.25, k) for k in (key, key, jax.random.key(1)))
    assert (once == again).all()
    assert (once != other).any()
    assert set(np.unique(once)) == {np.float32(0), np.float32(1 / 0.75)}
    assert float(once.mean()) == pytest.approx(1.0, abs=0.02)
    assert layers.dropout(x, 0.25, None) is x
    assert layers.dropout(x, 0.0, key) is x
    assert layers.dropout(x.astype(jnp.bfloat16), 0.25, key).dtype == jnp.bfloat16


@pytest.mark.parametrize("on_cpu_mesh", [False, True])
def test_linear_is_the_product_over_the_input_axes(on_cpu_mesh):
    if on_cpu_mesh:
        with jax.set_mesh(mesh_of(tiny_config())):
            _check_linear(products=[2, 2])
    else:
        _check_linear(products=[4, 4])


def _check_linear(products):
    """`products`: the numbers of axes of the operands of the product."""
    rng = np.random.default_rng(0)
    x_BTHE, weight_HEDF = rng.normal(size=(2, 3, 4, 5)).astype(np.float32), rng.normal(size=(4, 5, 6, 7)).astype(np.float32)
    expected = np.einsum("bthe,hedf->btdf", x_BTHE, weight_HEDF)
    np.testing.assert_allclose(layers.linear(x_BTHE, jnp.array(weight_HEDF), num_input_axes=2), expected, atol=1e-5)
    jaxpr = jax.make_jaxpr(lambda x, w: layers.linear(x, w, num_input_axes=2))(x_BTHE, weight_HEDF)
    (product,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general")
    assert [operand.aval.ndim for operand in product.invars] == products
    narrow = layers.linear(jnp.array(x_BTHE, jnp.bfloat16), jnp.array(weight_HEDF[0]))
    assert narrow.dtype == jnp.bfloat16
    assert narrow.shape == (2, 3, 4, 6, 7)


@pytest.mark.parametrize(("ours", "jaxs"), [(layers.gelu, jax.nn.gelu), (layers.silu, jax.nn.silu)], ids=["gelu", "silu"])
def test_activations_have_the_derivatives_of_jaxs(ours, jaxs):
    x = jnp.concatenate([jnp.linspace(-12, 12, 1001), jnp.array([-1e4, 1e4])])
    np.testing.assert_array_equal(ours(x), jaxs(x))
    for order in (1, 2):
        mine, theirs = ours, jaxs
        for _ in range(order):
            mine, theirs = (jax.grad(lambda x, f=f: jnp.sum(f(x))) for f in (mine, theirs))
        np.testing.assert_allclose(mine(x), theirs(x), atol=2e-6)
    residuals = jax.tree.leaves(jax.vjp(ours, x)[1])
    assert [leaf.shape for leaf in residuals] == [x.shape]  # the backward pass keeps one number per element


@pytest.mark.parametrize(("V", "D", "scale"), [(50304, 1536, 0.1762), (260, 128, 1.0), (260, 256, 0.543)])
def test_scale_of_a_tied_head(V, D, scale):
    """The own token's logit, the scale times 0.02 D, is ln(V) / 2 at most."""
    assert layers.tied_head_scale(V, D, 0.02) == pytest.approx(scale, abs=1e-3)
    params = model_of(tiny_config({"model.vocab_size": V, "model.d_model": D})).init(jax.random.key(0))
    np.testing.assert_allclose(params["final_norm"]["scale"], scale, atol=1e-3)


def test_fresh_weights():
    """Fan-in variance, the two residual outputs smaller by sqrt(2 L), constants where they must start."""
    overrides = {
        "model.num_layers": 8, "model.mlp": "swiglu", "model.tie_embeddings": False, "attention.kind": "xsa",
        "attention.xsa.strength": "learned", "attention.sinks": True, "attention.value_residual": True, "attention.qk_norm": True,
    }  # fmt: skip
    params = model_of(tiny_config(overrides)).init(jax.random.key(0))
    D, F, HE, L = 32, 48, 24, 8
    attention, mlp = params["blocks"]["attention"], params["blocks"]["mlp"]
    deviations = {
        "embed": (params["embed"], 0.02), "unembed": (params["unembed"], 1 / D),
        "q": (attention["q"], D**-0.5), "k": (attention["k"], D**-0.5), "v": (attention["v"], D**-0.5),
        "out": (attention["out"], (2 * L * HE) ** -0.5),
        "up": (mlp["up"], D**-0.5), "gate": (mlp["gate"], D**-0.5), "down": (mlp["down"], (2 * L * F) ** -0.5),
    }  # fmt: skip
    for name, (weights, std) in deviations.items():
        assert float(weights.std()) == pytest.approx(std, rel=0.08), name
        assert abs(float(weights.mean())) < 5 * std / math.sqrt(weights.size), name
    for a, b in itertools.combinations(range(L), 2):
        assert (attention["q"][a] != attention["q"][b]).any()  # each layer draws its own
    assert (attention["gate"] == 0).all()
    assert (attention["sinks"] == 0).all()
    assert (attention["value_mix"] == 0.5).all()
    assert (attention["q_norm"]["scale"] == 1).all()
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
