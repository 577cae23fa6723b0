"""The frame around a dense float32 backend, written from the contract in `backend.py`: no kernel runs here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.kernels import cases
from tests.kernels.cases import Variant, assert_close, expected
from xsa_kernels import MaskSpec, Projection, Sharding, frame, reference, rows
from xsa_kernels.backend import Backend, Gradients, Outputs
from xsa_kernels.request import make_request


def _mask(request):
    return dataclasses.replace(request.settings.mask, segment_ids=request.segment_ids_BS)


def dense_forward(request):
    q, k, v, v_self, settings = request.q_BTHE, request.k_BSKE, request.v_BSKE, request.projected_v_BTKE, request.settings
    (B, T, H, _), K = q.shape, k.shape[2]
    p = reference.weights(q, k, _mask(request), request.sinks_H, settings.softcap, settings.scale)
    s = jnp.einsum("BTKGE,BSKE->BKGTS", reference.group(q, K), k) * settings.scale
    s = s if settings.softcap is None else settings.softcap * jnp.tanh(s / settings.softcap)
    s = jnp.where(reference.dense_mask(_mask(request), T, k.shape[1])[:, None, None], s, -jnp.inf).reshape(B, H, T, -1)
    if request.sinks_H is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(request.sinks_H[:, None, None], (B, H, T, 1))], -1)
    lse = jax.nn.logsumexp(s, axis=-1)
    if v_self is None:
        return Outputs(jnp.einsum("BKGTS,BSKE->BTKGE", p, v).reshape(q.shape), lse, None)
    n2 = jnp.sum(v_self * v_self, -1)
    if settings.drop_diagonal:
        p = _without_diagonal(p, ~settings.exact(n2).swapaxes(1, 2))
    y = jnp.einsum("BKGTS,BSKE->BTKGE", p, v)
    c = jnp.einsum("BTKGE,BTKE->BTKG", y, v_self) * settings.inverse(n2)[..., None]
    alpha = 1 if request.alpha_H is None else request.alpha_H.reshape(K, -1)
    z = y - (alpha * c)[..., None] * v_self[:, :, :, None]
    return Outputs(z.reshape(q.shape), lse, jnp.moveaxis(c, 1, -1).reshape(B, H, T))


def dense_backward(request, outputs, rows):
    settings, k, v = request.settings, request.k_BSKE, request.v_BSKE
    (B, T, H, E), (_, S, K, _) = request.q_BTHE.shape, k.shape
    q, dy = reference.group(request.q_BTHE, K), reference.group(rows.dy_BTHE, K)
    lse, delta = (x.reshape(B, K, H // K, T, 1) for x in (outputs.lse_BHT, rows.delta_BHT))
    raw = jnp.einsum("BTKGE,BSKE->BKGTS", q, k) * settings.scale
    s = raw if settings.softcap is None else settings.softcap * jnp.tanh(raw / settings.softcap)
    p = jnp.where(reference.dense_mask(_mask(request), T, S)[:, None, None], jnp.exp(s - lse), 0)
    dp = jnp.einsum("BTKGE,BSKE->BKGTS", dy, v)
    p_off = p
    if rows.keeps_diagonal_BKT is not None:
        p_off, dp = (_without_diagonal(x, rows.keeps_diagonal_BKT) for x in (p, dp))
    ds = p * (dp - delta) * settings.scale
    if settings.softcap is not None:
        ds = ds * (1 - (s / settings.softcap) ** 2)
    dq = jnp.einsum("BKGTS,BSKE->BTKGE", ds, k).reshape(B, T, H, E)
    dk = jnp.einsum("BKGTS,BTKGE->BSKE", ds, q)
    dv = jnp.einsum("BKGTS,BTKGE->BSKE", p_off, dy) + (0 if rows.dv_start_BTKE is None else rows.dv_start_BTKE)
    return Gradients(dq, dk, dv)


def _without_diagonal(x_BKGTT, keeps_diagonal_BKT):
    return jnp.where(jnp.eye(x_BKGTT.shape[-1], dtype=bool) & ~keeps_diagonal_BKT[:, :, None, :, None], 0, x_BKGTT)


DENSE = Backend(dense_forward, dense_backward)


def masks(x):
    return {
        "causal": MaskSpec(),
        "full": MaskSpec(causal=False),
        "window": MaskSpec(window=4),
        "band": MaskSpec(causal=False, window=3),
        "segments": MaskSpec(segment_ids=jnp.asarray(x["segment_ids"])),
    }


# Rules with a limit that some rows are below, a fixed alpha, and one alpha per head.
PROJECTIONS = {
    "none": Variant(),
    "clamp": Variant(rule="clamp", eps=0.5),
    "add": Variant(rule="add", eps=0.5),
    "exact": Variant(rule="exact"),
    "alpha": Variant(rule="clamp", eps=0.5, alpha=0.7),
    "alpha per head": Variant(rule="clamp", eps=0.5, alpha=np.linspace(-0.5, 1.5, 4, dtype=np.float32)),
}
XSA = PROJECTIONS["exact"]


def arrays(**shape):
    """Float32 inputs in which some rows of V are small and one is zero."""
    x = cases.arrays(dtype=np.float32, **shape)
    x["v"][0, 3::5, 0] *= 0.1
    x["v"][1, 7, -1] = 0
    return x


def run(backend, x, variant, sharding=None):
    """z and the gradients of a backend under the oracle's names, in the dtype of q."""
    given = {name: jnp.asarray(x[name]) for name in "qkv"}
    given |= {name: jnp.asarray(a) for name, a in (("sinks", variant.sinks), ("v_self", variant.v_self)) if a is not None}
    if np.ndim(variant.alpha):
        given["alpha"] = jnp.asarray(variant.alpha)
    scale = given["q"].shape[-1] ** -0.5 if variant.scale is None else variant.scale

    @jax.jit
    def call(given, dz, mask):
        def attend(given):
            q, k, v = (given[name] for name in "qkv")
            xsa = variant.rule and Projection(given.get("alpha", variant.alpha), variant.rule, variant.eps)
            request = make_request(
                q, k, v, v_self_BTKE=given.get("v_self", v), mask=mask, xsa=xsa, sinks_H=given.get("sinks"),
                softcap=variant.softcap, scale=scale,
            )  # fmt: skip
            return frame.attention(backend, request, sharding)

        z, pull = jax.vjp(attend, given)
        return {"z": z} | {f"d{name}": g for name, g in pull(dz)[0].items()}

    return call(given, jnp.asarray(x["dz"], given["q"].dtype), variant.mask)


@pytest.mark.parametrize("mask", masks(cases.arrays()))
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_z_and_every_gradient(mask, projection):
    x = arrays()
    variant = dataclasses.replace(PROJECTIONS[projection], mask=masks(x)[mask])
    if mask in ("causal", "band"):
        variant = dataclasses.replace(variant, sinks=x["sinks"], softcap=3.0, scale=0.3)
    assert_close(run(DENSE, x, variant), expected(x, variant), 2e-5)


@pytest.mark.fast
@pytest.mark.parametrize("T", [23, 9])
def test_own_values_that_are_not_the_values(T):
    x = arrays(T=T, S=23)
    variant = dataclasses.replace(XSA, v_self=cases.arrays(T=T, seed=1, dtype=np.float32)["v"])
    assert_close(run(DENSE, x, variant), expected(x, variant), 2e-5)


@pytest.mark.fast
def test_only_an_exact_projection_drops_the_diagonal():
    found = []

    def forward(request):
        found.append(request.settings.drop_diagonal)
        return dense_forward(request)

    x = arrays()
    backend = Backend(forward, dense_backward)
    for variant in PROJECTIONS.values():
        run(backend, x, variant)
    run(backend, x, dataclasses.replace(XSA, v_self=x["v"]))
    assert found == [False, True, False, True, False, False, False]


def test_saves_no_y():
    """Beside its inputs a layer keeps z, and one float32 per (token, head) more than attention without the projection."""
    x = arrays()
    q, k, v = (jnp.asarray(x[name]) for name in "qkv")

    def saved(xsa):

        def attend(q, k, v):
            return frame.attention(DENSE, make_request(q, k, v, mask=MaskSpec(), xsa=xsa, scale=1.0), None)

        _, pull = jax.eval_shape(functools.partial(jax.vjp, attend), q, k, v)
        return sorted(leaf.shape for leaf in jax.tree.leaves(pull))

    plain, projected = saved(None), saved(Projection())
    for shape in plain:
        projected.remove(shape)
    assert projected == [(2, 4, 23)]


@pytest.mark.parametrize(
    "wrong", [jnp.zeros_like, lambda dv_self: jnp.roll(dv_self, 1, axis=2)], ids=["missing", "of another head"]
)
def test_a_wrong_dv_self_shows(wrong, monkeypatch):
    right = rows.row_gradients

    def mutated(*args):
        of_rows, *rest = right(*args)
        return of_rows._replace(dv_start_BTKE=wrong(of_rows.dv_start_BTKE)), *rest

    monkeypatch.setattr(rows, "row_gradients", mutated)
    x = arrays()
    with pytest.raises(AssertionError):
        assert_close(run(DENSE, x, XSA), expected(x, XSA), 2e-5)


@pytest.mark.fast
@pytest.mark.parametrize("K", [4, 1], ids=["heads are split", "one KV head for all"])
def test_a_mesh_changes_nothing(K):
    x = arrays(B=4, K=K)
    variant = Variant(masks(x)["segments"], "clamp", alpha=x["alpha"], sinks=x["sinks"])
    alone = run(DENSE, x, variant)
    with jax.set_mesh(jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)):
        together = run(DENSE, x, variant, Sharding(batch=("data", "fsdp"), heads="tensor"))
    assert_close(together, {name: np.asarray(a, np.float64) for name, a in alone.items()}, 1e-6)
    assert together["z"].sharding.shard_shape(together["z"].shape) == (1, 23, 2, 6)


@pytest.mark.fast
def test_heads_that_do_not_divide_are_refused():
    x = arrays(B=4, H=3, K=3)
    with (
        jax.set_mesh(jax.make_mesh((4, 2), ("data", "tensor"), (AxisType.Auto,) * 2)),
        pytest.raises(ValueError, match="q_BTHE: found 3 heads"),
    ):
        run(DENSE, x, XSA, Sharding(batch="data", heads="tensor"))
