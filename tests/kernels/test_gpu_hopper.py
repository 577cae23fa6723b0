"""The Hopper kernels in jax's simulator of the chip, with its race detector on: everything but the tensor cores, which it lacks.

The two matrix products are replaced by jnp.dot. Masks, the order of the blocks, the softmax, the projection, barriers and copies
are the kernel's own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import MaskSpec, Projection, fused
from kernels.gpu import hopper, hopper_tile
from tests.kernels.cases import Variant, arrays, expected, rounded

simulated = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the simulator of jax before 0.12 cannot run these kernels")


@pytest.fixture
def products(monkeypatch):
    def products(*pairs, meanwhile=None):
        found = tuple(jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32) for a, b in pairs)
        plgpu.commit_smem()  # tensor cores read in the order of copies, plain loads do not
        if meanwhile is not None:
            meanwhile()
        return found

    def add_products(*triples):
        found = tuple(c + jnp.dot(a, b[...], preferred_element_type=jnp.float32) for c, a, b in triples)
        plgpu.commit_smem()
        return found

    monkeypatch.setattr(hopper_tile, "products", products)
    monkeypatch.setattr(hopper_tile, "add_products", add_products)


def attend(x, variant):
    xsa = variant.rule and Projection(
        jnp.asarray(variant.alpha) if np.ndim(variant.alpha) else variant.alpha, variant.rule, variant.eps
    )
    sinks = None if variant.sinks is None else jnp.asarray(variant.sinks, jnp.float32)
    scale = x["q"].shape[-1] ** -0.5 if variant.scale is None else variant.scale
    v_self = x["v"] if variant.v_self is None else jnp.asarray(variant.v_self, x["v"].dtype)
    return lambda q, k, v: fused.attention(
        hopper.backend(interpret=True),
        q,
        k,
        v,
        v if variant.v_self is None else v_self,
        variant.mask,
        xsa,
        sinks,
        variant.softcap,
        scale,
    )


FEATURES = {
    "causal": lambda x: Variant(rule="clamp", eps=1e-2),
    "full": lambda x: Variant(MaskSpec(causal=False), "clamp", eps=1e-2),
    "clamped": lambda x: Variant(rule="clamp", eps=60.0),  # about half the rows keep their diagonal
    "plain": lambda x: Variant(scale=-0.1),
    "window": lambda x: Variant(MaskSpec(window=70), "exact", sinks=x["sinks"], softcap=2.0),
    "band": lambda x: Variant(MaskSpec(causal=False, window=40), "add", eps=1e-2, alpha=x["alpha"].astype(np.float32)),
}


@simulated
@pytest.mark.parametrize("features", FEATURES)
def test_equals_oracle(features, products):
    x = arrays(B=1, T=256, H=2, K=1, E=64)
    x["v"][0, 3, 0] *= 1e-2  # a row that the clamps catch, with a gradient that does not dwarf the others
    x["v"][0, 140] = 0
    x, narrow = rounded(x, jnp.bfloat16)
    case = FEATURES[features](x)
    z, vjp = jax.vjp(attend(narrow, case), *(narrow[name] for name in "qkv"))
    got = dict(zip(("z", "dq", "dk", "dv"), (z, *vjp(jnp.asarray(x["dz"], jnp.bfloat16))), strict=True))
    want = expected(x, case)
    for name, a in got.items():
        error = np.asarray(a, np.float64) - want[name]
        assert np.linalg.norm(error) <= 0.004 * np.linalg.norm(want[name]), name
        # No single row may be off, whatever share of the whole it has.
        assert np.linalg.norm(error, axis=-1).max() <= 0.03 * np.linalg.norm(want[name], axis=-1).max(), name


@simulated
def test_buffers_are_refilled(products):
    """More key blocks than buffers, forward and backward: the race detector sees every slot written again."""
    x, narrow = rounded(arrays(B=1, T=512, H=1, K=1, E=128), jnp.bfloat16)
    case = Variant(rule="clamp")
    z, vjp = jax.vjp(attend(narrow, case), *(narrow[name] for name in "qkv"))
    got, want = (z, *vjp(jnp.asarray(x["dz"], jnp.bfloat16))), expected(x, case)
    for name, a in zip(("z", "dq", "dk", "dv"), got, strict=True):
        error = np.asarray(a, np.float64) - want[name]
        assert np.linalg.norm(error) <= 0.004 * np.linalg.norm(want[name]), name


@simulated
def test_fewer_queries_than_keys(products):
    x = arrays(B=1, T=128, S=200, H=2, K=1, E=64)
    x, narrow = rounded(x, jnp.bfloat16)
    case = Variant(MaskSpec(window=90), "clamp", v_self=x["v"][:, :128])
    z, vjp = jax.vjp(attend(narrow, case), *(narrow[name] for name in "qkv"))
    got, want = (z, *vjp(jnp.asarray(x["dz"], jnp.bfloat16))), expected(x, case)
    for name, a in zip(("z", "dq", "dk", "dv"), got, strict=True):
        error = np.asarray(a, np.float64) - want[name]
        assert np.linalg.norm(error) <= 0.004 * np.linalg.norm(want[name]), name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"T": 100}, "100 queries"),
        ({"E": 72}, "head_dim=72"),
        ({"dtype": jnp.float32}, "dtype=float32"),
        ({"ids": True}, "segment_ids"),
    ],
)
def test_refuses_what_it_cannot(change, named):
    dtype, ids, E = change.get("dtype", jnp.bfloat16), change.get("ids"), change.get("E", 64)
    q = jax.ShapeDtypeStruct((1, change.get("T", 128), 2, E), dtype)
    mask = MaskSpec(segment_ids=jnp.zeros((1, 128), jnp.int32) if ids else None)
    with pytest.raises(ValueError, match=named):
        jax.eval_shape(lambda q: fused.attention(hopper.backend(), q, q, q, q, mask, Projection(), None, None, 1.0), q)
