"""Token by token and chunk by chunk, behind attention that knows nothing of XSA, `project` gives what the full forward gives."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cases import Variant, arrays, expected
from xsa_kernels import MaskSpec, Projection, attention, project

HEADS = pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
PAGE = 4


def paged_attention(q_NHE, k_cache, v_cache, table_NP, lengths_N):
    """What serving kernels do, in numpy: token n reads the first `lengths_N[n]` keys on the pages that `table_NP[n]` lists."""
    y_NHE = np.empty(q_NHE.shape, np.float32)
    for n, (q_HE, table, length) in enumerate(zip(q_NHE, table_NP, lengths_N, strict=True)):
        group = q_NHE.shape[1] // k_cache.shape[2]
        k, v = (np.concatenate(cache[table])[:length].repeat(group, axis=1) for cache in (k_cache, v_cache))
        s = np.einsum("he,she->hs", q_HE, k) * q_HE.shape[-1] ** -0.5
        p = np.exp(s - s.max(1, keepdims=True))
        y_NHE[n] = np.einsum("hs,she->he", p / p.sum(1, keepdims=True), v)
    return y_NHE


@HEADS
@pytest.mark.fast
def test_token_by_token_over_pages(H, K):
    """Two sequences of different length share one pool of pages in a shuffled order, as one ragged batch."""
    x = arrays(B=2, T=14, H=H, K=K, dtype=np.float32)
    xsa = Projection(alpha=np.linspace(0.5, 1, H, dtype=np.float32))
    z = np.asarray(attention(x["q"], x["k"], x["v"], xsa=xsa, impl="reference"))
    table_BP = np.array([[5, 0, 3, 6], [2, 7, 1, 4]])
    k_cache, v_cache = np.full((2, 8, PAGE, K, 6), np.nan, np.float32)
    for step in range(14):
        length_B = [step + 1, min(step, 9) + 1]  # the second sequence ends early and repeats its last token
        for b, length in enumerate(length_B):
            page, slot = divmod(length - 1, PAGE)
            k_cache[table_BP[b, page], slot], v_cache[table_BP[b, page], slot] = x["k"][b, length - 1], x["v"][b, length - 1]
        now = [(b, length - 1) for b, length in enumerate(length_B)]
        q_BHE, v_BKE = (np.stack([x[name][at] for at in now]) for name in "qv")
        got = project(paged_attention(q_BHE, k_cache, v_cache, table_BP, length_B), v_BKE, xsa)
        np.testing.assert_allclose(got, np.stack([z[at] for at in now]), atol=2e-6)
    wrong = project(paged_attention(q_BHE, k_cache, v_cache, table_BP, length_B), x["v"][:, 3], xsa)
    assert np.abs(wrong - got).max() > 0.05


@HEADS
@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_chunk_by_chunk(H, K, impl):
    """Chunked prefill by another's attention and `project`, and by `attention` with `v_self_BTKE`."""
    x = arrays(H=H, K=K, dtype=np.float32)
    xsa, ids = Projection(), jnp.asarray(x["segment_ids"])
    z = attention(x["q"], x["k"], x["v"], mask=MaskSpec(window=9, segment_ids=ids), xsa=xsa, impl="reference")
    for start, stop in ((0, 8), (8, 9), (9, 23)):
        q, k, v, own = x["q"][:, start:stop], x["k"][:, :stop], x["v"][:, :stop], x["v"][:, start:stop]
        mask = MaskSpec(window=9, segment_ids=ids[:, :stop])
        y = attention(q, k, v, v_self_BTKE=own, mask=mask, impl=impl)
        np.testing.assert_allclose(project(y, own, xsa), z[:, start:stop], atol=2e-6)
        whole = attention(q, k, v, v_self_BTKE=own, mask=mask, xsa=xsa, impl=impl)
        np.testing.assert_allclose(whole, z[:, start:stop], atol=2e-6)


def test_rounds_once():
    """From y in float32 z has the error of its own rounding; from a rounded y a larger one, for tokens that see themselves."""
    x = arrays(B=1, T=64, H=2, K=2, E=64)
    x["k"] += x["q"]
    own = jnp.asarray(x["v"], jnp.bfloat16)
    x["v"] = np.asarray(own, np.float64)
    y, z = (expected(x, case)["z"].astype(np.float32) for case in (Variant(), Variant(rule="clamp")))

    def error(y):
        got = project(y, own, Projection())
        assert got.dtype == jnp.bfloat16
        return np.linalg.norm(np.asarray(got, np.float32) - z) / np.linalg.norm(z)

    assert error(y) < 0.002
    assert error(jnp.asarray(y, jnp.bfloat16)) > 0.01
    assert project(y, own, Projection(), dtype=jnp.float32).dtype == jnp.float32


def test_quantised_values_cancel_as_they_were_stored():
    """The first token averages the dequantised value; projected on that one it leaves nothing, on the one before it a lot."""
    v = arrays(B=1, T=1, dtype=np.float32)["v"]
    step = np.abs(v).max() / 7
    stored = np.round(v / step) * step
    y = np.repeat(stored, 2, axis=2)
    assert np.abs(project(y, stored, Projection())).max() < 1e-6
    assert np.abs(project(y, v, Projection())).max() > 0.01


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "v_shape", "alpha"),
    [
        ("v_self_TKE", (4, 2, 6), 1.0),
        ("v_self_TKE", (3, 2, 5), 1.0),
        ("y_THE", (3, 3, 6), 1.0),
        ("xsa.alpha", (3, 2, 6), np.ones(2)),
    ],
)
def test_bad_shapes_are_named(argument, v_shape, alpha):
    with pytest.raises(ValueError, match=f"^{argument}: found .*, expected "):
        project(np.zeros((3, 4, 6), np.float32), np.zeros(v_shape, np.float32), Projection(alpha))
