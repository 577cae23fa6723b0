"""The Triton kernels, interpreted on the CPU, give the oracle's values and gradients; what they skip is what the mask hides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.cases import Variant, arrays, assert_close, expected, rounded
from xsa_kernels import MaskSpec, Projection, frame, rows
from xsa_kernels.gpu import spans, triton, triton_body
from xsa_kernels.request import Settings, make_request

XSA = Variant(rule="clamp")


def tiles(t, s):
    return triton.Tiles(*[triton.Tile(t, s, 4, 1)] * 3)


SMALL = tiles(16, 16)


@functools.partial(jax.jit, static_argnames=("static", "tile"))
def _run(given, segment_ids, dz, static, tile):
    causal, window, rule, eps, alpha, softcap, scale = static
    mask = MaskSpec(causal, window, segment_ids)
    backend = triton.backend(tile, interpret=True)

    def loss(given):
        q, k, v = (given[name] for name in "qkv")
        xsa = None if rule is None else Projection(given.get("alpha", alpha), rule, eps)
        request = make_request(
            q,
            k,
            v,
            mask=mask,
            xsa=xsa,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            sinks_H=given.get("sinks"),
            softcap=softcap,
            v_self_BTKE=given.get("v_self", v),
        )
        z = frame.attention(backend, request, None)
        return jnp.sum(z.astype(jnp.float32) * dz), z

    (_, z), grads = jax.value_and_grad(loss, has_aux=True)(given)
    return {"z": z} | {f"d{name}": g for name, g in grads.items()}


def run(x, variant, tile=SMALL):
    """z and the gradients, under the oracle's names. A single number as alpha is known when the program is traced."""
    per_head = np.ndim(variant.alpha) == 1
    given = {name: x[name] for name in "qkv"}
    given |= {"sinks": variant.sinks, "alpha": variant.alpha if per_head else None, "v_self": variant.v_self}
    given = {name: jnp.asarray(a, None if name in "qkv" else given["q"].dtype) for name, a in given.items() if a is not None}
    mask = variant.mask
    static = (
        mask.causal,
        mask.window,
        variant.rule,
        variant.eps,
        None if per_head else variant.alpha,
        variant.softcap,
        variant.scale,
    )
    return _run(given, mask.segment_ids, jnp.asarray(x["dz"], jnp.float32), static, tile)


def relative(got, want):
    """|error| / |value| of z and of the gradients of q, k and v."""
    return {
        name: float(np.linalg.norm(np.asarray(got[name], np.float64) - want[name]) / np.linalg.norm(want[name]))
        for name in ("z", "dq", "dk", "dv")
    }


FEATURES = {
    "causal": lambda x: Variant(rule="clamp", eps=1e-2),
    "plain": lambda x: Variant(MaskSpec(window=21), sinks=x["sinks"], softcap=1.5),
    "full": lambda x: Variant(MaskSpec(causal=False), "clamp", eps=1e-2),
    "window": lambda x: Variant(MaskSpec(window=18), "exact", sinks=x["sinks"]),
    "band": lambda x: Variant(MaskSpec(causal=False, window=5), "clamp", eps=1e-2, softcap=1.5, scale=-0.3),
    "segments": lambda x: Variant(MaskSpec(segment_ids=jnp.asarray(x["segment_ids"])), "clamp", eps=1e-2, softcap=1.5),
    "full segments": lambda x: Variant(
        MaskSpec(causal=False, segment_ids=jnp.asarray(x["segment_ids"])), "exact", sinks=x["sinks"]
    ),
    "clamped": lambda x: Variant(MaskSpec(window=9, segment_ids=jnp.asarray(x["segment_ids"])), "clamp", eps=30.0),
    "added": lambda x: Variant(rule="add", eps=1e-2, alpha=x["alpha"], sinks=x["sinks"], scale=0.7),
}


@pytest.mark.parametrize("tile", [SMALL, pytest.param(tiles(16, 32), marks=pytest.mark.long)], ids=["16x16", "16x32"])
@pytest.mark.parametrize("features", FEATURES)
def test_equals_oracle(features, tile):
    if tile != SMALL and features not in ("window", "full", "segments"):
        pytest.skip("other shapes of tiles only where they change which blocks are visited")
    x = arrays(B=1, T=45, E=24, dtype=np.float32)
    x["v"][0, 3, 0] *= 1e-2  # rows that the clamps catch, with gradients that do not dwarf the others
    x["v"][0, 7, 1] = 0
    case = FEATURES[features](x)
    assert_close(run(x, case, tile), expected(x, case), 3e-6)


@pytest.mark.fast
@pytest.mark.parametrize(("T", "H", "K", "E"), [(1, 4, 2, 16), (17, 3, 1, 80), (32, 2, 2, 64)])
def test_shapes(T, H, K, E):
    x = arrays(B=1, T=T, H=H, K=K, E=E, dtype=np.float32)
    assert_close(run(x, XSA), expected(x, XSA), 3e-6)


def test_fewer_queries_than_keys():
    x = arrays(B=1, T=19, S=45, dtype=np.float32)
    case = Variant(MaskSpec(window=20, segment_ids=jnp.asarray(x["segment_ids"])), "clamp", v_self=x["v"][:, 19:0:-1])
    assert_close(run(x, case), expected(x, case), 3e-6)


def budget_case(pull, common):
    """Random rows whose weight on themselves grows with `pull`, and whose values share a mean."""
    x = arrays(B=1, T=96, H=2, K=1, E=64)
    x["k"] += pull * x["q"][:, :, :1] / 4
    x["q"][:, :, 1] += pull * x["k"][:, :, 0] / 8
    x["v"] += common * np.random.default_rng(1).normal(size=64)
    return x


# Self weights of .06, .3, .7, .92 and .99; rounding the result alone costs 0.17% in bfloat16.
PULLS = (0.0, 1.5, 2.8, 4.2, 8.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("common", [0.0, 2.0])
def test_half_percent_in_every_regime(common, dtype):
    for pull in PULLS:
        x, narrow = rounded(budget_case(pull, common), dtype)
        found = relative(run(narrow, XSA, tiles(32, 32)), expected(x, XSA))
        assert max(found.values()) <= 0.005, (pull, found)


def _literal_delta(row_gradients):
    def mutated(request, outputs, dz_BTHE):
        found, *rest = row_gradients(request, outputs, dz_BTHE)
        delta = jnp.einsum("BTHE,BTHE->BHT", outputs.z_BTHE, dz_BTHE, preferred_element_type=jnp.float32)
        return found._replace(delta_BHT=delta), *rest

    return mutated


def _own_gradient(change):
    def mutate(row_gradients):
        def mutated(*args):
            found, *rest = row_gradients(*args)
            return found._replace(dv_start_BTKE=change(found.dv_start_BTKE)), *rest

        return mutated

    return mutate


MUTATIONS = {
    "delta from z and dz": (rows, "row_gradients", _literal_delta),
    "no gradient of the own value": (rows, "row_gradients", _own_gradient(jnp.zeros_like)),
    "own gradient to the wrong head": (rows, "row_gradients", _own_gradient(lambda dv: jnp.roll(dv, 1, axis=2))),
    "diagonal off by one": (
        triton_body,
        "_dropped",
        lambda dropped: lambda grid, rows, columns, *rest, **axis: dropped(grid, rows, columns + 1, *rest, **axis),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_budget_notices(mutation, monkeypatch):
    """Each of these is a fault that somebody has made."""
    module, name, mutate = MUTATIONS[mutation]
    monkeypatch.setattr(module, name, mutate(getattr(module, name)))
    x = budget_case(4.2, 6.0)
    x["k"], x["v"] = (np.concatenate([x[name], -x[name][:, ::-1]], axis=2) for name in "kv")
    x, narrow = rounded(x, jnp.bfloat16)
    _run.clear_cache()
    found = relative(run(narrow, XSA, tiles(32, 32)), expected(x, XSA))
    _run.clear_cache()
    assert max(found.values()) > 0.01, found


def test_rows_that_see_only_themselves_are_exactly_zero():
    x = arrays(B=1, T=45, E=16)
    case = Variant(MaskSpec(segment_ids=jnp.asarray(x["segment_ids"])), "clamp")
    _, narrow = rounded(x, jnp.bfloat16)
    got = run(narrow, case)
    first = np.diff(x["segment_ids"][0], prepend=-1) != 0
    assert first.sum() > 3
    for name in ("z", "dq"):
        assert not np.any(np.asarray(got[name], np.float32)[0, first]), name
        assert np.any(np.asarray(got[name], np.float32)[0, ~first]), name


def test_two_runs_are_bit_equal_and_tiles_do_not_matter():
    x = arrays(B=1, T=45, E=16, dtype=np.float32)
    once, again, other = run(x, XSA), run(x, XSA), run(x, XSA, tiles(32, 16))
    for name, a in once.items():
        np.testing.assert_array_equal(a, again[name], err_msg=name)
        np.testing.assert_allclose(a, other[name], atol=5e-6, err_msg=name)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1e15])
def test_finite_at_extreme_values(size):
    x = arrays(B=1, T=17, E=16, dtype=np.float32)
    x["v"] *= np.float32(size)
    x["q"] *= 1e4  # float32 holds such scores to 1e-3
    for rule in ("clamp", "exact"):
        case = Variant(rule=rule)
        got, want = run(x, case), expected(x, case)
        for name in ("z", "dv"):
            scale = np.abs(want[name]).max()
            np.testing.assert_allclose(np.asarray(got[name], np.float64) / scale, want[name] / scale, atol=2e-3, err_msg=name)
        assert all(np.all(np.isfinite(a)) for a in got.values())


@pytest.mark.fast
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 24, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("T", "S", "t", "s"), [(45, 45, 16, 16), (45, 45, 8, 16), (45, 45, 16, 8), (19, 45, 8, 16), (64, 64, 16, 16)]
)
def test_spans(T, S, t, s, causal, window, drop):
    """Blocks outside the spans are hidden, blocks said to be unmasked need no mask, and no span is longer than it must be."""
    settings = Settings(causal, window, None, 1.0, "clamp", 1e-12, drop and T == S)
    grid = spans.BlockGrid(settings, T, S, 16, t, s, segments=False)
    N, M = -(-T // t), -(-S // s)
    i, j = np.arange(N * t)[:, None] + S - T, np.arange(M * s)[None]
    seen = (j <= i if causal else True) & ((j > i - window) & (j < i + window) if window else True)
    seen = np.broadcast_to(seen, (N * t, M * s))
    some = (seen & (i < S) & (j < S)).reshape(N, t, M, s)
    unmasked = seen & ~((i == j) & settings.drop_diagonal)
    for_keys = ((unmasked & (j < S)) | (i >= S)).reshape(N, t, M, s).all((1, 3))
    for_queries = ((unmasked & (i < S)) | (j >= S)).reshape(N, t, M, s).all((1, 3))
    some = some.any((1, 3))
    for of, n, visible, unmasked in (
        (spans.key_spans, N, some, for_keys),
        (spans.query_spans, M, some.T, for_queries.T),
    ):
        for block in range(n):
            start, first, diagonal, after_diagonal, masked, stop = (int(x) for x in of(grid, block, None))
            assert start <= first <= diagonal <= after_diagonal <= masked <= stop
            shown = np.flatnonzero(visible[block])
            assert shown.size == 0 or (start <= shown[0] and shown[-1] < stop)
            assert stop - start <= (shown[-1] - shown[0] + 1 if shown.size else 0)
            assert all(unmasked[block, b] for b in [*range(first, diagonal), *range(after_diagonal, masked)])


def test_segment_spans():
    ids = jnp.asarray([[0] * 20 + [1] * 25 + [2] * 19], jnp.int32)
    grid = spans.BlockGrid(Settings(False, None, None, 1.0, None, 0.0), 64, 64, 16, 16, 8, segments=True)
    assert spans.segment_spans(grid, ids, of_keys=False).tolist() == [[[0, 3], [0, 6], [2, 8], [5, 8]]]
    assert spans.segment_spans(grid, ids, of_keys=True).tolist() == [
        [[0, 2], [0, 2], [0, 3], [1, 3], [1, 3], [1, 4], [2, 4], [2, 4]]
    ]
