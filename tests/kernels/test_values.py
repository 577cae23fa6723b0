"""Every implementation gives the oracle's values and gradients, for every mask and variant."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsa_kernels
from tests.kernels import oracle
from tests.kernels.cases import (
    XLA_FORMS,
    Variant,
    arrays,
    assert_close,
    errors,
    expected,
    regimes,
    relative,
    rounded,
    run,
    xla_form,
)
from xsa_kernels import MaskSpec, reference
from xsa_kernels.vendors import cudnn

XSA = Variant(rule="clamp")
RULES = {"sa": 1.0, "clamp": 1e-12, "clamped": 5.0, "add": 1e-2, "exact": 1e-12}


def variant(x, causal, window, segments, sinks, softcap, rule, per_head, own):
    """One combination. "clamped" is "clamp" with an eps that about half of all |v|^2 are below."""
    return Variant(
        mask=MaskSpec(causal, window, x["segment_ids"] if segments else None),
        sinks=x["sinks"] if sinks else None,
        softcap=1.5 if softcap else None,
        rule=None if rule == "sa" else rule.removesuffix("ed"),
        eps=RULES[rule],
        alpha=x["alpha"] if per_head else 1.0,
        v_self=x["v"][:, ::-1] if own else None,
        scale=0.7 if own else None,
    )


@pytest.mark.parametrize("rule", RULES)
def test_reference_equals_oracle(rule):
    x = arrays()
    with jax.enable_x64(True):
        for causal, window, segments, sinks, softcap in itertools.product((True, False), (None, 5), *[(False, True)] * 3):
            own, per_head = segments != softcap, sinks != causal
            case = variant(x, causal, window, segments, sinks, softcap, rule, per_head, own)
            assert_close(run(x, "reference", case, jit=False), expected(x, case), 1e-12)


# Every pair of values of two features occurs in some row.
PAIRWISE = [
    # causal window segments sinks softcap rule per_head own
    (True, None, False, False, False, "sa", False, False),
    (True, None, False, False, False, "clamp", False, False),
    (True, None, True, True, True, "clamped", True, True),
    (True, 1, True, False, False, "exact", True, False),
    (True, 1, False, True, True, "sa", False, True),
    (True, 5, False, True, False, "add", True, False),
    (True, 5, True, False, True, "clamp", False, True),
    (True, 100, True, True, False, "sa", False, False),
    (True, 100, False, False, True, "exact", True, True),
    (False, None, True, True, False, "add", False, True),
    (False, None, False, False, True, "exact", False, False),
    (False, 1, False, False, True, "add", False, False),
    (False, 1, True, True, False, "clamped", True, False),
    (False, 5, True, False, False, "sa", False, True),
    (False, 5, False, True, True, "exact", False, False),
    (False, 5, False, False, False, "clamped", False, False),
    (False, 100, True, True, True, "clamp", True, False),
]


@pytest.mark.parametrize("row", PAIRWISE, ids=lambda row: "-".join(map(str, row)))
@pytest.mark.parametrize("form", XLA_FORMS)
def test_xla_equals_oracle(row, form, monkeypatch):
    xla_form(monkeypatch, form, block=8)  # 23 tokens: two whole blocks and a part of one
    x = arrays()
    case = variant(x, *row)
    with jax.enable_x64(True):
        assert_close(run(x, "xla", case), expected(x, case), 1e-12)


@pytest.mark.fast
@pytest.mark.parametrize(("impl", "form"), [("reference", "short"), ("xla", "short"), ("xla", "long")])
def test_float32(impl, form, monkeypatch):
    xla_form(monkeypatch, form, block=8)
    x = arrays(dtype=np.float32)
    case = variant(x, True, 9, True, True, True, "clamp", True, False)
    assert_close(run(x, impl, case), expected(x, case), 2e-6)


@pytest.mark.parametrize(("T", "H", "K"), [(1, 4, 2), (8, 4, 4), (17, 4, 1), (40, 6, 3)])
def test_shapes(T, H, K, monkeypatch):
    x = arrays(T=T, H=H, K=K, dtype=np.float32)
    for form, block in itertools.product(XLA_FORMS, (8, 512)):
        xla_form(monkeypatch, form, block)
        assert_close(run(x, "xla", XSA), expected(x, XSA), 2e-6)


def test_plain_attention_is_what_jax_ships():
    x = {name: jnp.asarray(a, jnp.float32) for name, a in arrays().items()}
    theirs = jax.nn.dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, local_window_size=(3, 0))
    ours = xsa_kernels.attention(x["q"], x["k"], x["v"], mask=MaskSpec(window=4))
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize("common", [0.0, 2.0])
def test_bfloat16_budget(common, monkeypatch):
    """Half a percent, where rounding the result alone costs 0.17, however much tokens attend to themselves."""
    x, narrow = regimes(common)
    want = expected(x, XSA)
    own_weights = np.diagonal(want["p"], axis1=2, axis2=3).mean((1, 2))
    np.testing.assert_allclose(own_weights, [0.02, 0.3, 0.7, 0.9, 0.997], atol=0.06)
    for impl, form, most in (("reference", "short", 0.002), ("xla", "short", 0.005), ("xla", "long", 0.005)):
        xla_form(monkeypatch, form, block=64)
        found = relative(run(narrow, impl, XSA), want)
        assert (found <= most).all(), (impl, form, found)


def test_weights_are_the_oracles():
    x = arrays(dtype=np.float32)
    mask = MaskSpec(window=7, segment_ids=x["segment_ids"])
    p_BKGTS = xsa_kernels.weights(x["q"], x["k"], mask, x["sinks"], softcap=2.0, scale=0.9)
    want = oracle.run(x["q"], x["k"], x["v"], window=7, segment_ids=x["segment_ids"], sinks=x["sinks"], softcap=2.0, scale=0.9)["p"]
    B, H, T, S = want.shape
    np.testing.assert_allclose(np.asarray(p_BKGTS).reshape(B, H, T, S), want, atol=1e-6)


def test_tail_of_the_queries_is_the_end_of_the_whole(monkeypatch):
    """Chunked prefill and decoding: fewer queries than keys, own values given."""
    x = arrays(dtype=np.float32)
    mask = MaskSpec(window=6, segment_ids=x["segment_ids"])
    for impl, form in (("reference", "short"), ("xla", "short"), ("xla", "long")):
        xla_form(monkeypatch, form, block=8)
        whole = xsa_kernels.attention(x["q"], x["k"], x["v"], mask=mask, xsa=xsa_kernels.Projection(), impl=impl)
        for t in (1, 22):
            tail = xsa_kernels.attention(
                x["q"][:, -t:], x["k"], x["v"], v_self_BTKE=x["v"][:, -t:], mask=mask, xsa=xsa_kernels.Projection(), impl=impl
            )
            np.testing.assert_allclose(tail, whole[:, -t:], atol=2e-6)


class FakeCudnn:
    """What the two calls of cuDNN compute, in float32 and dense, from what they are given; results in the dtypes of cuDNN's."""

    def _weights(self, q, k, scale, mask_type, window):
        mask = MaskSpec(mask_type.name == "CAUSAL", window)
        return xsa_kernels.weights(q, k, mask, scale=scale)

    def forward(self, q, k, v, *, scale, mask_type, sliding_window_length, return_residual):
        assert return_residual
        p_BKGTS = self._weights(q, k, scale, mask_type, sliding_window_length)
        y = jnp.einsum("BKGTS,BSKE->BTKGE", p_BKGTS, v.astype(jnp.float32)).reshape(q.shape)
        s_BKGTS = jnp.einsum("BTKGE,BSKE->BKGTS", reference.group(q, k.shape[2]).astype(jnp.float32), k.astype(jnp.float32))
        # p = exp(s - lse) wherever p is not 0: on the first key that a row sees
        first = jnp.argmax(p_BKGTS > 0, axis=-1)[..., None]
        lse = jnp.take_along_axis(s_BKGTS * scale - jnp.log(p_BKGTS), first, axis=-1)
        return y.astype(q.dtype), lse.reshape(q.shape[0], q.shape[2], q.shape[1])

    def bind(self, q, k, v, *operands, scale, mask_type, sliding_window_length, **_):
        lse, y, dy = operands[-3:]
        K, narrow = k.shape[2], q.dtype
        q, y, dy = (reference.group(x, K).astype(jnp.float32) for x in (q, y, dy))
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        s = jnp.einsum("BTKGE,BSKE->BKGTS", q, k) * scale
        seen = reference.dense_mask(MaskSpec(mask_type.name == "CAUSAL", sliding_window_length), *s.shape[-2:])
        p = jnp.where(seen, jnp.exp(s - lse.reshape(*s.shape[:-1], 1)), 0)
        dp = jnp.einsum("BTKGE,BSKE->BKGTS", dy, v)
        ds = p * (dp - jnp.moveaxis(jnp.sum(y * dy, -1), 1, -1)[..., None]) * scale
        dq = jnp.einsum("BKGTS,BSKE->BTKGE", ds, k)
        dk = jnp.einsum("BKGTS,BTKGE->BSKE", ds, q)
        dv = jnp.einsum("BKGTS,BTKGE->BSKE", p, dy)
        return dq.reshape(*dq.shape[:2], -1, dq.shape[-1]).astype(narrow), dk.astype(narrow), dv.astype(narrow)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, None)])
@pytest.mark.parametrize("sinks", [False, True])
def test_cudnn_is_given_the_right_numbers(sinks, causal, window, monkeypatch):
    """No device runs cuDNN here, so its two calls are answered by what they should compute."""
    fake = FakeCudnn()
    monkeypatch.setattr(cudnn.stablehlo, "dot_product_attention", fake.forward)
    monkeypatch.setattr(cudnn.stablehlo, "_dot_product_attention_bwd_p_wrapper", fake)
    x, narrow = rounded(arrays(E=8), jnp.bfloat16)
    for rule, alpha in ((None, 1.0), ("clamp", 1.0), ("add", x["alpha"])):
        case = Variant(MaskSpec(causal, window), rule, alpha=alpha, scale=0.5, sinks=x["sinks"] if sinks else None)
        found = errors(run(narrow, "cudnn", case), expected(x, case))
        assert max(found.values()) < 0.015, (rule, found)
