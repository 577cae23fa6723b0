"""The TPU kernels, interpreted on a CPU, give the oracle's values and gradients; and the faults they could have show."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType

from tests.kernels import cases
from tests.kernels.cases import Variant, assert_close, expected, regimes, relative, rounded
from tests.kernels.test_frame import XSA, run
from xsa_kernels import MaskSpec, Sharding, tpu
from xsa_kernels.tpu import backward, backward_body, schedule, tile

SMALL = tpu.Blocks(128, 128, 128, 128)
INTERPRETED = tpu.backend(SMALL, SMALL, interpret=True)


def arrays(T=300, B=2, seed=0, **shape):
    """Rows of V below a limit of 1e-2, a zero row, and documents that cross blocks, fill blocks, and lie inside one."""
    x = cases.arrays(B=B, T=T, seed=seed, dtype=np.float32, **{"H": 2, "K": 1, "E": 16, **shape})
    x["v"][0, 3::50] *= 1e-3
    x["v"][-1, T // 2] = 0
    borders = np.array([5, 6, 140, 290])
    x["segment_ids"] = np.stack([np.searchsorted(borders + 20 * b, np.arange(x["v"].shape[1])) for b in range(B)]).astype(np.int32)
    return x


FEATURES = {
    "causal, groups": lambda x: Variant(rule="clamp", eps=1e-2),
    "no projection": lambda x: Variant(sinks=x["sinks"], softcap=2.0),
    "full": lambda x: Variant(MaskSpec(causal=False), "exact", softcap=2.0, scale=-0.3),
    "window": lambda x: Variant(MaskSpec(window=100), "clamp", sinks=np.array([-np.inf, 0.5], np.float32)),
    "band": lambda x: Variant(MaskSpec(causal=False, window=20), "clamp", eps=1e-2),
    "segments": lambda x: Variant(MaskSpec(segment_ids=jnp.asarray(x["segment_ids"])), "clamp", eps=1e-2),
    "full segments": lambda x: Variant(
        MaskSpec(causal=False, segment_ids=jnp.asarray(x["segment_ids"])), "exact", sinks=x["sinks"]
    ),
    "full segments, no projection": lambda x: Variant(
        MaskSpec(causal=False, segment_ids=jnp.asarray(x["segment_ids"])), sinks=x["sinks"]
    ),
    "alpha": lambda x: Variant(rule="clamp", eps=1e-2, alpha=x["alpha"]),
    "add": lambda x: Variant(rule="add", eps=1e-2),
}


@pytest.mark.parametrize("features", FEATURES)
def test_equals_oracle(features):
    x = arrays()
    variant = FEATURES[features](x)
    assert_close(run(INTERPRETED, x, variant), expected(x, variant), 5e-6)


@pytest.mark.fast
@pytest.mark.parametrize(("T", "H", "K", "E"), [(1, 2, 2, 128), (17, 4, 1, 80), (129, 2, 2, 256)])
def test_shapes(T, H, K, E):
    x = cases.arrays(B=1, T=T, H=H, K=K, E=E, dtype=np.float32)
    assert_close(run(INTERPRETED, x, XSA), expected(x, XSA), 5e-6)


def test_fewer_queries_than_keys():
    """The first block of keys is seen by no query, and its gradients are written all the same."""
    x = arrays(T=130, S=300)
    variant = Variant(MaskSpec(window=30), "clamp", v_self=x["v"][:, 129::-1])
    assert_close(run(INTERPRETED, x, variant), expected(x, variant), 5e-6)


@pytest.mark.parametrize("blocks", [tpu.Blocks(256, 128, 128, 128), tpu.Blocks(128, 256, 128, 128)])
def test_block_sizes_do_not_matter(blocks):
    x = arrays(B=1)
    variant = Variant(MaskSpec(window=150), "clamp", eps=1e-2)
    assert_close(run(tpu.backend(blocks, blocks, interpret=True), x, variant), expected(x, variant), 5e-6)


@pytest.mark.parametrize("features", ["causal, groups", "no projection", "window", "segments", "alpha"])
@pytest.mark.parametrize("blocks", [tpu.Blocks(256, 256, 128, 128), tpu.Blocks(512, 512, 256, 256)])
def test_several_strips_and_pieces_in_a_block(features, blocks):
    """On the diagonal causality is looked at in a strip's own square alone; a window or ids hide keys before it."""
    x = arrays(B=1, T=600)
    variant = FEATURES[features](x)
    assert_close(run(tpu.backend(blocks, blocks, interpret=True), x, variant), expected(x, variant), 5e-6)


@pytest.mark.parametrize("generation", [5, 6])
def test_blocks_of_the_table_fit_any_length(monkeypatch, generation):
    monkeypatch.setattr(tile, "generation", lambda: generation)
    x = arrays(B=1, T=600)
    assert_close(run(tpu.backend.__wrapped__(interpret=True), x, XSA), expected(x, XSA), 5e-6)


@pytest.mark.parametrize("S", [256, 384])
def test_own_values_that_are_not_the_diagonal_blocks(S):
    """The queries' block holds their own keys, but not the values to project on."""
    x = arrays(B=1, T=256, S=S)
    variant = Variant(rule="clamp", eps=1e-2, v_self=x["v"][:, 255::-1])
    assert_close(run(INTERPRETED, x, variant), expected(x, variant), 5e-6)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("blocks", "expected"),
    [((128, 128, 128, 100), "multiples of 128"), ((128, 256, 384, 128), "to divide kv"), ((256, 128, 128, 384), "to divide q")],
)
def test_block_sizes_are_checked(blocks, expected):
    with pytest.raises(ValueError, match=expected):
        tpu.Blocks(*blocks)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("generation", "E", "size"), [(5, 128, (128, 128)), (6, 128, (256, 512)), (7, 256, (256, 256)), (None, 64, (256, 512))]
)
def test_scores_at_a_time_go_by_the_matrix_unit(monkeypatch, generation, E, size):
    monkeypatch.setattr(tile, "generation", lambda: generation)
    blocks = schedule.forward_blocks(E)
    assert (blocks.compute, blocks.rows) == size


@pytest.mark.parametrize("size", [128, 256])
def test_rows_that_do_not_fit_come_in_chunks_and_smaller_blocks(monkeypatch, size):
    monkeypatch.setattr(backward, "ROW_BYTES", 2 * 128 * 16 * 8)  # 128 rows of the two query heads
    blocks = tpu.Blocks(size, size, 128, size)
    x = arrays(B=1)
    assert_close(run(tpu.backend(blocks, blocks, interpret=True), x, XSA), expected(x, XSA), 5e-6)


@pytest.mark.parametrize("common", [0.0, 2.0])
def test_half_percent_in_every_regime(common):
    x, narrow = regimes(common)
    want = expected(x, XSA)
    self_weights = np.diagonal(want["p"], axis1=2, axis2=3).mean((1, 2))
    np.testing.assert_allclose(self_weights, [0.02, 0.3, 0.7, 0.9, 0.997], atol=0.06)
    found = relative(run(INTERPRETED, narrow, XSA), want)
    assert (found <= 0.005).all(), found


def _with(fault):
    """`backward_body._initialise_rows` followed by a fault in what it leaves behind."""

    def faulty(settings, part, x, rows, scratch, *, honest=backward_body._initialise_rows):
        before = scratch.dv[:, part]
        dropped_key = honest(settings, part, x, rows, scratch)
        fault(part, x, rows, scratch, before)
        return dropped_key

    return faulty


def _literal_delta(part, x, rows, scratch, before):
    z, dz = (ref[part, :].T.astype(jnp.float32) for ref in (x.z, x.dz))
    rows.delta[:, part] = jnp.sum(z * dz, axis=0, keepdims=True)


def _no_dv_self(part, x, rows, scratch, before):
    scratch.dv[:, part] = before


def _next_rows_dv_self(part, x, rows, scratch, before):
    scratch.dv[:, part] = before + jnp.roll(scratch.dv[:, part] - before, 1, axis=1)


def _next_diagonal(k_position, dropped_key):
    return k_position == dropped_key - 1


@functools.cache
def without_fault():
    """A large mean in V, so that delta from other numbers than dy's shows too."""
    x, narrow = regimes(10.0)
    want = expected(x, XSA)
    return narrow, want, relative(run(INTERPRETED, narrow, XSA), want)


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (backward_body, "_initialise_rows", _with(_literal_delta)),
        (backward_body, "_initialise_rows", _with(_no_dv_self)),
        (backward_body, "_initialise_rows", _with(_next_rows_dv_self)),
        (tile, "is_dropped", _next_diagonal),
    ],
)
def test_a_fault_exceeds_the_budget(module, name, fault, monkeypatch):
    narrow, want, honest = without_fault()
    monkeypatch.setattr(module, name, fault)
    # Around the cache, which holds the functions without the fault.
    faulty = relative(run(tpu.backend.__wrapped__(SMALL, SMALL, interpret=True), narrow, XSA), want)
    assert (faulty > 2 * honest).any(), (honest, faulty)


@pytest.mark.fast
def test_first_token_of_a_document_is_exactly_zero():
    x = arrays(T=200)
    starts = np.diff(x["segment_ids"], axis=1, prepend=-1) != 0
    x["v"] = np.abs(x["v"]) + 0.1
    x["dz"] = x["dz"] * starts[:, :, None, None]
    _, narrow = rounded(x, jnp.bfloat16)
    got = run(INTERPRETED, narrow, dataclasses.replace(XSA, mask=MaskSpec(segment_ids=jnp.asarray(x["segment_ids"]))))
    assert not np.asarray(got["z"], np.float32)[starts].any()
    assert not any(np.asarray(got[name], np.float32).any() for name in ("dq", "dk", "dv"))


def test_no_race_and_nothing_read_before_it_is_written(capfd):
    checked = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    x = arrays(B=1, T=260)
    variant = Variant(MaskSpec(segment_ids=jnp.asarray(x["segment_ids"])), "clamp", sinks=x["sinks"], alpha=x["alpha"])
    for case in (variant, dataclasses.replace(XSA, mask=MaskSpec(window=100))):
        assert_close(run(tpu.backend(SMALL, SMALL, checked), x, case), expected(x, case), 5e-6)
    # Before jax 0.12 a race is only printed.
    assert "race" not in capfd.readouterr().out.lower()


def test_a_mesh_changes_nothing():
    x = arrays(B=4, T=130, K=2)
    variant = Variant(MaskSpec(segment_ids=jnp.asarray(x["segment_ids"])), "clamp", sinks=x["sinks"])
    with jax.set_mesh(jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)):
        got = run(INTERPRETED, x, variant, Sharding(batch=("data", "fsdp"), heads="tensor"))
    assert_close(got, expected(x, variant), 5e-6)
    assert got["z"].sharding.shard_shape(got["z"].shape) == (1, 130, 1, 16)
