"""What must be true of XSA whatever the numbers are, for both implementations that run on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.cases import Variant, arrays, run, xla_form
from xsa_kernels import MaskSpec, Projection, attention

IMPLS = pytest.mark.parametrize(("impl", "form"), [("reference", "short"), ("xla", "short"), ("xla", "long")], indirect=["form"])
XSA = Projection()


@pytest.fixture(autouse=True)
def form(request, monkeypatch):
    xla_form(monkeypatch, getattr(request, "param", "short"), block=8)


@pytest.fixture(scope="module")
def x():
    return arrays(dtype=np.float32)


@pytest.mark.fast
@IMPLS
def test_first_token_of_a_document_is_zero(x, impl):
    """y is v there, for every query head: a wrong KV head, or one head too few, cannot pass."""
    ids = x["segment_ids"]
    first = np.diff(ids, axis=1, prepend=-1) != 0
    assert first.sum() > 10
    z = np.asarray(attention(x["q"], x["k"], x["v"], mask=MaskSpec(segment_ids=ids), xsa=XSA, impl=impl))
    assert np.abs(z[first]).max() <= (0 if impl == "xla" else 1e-6)
    assert np.abs(z[~first]).max() > 0.1
    got = run(
        {**x, **{name: jnp.asarray(x[name], jnp.bfloat16) for name in "qkv"}}, impl, Variant(MaskSpec(segment_ids=ids), "clamp")
    )
    assert impl == "reference" or not got["dq"][first].any()
    alone = attention(x["q"][:, :1], x["k"][:, :1], x["v"][:, :1], xsa=XSA, impl=impl)
    assert np.abs(alone).max() <= (0 if impl == "xla" else 1e-6)


@IMPLS
def test_heads_are_grouped_in_order(x, impl):
    """GQA equals MHA with each KV head repeated; with the KV heads tiled it does not."""
    z = attention(x["q"], x["k"], x["v"], xsa=XSA, impl=impl)
    repeated, tiled = (
        attention(x["q"], copy(x["k"]), copy(x["v"]), xsa=XSA, impl=impl)
        for copy in (lambda a: np.repeat(a, 2, axis=2), lambda a: np.tile(a, (1, 1, 2, 1)))
    )
    np.testing.assert_allclose(z, repeated, atol=1e-6)
    assert np.abs(z - tiled).max() > 0.1


@IMPLS
def test_packed_documents_equal_documents_alone(x, impl):
    ids = np.broadcast_to(np.repeat([3, 1, 2], [10, 1, 12]), (2, 23)).astype(np.int32)
    packed = attention(x["q"], x["k"], x["v"], mask=MaskSpec(segment_ids=ids), xsa=XSA, impl=impl)
    for part in (slice(0, 10), slice(10, 11), slice(11, 23)):
        alone = attention(x["q"][:, part], x["k"][:, part], x["v"][:, part], xsa=XSA, impl=impl)
        np.testing.assert_allclose(packed[:, part], alone, atol=1e-6)


@IMPLS
def test_wide_window_is_no_window(x, impl):
    for causal in (True, False):
        open_, wide = (
            attention(x["q"], x["k"], x["v"], mask=MaskSpec(causal, window), xsa=XSA, impl=impl) for window in (None, 23)
        )
        np.testing.assert_array_equal(open_, wide)


@IMPLS
def test_future_changes_nothing_before_it(x, impl):
    """Bit for bit, also through the projection; without `causal` the same change is seen."""
    changed = {name: np.concatenate([x[name][:, :14], 9 - x[name][:, 14:]], axis=1) for name in "qkv"}
    for causal in (True, False):
        a, b = (attention(y["q"], y["k"], y["v"], mask=MaskSpec(causal), xsa=XSA, impl=impl) for y in (x, changed))
        assert np.array_equal(a[:, :14], b[:, :14]) == causal


@IMPLS
def test_output_is_orthogonal_to_the_own_value(x, impl):
    z = np.asarray(attention(x["q"], x["k"], x["v"], xsa=XSA, impl=impl))
    own = np.repeat(x["v"], 2, axis=2)
    assert np.abs((z * own).sum(-1)).max() < 1e-5


@IMPLS
def test_scales_with_the_values(x, impl):
    z, tenfold = (attention(x["q"], x["k"], factor * x["v"], xsa=XSA, impl=impl) for factor in (1, 10))
    np.testing.assert_allclose(tenfold, 10 * z, atol=2e-5)
    along = attention(x["q"], x["k"], x["v"], xsa=XSA, v_self_BTKE=10 * x["v"], impl=impl)
    np.testing.assert_allclose(along, z, atol=2e-6)


@IMPLS
def test_alpha_zero_is_plain_attention(x, impl):
    plain, zero, array = (
        attention(x["q"], x["k"], x["v"], xsa=xsa, impl=impl)
        for xsa in (None, Projection(alpha=0.0), Projection(alpha=jnp.zeros(4)))
    )
    np.testing.assert_array_equal(plain, zero)
    np.testing.assert_array_equal(plain, array)
    one, ones = (attention(x["q"], x["k"], x["v"], xsa=Projection(alpha=a), impl=impl) for a in (1.0, jnp.ones(4)))
    np.testing.assert_allclose(one, ones, atol=1e-6)


@IMPLS
def test_sink_of_minus_infinity_is_none(x, impl):
    off = np.array([-np.inf, 0.5, -np.inf, 0.5], np.float32)
    some = run(x, impl, Variant(rule="clamp", sinks=off))
    none = run(x, impl, Variant(rule="clamp"))
    for head in (0, 2):
        np.testing.assert_allclose(some["z"][:, :, head], none["z"][:, :, head], atol=1e-6)
        assert some["dsinks"][head] == 0
    assert np.abs(some["z"] - none["z"]).max() > 0.05


@pytest.mark.fast
@IMPLS
@pytest.mark.parametrize("rule", ["clamp", "add", "exact"])
def test_values_near_zero_and_huge(x, rule, impl):
    """v = 0 passes y on and stays finite both ways; from 1e-20 to 1e15 z and its gradients are the oracle's."""
    size = np.ones((23, 1, 1), np.float32)
    size[3], size[7], size[11], size[15] = 0, 1e-20, 1e-4, 1e15
    y = {**x, "v": x["v"] * size}
    # A huge value hides all others from the queries that see it; let each token see itself and the two before.
    case = Variant(MaskSpec(window=3), rule)
    got, want = run(y, impl, case), oracle.run(y["q"], y["k"], y["v"], y["dz"], window=3, xsa=True, zero_rule=rule)
    assert all(np.isfinite(a).all() for a in got.values())
    calm = [t for t in range(23) if not 15 <= t <= 17]
    for name in ("z", "dq"):
        np.testing.assert_allclose(got[name][:, calm], want[name][:, calm], atol=5e-6)
    size_of_gradient = np.abs(want["dv"]).max(axis=(0, 2, 3))
    assert (np.abs(got["dv"] - want["dv"]).max(axis=(0, 2, 3)) <= 1e-4 * size_of_gradient)[calm].all()


@IMPLS
def test_extreme_logits(x, impl):
    for factor in (0, 1e4):
        got = run({**x, "q": factor * x["q"]}, impl, Variant(rule="clamp", sinks=x["sinks"]))
        want = oracle.run(factor * x["q"], x["k"], x["v"], xsa=True, sinks=x["sinks"])
        np.testing.assert_allclose(got["z"], want["z"], atol=2e-3 if factor else 2e-6)
        assert all(np.isfinite(a).all() for a in got.values())


def test_two_runs_are_bit_equal(x):
    call = jax.jit(lambda q, k, v: jax.grad(lambda *a: attention(*a, xsa=XSA).sum(), (0, 1, 2))(q, k, v))
    for a, b in zip(call(x["q"], x["k"], x["v"]), call(x["q"], x["k"], x["v"]), strict=True):
        np.testing.assert_array_equal(a, b)
