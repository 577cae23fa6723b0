"""The Hopper kernels in jax's simulator of the chip, with its race detector on: everything but the tensor cores, which it lacks.

The two matrix products are replaced by jnp.dot. Masks, the order of the blocks, the softmax, the projection, barriers and copies
are the kernel's own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels.cases import Variant, arrays, expected, rounded
from xsa_kernels import MaskSpec, Projection, attention, frame
from xsa_kernels.gpu import hopper, hopper_tile
from xsa_kernels.request import make_request

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

    def attend(q, k, v):
        request = make_request(
            q,
            k,
            v,
            mask=variant.mask,
            xsa=xsa,
            scale=scale,
            sinks_H=sinks,
            softcap=variant.softcap,
            v_self_BTKE=v if variant.v_self is None else v_self,
        )
        return frame.attention(hopper.backend(interpret=True), request, None)

    return attend


FEATURES = {
    "causal": lambda x: Variant(rule="clamp", eps=1e-2),
    "full": lambda x: Variant(MaskSpec(causal=False), "clamp", eps=1e-2),
    "clamped": lambda x: Variant(rule="clamp", eps=60.0),  # about half the rows keep their diagonal
    "plain": lambda x: Variant(scale=-0.1),
    "window": lambda x: Variant(MaskSpec(window=70), "exact", sinks=x["sinks"], softcap=2.0),
    "band": lambda x: Variant(MaskSpec(causal=False, window=40), "add", eps=1e-2, alpha=x["alpha"].astype(np.float32)),
}


def check(x, case, narrow):
    z, vjp = jax.vjp(attend(narrow, case), *(narrow[name] for name in "qkv"))
    got = dict(zip(("z", "dq", "dk", "dv"), (z, *vjp(jnp.asarray(x["dz"], jnp.bfloat16))), strict=True))
    want = expected(x, case)
    for name, a in got.items():
        error = np.asarray(a, np.float64) - want[name]
        tiny = 1e-12  # what rounding leaves of the oracle's zeros, such as all of a call of one token
        assert np.linalg.norm(error) <= 0.004 * np.linalg.norm(want[name]) + tiny, name
        # No single row may be off, whatever share of the whole it has.
        assert np.linalg.norm(error, axis=-1).max() <= 0.03 * np.linalg.norm(want[name], axis=-1).max() + tiny, name


@simulated
@pytest.mark.parametrize("features", FEATURES)
def test_equals_oracle(features, products):
    x = arrays(B=1, T=256, H=2, K=1, E=64)
    x["v"][0, 3, 0] *= 1e-2  # a row that the clamps catch, with a gradient that does not dwarf the others
    x["v"][0, 140] = 0
    x, narrow = rounded(x, jnp.bfloat16)
    check(x, FEATURES[features](x), narrow)


def documents(*lengths):
    return jnp.asarray(np.repeat(np.arange(len(lengths)), lengths)[None], jnp.int32)


@simulated
@pytest.mark.parametrize(
    ("lengths", "features"),
    [
        ((1, 99, 150, 6, 256), {}),  # the last document is alone in its blocks
        ((200, 130, 182), {"causal": False, "window": 70}),
        ((60, 1, 140), {"causal": False}),  # what pads the keys has the id of the first document
    ],
)
def test_segments(lengths, features, products):
    x, narrow = rounded(arrays(B=1, T=sum(lengths), H=2, K=1, E=64), jnp.bfloat16)
    mask = MaskSpec(segment_ids=documents(*lengths), **features)
    check(x, Variant(mask, "clamp", sinks=x["sinks"]), narrow)


@simulated
def test_segments_that_come_again(products):
    """Ids in no order: a block's range of ids says nothing of what lies between."""
    x, narrow = rounded(arrays(B=2, T=256, H=1, K=1, E=64), jnp.bfloat16)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 4)).repeat(64, axis=1), jnp.int32)
    check(x, Variant(MaskSpec(segment_ids=ids), "clamp"), narrow)


@simulated
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 9), (77, 77), (129, 129), (200, 200), (100, 203)])
def test_lengths_that_no_block_divides(T, S, products):
    x = arrays(B=2, T=T, S=S, H=2, K=1, E=64)
    x, narrow = rounded(x, jnp.bfloat16)
    check(x, Variant(rule="clamp", v_self=None if T == S else x["v"][:, -T:], softcap=2.0), narrow)


@simulated
def test_buffers_are_refilled(products):
    """More key blocks than buffers, forward and backward: the race detector sees every slot written again."""
    x, narrow = rounded(arrays(B=1, T=512, H=1, K=1, E=128), jnp.bfloat16)
    check(x, Variant(rule="clamp"), narrow)


@simulated
@pytest.mark.parametrize("lengths", [(), (60, 30, 110)])
def test_fewer_queries_than_keys(lengths, products):
    x, narrow = rounded(arrays(B=1, T=128, S=200, H=2, K=1, E=64), jnp.bfloat16)
    ids = documents(*lengths) if lengths else None
    check(x, Variant(MaskSpec(window=90, segment_ids=ids), "clamp", v_self=x["v"][:, :128]), narrow)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"E": 72}, "another multiple of 8 up to 256 as head_dim"),
        ({"dtype": jnp.float32}, "dtype=float32"),
    ],
)
def test_refuses_what_it_cannot(change, named):
    q = jax.ShapeDtypeStruct((1, 128, 2, change.get("E", 64)), change.get("dtype", jnp.bfloat16))
    with pytest.raises(ValueError, match=named):
        jax.eval_shape(lambda q: attention(q, q, q, xsa=Projection(), impl="hopper"), q)
