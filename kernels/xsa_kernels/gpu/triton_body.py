"""What one Triton program computes: FlashAttention-2 (arXiv 2307.08691) with XSA in its epilogue. The launcher is `triton`.

`xsa_kernels.backend` says what is computed. Every kernel sweeps the blocks of the other axis that its own block can see, in two
loops: first the blocks that need no mask, then the rest.

Shapes beside the package's: a tile of queries has `block_t` rows, suffix t, a tile of keys has `block_s`, suffix s, and E is padded
to a power of two.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from xsa_kernels.gpu import scores
from xsa_kernels.gpu.spans import BlockGrid, Spans, key_spans, query_spans
from xsa_kernels.spec import LOG2E, LOWEST


class Inputs(NamedTuple):
    """Arrays, their block specs, or a kernel's references to them; None for what a kernel or a call does not have."""

    q: Any
    k: Any
    v: Any
    v_self: Any = None
    sinks: Any = None
    alpha: Any = None
    dy: Any = None
    lse: Any = None
    delta: Any = None
    q_ids: Any = None
    k_ids: Any = None
    segment_spans: Any = None
    keeps_diagonal: Any = None
    dv_start: Any = None


def query_block() -> jax.Array:
    """The last query blocks see the most keys under a causal mask, and start first."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


def _sweep(grid: BlockGrid, spans: Spans, step: Callable[..., Any], carry: Any) -> Any:
    """carry = step(block number, masked, carry) over all blocks of the spans."""
    if not grid.segments:
        carry = lax.fori_loop(0, spans.number(masked=False), lambda n, c: step(spans.block(n, masked=False), False, c), carry)
    return lax.fori_loop(0, spans.number(masked=True), lambda n, c: step(spans.block(n, masked=True), True, c), carry)


def forward_kernel(grid: BlockGrid, x: Inputs, z_ref: Any, lse_ref: Any, c_ref: Any) -> None:
    """One query block of one head. `x.v_self` and `c_ref` are None without a projection."""
    i = query_block()
    rows = i * grid.block_t + jnp.arange(grid.block_t)
    q_tE = _load(x.q.at[:, :], grid, rows < grid.T)
    q_ids_t = None if x.q_ids is None else _load_integers(x.q_ids.at[:], rows < grid.T)
    keeps_diagonal_t = None
    if grid.settings.drop_diagonal:
        v_tE = _load(x.v_self.at[:, :], grid, rows < grid.T).astype(jnp.float32)
        keeps_diagonal_t = jnp.logical_not(grid.settings.exact(jnp.sum(v_tE * v_tE, axis=1)))

    def step(j: jax.Array, masked: bool, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        y_tE, m_t, l_t = carry
        at, columns, inside = _block(grid.S, grid.block_s, j, masked)
        k_sE = _load(x.k.at[at, :], grid, inside)
        s_ts, factor = scores.base2_scores(grid.settings, _dot(q_tE, k_sE, ((1,), (1,))))
        if masked:
            k_ids_s = None if x.k_ids is None else _load_integers(x.k_ids.at[at], inside)
            s_ts = jnp.where(_visible(grid, rows, columns, q_ids_t, k_ids_s, transposed=False), s_ts, -jnp.inf)
        m_new = jnp.maximum(m_t, jnp.max(s_ts, axis=1) * factor)
        p_ts = jnp.exp2(s_ts * factor - m_new[:, None])
        shrink = jnp.exp2(m_t - m_new)
        l_t = l_t * shrink + jnp.sum(p_ts, axis=1)
        if masked and keeps_diagonal_t is not None:
            p_ts = jnp.where(_dropped(grid, rows, columns, keeps_diagonal_t, transposed=False), 0.0, p_ts)
        v_sE = _load(x.v.at[at, :], grid, inside)
        return y_tE * shrink[:, None] + _dot(p_ts.astype(v_sE.dtype), v_sE, ((1,), (0,))), m_new, l_t

    m_t = jnp.full((grid.block_t,), LOWEST, jnp.float32)
    l_t = jnp.zeros((grid.block_t,), jnp.float32)
    if x.sinks is not None:
        sink = x.sinks[...].astype(jnp.float32) * LOG2E
        m_t = jnp.maximum(m_t, sink)
        l_t = jnp.exp2(sink - m_t)
    y_tE = jnp.zeros(q_tE.shape, jnp.float32)
    y_tE, m_t, l_t = _sweep(grid, key_spans(grid, i, x.segment_spans), step, (y_tE, m_t, l_t))
    _project_and_store(grid, rows, y_tE, m_t, l_t, x, z_ref, lse_ref, c_ref)


def _project_and_store(
    grid: BlockGrid,
    rows: jax.Array,
    y_tE: jax.Array,
    m_t: jax.Array,
    l_t: jax.Array,
    x: Inputs,
    z_ref: Any,
    lse_ref: Any,
    c_ref: Any,
) -> None:
    """Divides y by the sum of the weights, `l_t`, projects it along v_self, and writes z, the log-sum-exp and c."""
    # Only rows past T can see nothing at all; an infinite log-sum-exp keeps their weights 0 in the backward pass.
    some = l_t > 0
    l_t = jnp.where(some, l_t, 1.0)
    y_tE = y_tE / l_t[:, None]
    lse_t = jnp.where(some, (m_t + jnp.log2(l_t)) / LOG2E, jnp.inf)
    _store_row(lse_ref.at[:], lse_t, rows < grid.T, grid.T % grid.block_t)
    if x.v_self is not None:
        # Loaded again: held in registers since the start, v would cost the main loop more than this load.
        v_tE = _load(x.v_self.at[:, :], grid, rows < grid.T).astype(jnp.float32)
        c_t = grid.settings.inverse(jnp.sum(v_tE * v_tE, axis=1)) * jnp.sum(y_tE * v_tE, axis=1)
        _store_row(c_ref.at[:], c_t, rows < grid.T, grid.T % grid.block_t)
        y_tE = y_tE - (c_t if x.alpha is None else x.alpha[...] * c_t)[:, None] * v_tE
    _store_tile(z_ref.at[:, :], y_tE, grid, rows < grid.T, grid.T % grid.block_t)


def dq_kernel(grid: BlockGrid, x: Inputs, dq_ref: Any) -> None:
    """dq of one query block of one head."""
    i = query_block()
    rows = i * grid.block_t + jnp.arange(grid.block_t)
    q_tE = _load(x.q.at[:, :], grid, rows < grid.T)
    dy_tE = _load(x.dy.at[:, :], grid, rows < grid.T)
    lse_t = plgpu.load(x.lse.at[:], mask=rows < grid.T, other=jnp.inf) * LOG2E
    delta_t = plgpu.load(x.delta.at[:], mask=rows < grid.T, other=0.0)
    q_ids_t = None if x.q_ids is None else _load_integers(x.q_ids.at[:], rows < grid.T)
    keeps_diagonal_t = None if x.keeps_diagonal is None else _load_integers(x.keeps_diagonal.at[:], rows < grid.T) != 0

    def step(j: jax.Array, masked: bool, dq_tE: jax.Array) -> jax.Array:
        at, columns, inside = _block(grid.S, grid.block_s, j, masked)
        k_sE = _load(x.k.at[at, :], grid, inside)
        v_sE = _load(x.v.at[at, :], grid, inside)
        s_ts, factor = scores.base2_scores(grid.settings, _dot(q_tE, k_sE, ((1,), (1,))))
        p_ts = jnp.exp2(s_ts * factor - lse_t[:, None])
        dp_ts = _dot(dy_tE, v_sE, ((1,), (1,)))
        if masked:
            k_ids_s = None if x.k_ids is None else _load_integers(x.k_ids.at[at], inside)
            p_ts = jnp.where(_visible(grid, rows, columns, q_ids_t, k_ids_s, transposed=False), p_ts, 0.0)
            if keeps_diagonal_t is not None:
                dp_ts = jnp.where(_dropped(grid, rows, columns, keeps_diagonal_t, transposed=False), 0.0, dp_ts)
        ds_ts = _through_softcap(grid, p_ts * (dp_ts - delta_t[:, None]), s_ts)
        return dq_tE + _dot(ds_ts.astype(k_sE.dtype), k_sE, ((1,), (0,)))

    dq_tE = _sweep(grid, key_spans(grid, i, x.segment_spans), step, jnp.zeros(q_tE.shape, jnp.float32))
    _store_tile(dq_ref.at[:, :], dq_tE * grid.settings.scale, grid, rows < grid.T, grid.T % grid.block_t)


def dkv_kernel(grid: BlockGrid, x: Inputs, dk_ref: Any, dv_ref: Any) -> None:
    """dk and dv of one key block of one KV head: the sum over all its query heads, in a fixed order."""
    j = pl.program_id(0)
    columns = j * grid.block_s + jnp.arange(grid.block_s)
    k_sE = _load(x.k.at[:, :], grid, columns < grid.S)
    v_sE = _load(x.v.at[:, :], grid, columns < grid.S)
    k_ids_s = None if x.k_ids is None else _load_integers(x.k_ids.at[:], columns < grid.S)
    keeps_diagonal_s = None if x.keeps_diagonal is None else _load_integers(x.keeps_diagonal.at[:], columns < grid.S) != 0
    spans = query_spans(grid, j, x.segment_spans)

    def add_head(g: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def step(i: jax.Array, masked: bool, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            dk_sE, dv_sE = carry
            at, rows, inside = _block(grid.T, grid.block_t, i, masked)
            q_tE = _load(x.q.at[at, g, :], grid, inside)
            dy_tE = _load(x.dy.at[at, g, :], grid, inside)
            lse_t = _load_numbers(x.lse.at[g, at], inside, jnp.inf) * LOG2E
            delta_t = _load_numbers(x.delta.at[g, at], inside, 0.0)
            s_st, factor = scores.base2_scores(grid.settings, _dot(k_sE, q_tE, ((1,), (1,))))
            p_st = jnp.exp2(s_st * factor - lse_t[None, :])
            dv_p_st, dropped_st = p_st, None  # the weights in dv are without the dropped diagonal
            if masked:
                q_ids_t = None if x.q_ids is None else _load_integers(x.q_ids.at[at], inside)
                shown_st = _visible(grid, rows, columns, q_ids_t, k_ids_s, transposed=True)
                p_st = dv_p_st = jnp.where(shown_st, p_st, 0.0)
                if keeps_diagonal_s is not None:
                    dropped_st = _dropped(grid, rows, columns, keeps_diagonal_s, transposed=True)
                    dv_p_st = jnp.where(dropped_st, 0.0, p_st)
            # Before dp, else the capped scores stay in registers beside it and both accumulators, and registers spill.
            p_st = _through_softcap(grid, p_st, s_st)
            dp_st = _dot(v_sE, dy_tE, ((1,), (1,)))
            if dropped_st is not None:
                dp_st = jnp.where(dropped_st, 0.0, dp_st)
            dv_sE = dv_sE + _dot(dv_p_st.astype(dy_tE.dtype), dy_tE, ((1,), (0,)))
            ds_st = p_st * (dp_st - delta_t[None, :])
            return dk_sE + _dot(ds_st.astype(q_tE.dtype), q_tE, ((1,), (0,))), dv_sE

        return _sweep(grid, spans, step, carry)

    zeros = jnp.zeros(k_sE.shape, jnp.float32)
    dv_sE = zeros if x.dv_start is None else _load(x.dv_start.at[:, :], grid, columns < grid.S)
    dk_sE, dv_sE = lax.fori_loop(0, x.q.shape[1], add_head, (zeros, dv_sE))
    _store_tile(dk_ref.at[:, :], dk_sE * grid.settings.scale, grid, columns < grid.S, grid.S % grid.block_s)
    _store_tile(dv_ref.at[:, :], dv_sE, grid, columns < grid.S, grid.S % grid.block_s)


def _through_softcap(grid: BlockGrid, ds_xx: jax.Array, tanh_xx: jax.Array) -> jax.Array:
    """The cotangent of scores before the soft-cap from that of scores after it."""
    return ds_xx if grid.settings.softcap is None else ds_xx * (1.0 - tanh_xx * tanh_xx)


def _visible(
    grid: BlockGrid,
    rows_t: jax.Array,
    columns_s: jax.Array,
    q_ids_t: jax.Array | None,
    k_ids_s: jax.Array | None,
    transposed: bool,
) -> jax.Array:
    """Which keys (columns) query rows see: bool [block_t, block_s], or transposed."""
    query, key = _broadcastable(rows_t + grid.offset, columns_s, transposed)
    shown = scores.visible(grid, query, key) & (query < grid.S)
    if q_ids_t is not None and k_ids_s is not None:
        q_id, k_id = _broadcastable(q_ids_t, k_ids_s, transposed)
        shown &= k_id == q_id
    return shown


def _dropped(grid: BlockGrid, rows_t: jax.Array, columns_s: jax.Array, keeps_diagonal: jax.Array, transposed: bool) -> jax.Array:
    """The diagonal, except in rows that keep it: `keeps_diagonal` is of the tokens of the first axis."""
    query, key = _broadcastable(rows_t + grid.offset, columns_s, transposed)
    return (key == query) & jnp.logical_not(keeps_diagonal)[:, None]


def _broadcastable(of_query_t: jax.Array, of_key_s: jax.Array, transposed: bool) -> tuple[jax.Array, jax.Array]:
    """Numbers of queries and of keys, with an axis of length 1 each, for [block_t, block_s] or transposed."""
    if transposed:
        return of_query_t[None, :], of_key_s[:, None]
    return of_query_t[:, None], of_key_s[None, :]


def _block(length: int, block: int, j: jax.Array, masked: bool) -> tuple[Any, jax.Array, jax.Array | None]:
    """Slice, positions and (where some may lie past the end) validity of block j."""
    positions = j * block + jnp.arange(block)
    return pl.ds(j * block, block), positions, positions < length if masked and length % block else None


def _load(ref: Any, grid: BlockGrid, inside: jax.Array | None) -> jax.Array:
    """A tile [rows, E padded], zero outside the array."""
    columns = jnp.arange(ref.shape[-1])
    mask = None if ref.shape[-1] == grid.E else (columns < grid.E)[None, :]
    if inside is not None:
        mask = inside[:, None] if mask is None else mask & inside[:, None]
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)


def _load_numbers(ref: Any, inside: jax.Array | None, other: float) -> jax.Array:
    """One number per row, `other` outside the array."""
    return plgpu.load(ref, mask=inside, other=None if inside is None else other)


def _load_integers(ref: Any, inside: jax.Array | None) -> jax.Array:
    return plgpu.load(ref, mask=inside, other=None if inside is None else 0)


def _store_row(ref: Any, x_t: jax.Array, inside: jax.Array, ragged: int) -> None:
    plgpu.store(ref, x_t.astype(ref.dtype), mask=inside if ragged else None)


def _store_tile(ref: Any, x_tE: jax.Array, grid: BlockGrid, inside: jax.Array, ragged: int) -> None:
    mask = None if ref.shape[-1] == grid.E else (jnp.arange(ref.shape[-1]) < grid.E)[None, :]
    if ragged:
        mask = inside[:, None] if mask is None else mask & inside[:, None]
    plgpu.store(ref, x_tE.astype(ref.dtype), mask=mask)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
    # Without the precision Triton would multiply float32 in TF32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)
