"""What one Triton program computes: FlashAttention-2 (arXiv 2307.08691) with XSA in its epilogue. The launcher is `triton`.

`fused.Backend` says what is computed. Every kernel sweeps those blocks of the other axis that its own block can see, in two
loops: the blocks that need no mask, then the rest.

Shapes beside the package's: a tile of queries has `block_t` rows, a tile of keys `block_s`, and E is padded to a power of two.
Scores are in base 2: exp2 is one instruction.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from xsa_kernels.gpu.spans import Plan, Spans, key_spans, query_spans

LOG2E = math.log2(math.e)
# A finite start for the running maximum: where a tile hides all its keys from a row, exp2(-inf - LOWEST) is 0 and not NaN.
LOWEST = -1e30


def query_block() -> jax.Array:
    """The last query blocks see the most keys under a causal mask, and start first."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


def _sweep(plan: Plan, spans: Spans, step, carry):
    """carry = step(block number, masked?, carry) over all blocks of the spans."""
    if not plan.segments:
        carry = lax.fori_loop(0, spans.number(clean=True), lambda n, c: step(spans.block(n, clean=True), False, c), carry)
    return lax.fori_loop(0, spans.number(clean=False), lambda n, c: step(spans.block(n, clean=False), True, c), carry)


def forward_kernel(
    plan: Plan, q_ref, k_ref, v_ref, own_ref, sink_ref, alpha_ref, q_ids_ref, k_ids_ref, segments_ref, z_ref, lse_ref, c_ref
):
    """One query block of one head. `own_ref` and `c_ref` are None without a projection."""
    i = query_block()
    rows = i * plan.block_t + jnp.arange(plan.block_t)
    q_tE = _load(q_ref.at[:, :], plan, rows < plan.T)
    q_ids_t = None if q_ids_ref is None else _load_ids(q_ids_ref.at[:], rows < plan.T)
    kept_t = None
    if plan.call.drop_diagonal:
        v_tE = _load(own_ref.at[:, :], plan, rows < plan.T).astype(jnp.float32)
        kept_t = jnp.logical_not(plan.call.exact(jnp.sum(v_tE * v_tE, axis=1)))

    def step(j, masked, carry):
        acc_tE, m_t, l_t = carry
        at, columns, inside = _block(plan.S, plan.block_s, j, masked)
        k_sE = _load(k_ref.at[at, :], plan, inside)
        s_ts, unit = _scores(plan, _dot(q_tE, k_sE, ((1,), (1,))))
        if masked:
            k_ids_s = None if k_ids_ref is None else _load_ids(k_ids_ref.at[at], inside)
            s_ts = jnp.where(_seen(plan, rows, columns, q_ids_t, k_ids_s, transpose=False), s_ts, -jnp.inf)
        m_new = jnp.maximum(m_t, jnp.max(s_ts, axis=1) * unit)
        p_ts = jnp.exp2(s_ts * unit - m_new[:, None])
        shrink = jnp.exp2(m_t - m_new)
        l_t = l_t * shrink + jnp.sum(p_ts, axis=1)
        if masked and plan.call.drop_diagonal:
            p_ts = jnp.where(_dropped(plan, rows, columns, kept_t, transpose=False), 0.0, p_ts)
        v_sE = _load(v_ref.at[at, :], plan, inside)
        return acc_tE * shrink[:, None] + _dot(p_ts.astype(v_sE.dtype), v_sE, ((1,), (0,))), m_new, l_t

    m_t = jnp.full((plan.block_t,), LOWEST, jnp.float32)
    l_t = jnp.zeros((plan.block_t,), jnp.float32)
    if sink_ref is not None:
        sink = sink_ref[...].astype(jnp.float32) * LOG2E
        m_t = jnp.maximum(m_t, sink)
        l_t = jnp.exp2(sink - m_t)
    acc_tE = jnp.zeros(q_tE.shape, jnp.float32)
    y_tE, m_t, l_t = _sweep(plan, key_spans(plan, i, segments_ref), step, (acc_tE, m_t, l_t))

    # Only rows past T can see nothing at all; an infinite log-sum-exp keeps their weights 0 in the backward pass.
    some = l_t > 0
    l_t = jnp.where(some, l_t, 1.0)
    y_tE = y_tE / l_t[:, None]
    lse_t = jnp.where(some, (m_t + jnp.log2(l_t)) / LOG2E, jnp.inf)
    _store_row(lse_ref.at[:], lse_t, rows < plan.T, plan.T % plan.block_t)
    if own_ref is not None:
        # Loaded again: held in registers since the start, v would cost the main loop more than this load.
        v_tE = _load(own_ref.at[:, :], plan, rows < plan.T).astype(jnp.float32)
        c_t = plan.call.inverse(jnp.sum(v_tE * v_tE, axis=1)) * jnp.sum(y_tE * v_tE, axis=1)
        _store_row(c_ref.at[:], c_t, rows < plan.T, plan.T % plan.block_t)
        y_tE = y_tE - (c_t if alpha_ref is None else alpha_ref[...] * c_t)[:, None] * v_tE
    _store_tile(z_ref.at[:, :], y_tE, plan, rows < plan.T, plan.T % plan.block_t)


def dq_kernel(plan: Plan, q_ref, k_ref, v_ref, dy_ref, lse_ref, delta_ref, q_ids_ref, k_ids_ref, segments_ref, kept_ref, dq_ref):
    """dq of one query block of one head."""
    i = query_block()
    rows = i * plan.block_t + jnp.arange(plan.block_t)
    q_tE = _load(q_ref.at[:, :], plan, rows < plan.T)
    dy_tE = _load(dy_ref.at[:, :], plan, rows < plan.T)
    lse_t = plgpu.load(lse_ref.at[:], mask=rows < plan.T, other=jnp.inf) * LOG2E
    delta_t = plgpu.load(delta_ref.at[:], mask=rows < plan.T, other=0.0)
    q_ids_t = None if q_ids_ref is None else _load_ids(q_ids_ref.at[:], rows < plan.T)
    kept_t = None if kept_ref is None else _load_ids(kept_ref.at[:], rows < plan.T) != 0

    def step(j, masked, dq_tE):
        at, columns, inside = _block(plan.S, plan.block_s, j, masked)
        k_sE = _load(k_ref.at[at, :], plan, inside)
        v_sE = _load(v_ref.at[at, :], plan, inside)
        s_ts, unit = _scores(plan, _dot(q_tE, k_sE, ((1,), (1,))))
        p_ts = jnp.exp2(s_ts * unit - lse_t[:, None])
        dp_ts = _dot(dy_tE, v_sE, ((1,), (1,)))
        if masked:
            k_ids_s = None if k_ids_ref is None else _load_ids(k_ids_ref.at[at], inside)
            p_ts = jnp.where(_seen(plan, rows, columns, q_ids_t, k_ids_s, transpose=False), p_ts, 0.0)
            if plan.call.drop_diagonal:
                dp_ts = jnp.where(_dropped(plan, rows, columns, kept_t, transpose=False), 0.0, dp_ts)
        ds_ts = _through_softcap(plan, p_ts * (dp_ts - delta_t[:, None]), s_ts)
        return dq_tE + _dot(ds_ts.astype(k_sE.dtype), k_sE, ((1,), (0,)))

    dq_tE = _sweep(plan, key_spans(plan, i, segments_ref), step, jnp.zeros(q_tE.shape, jnp.float32))
    _store_tile(dq_ref.at[:, :], dq_tE * plan.call.scale, plan, rows < plan.T, plan.T % plan.block_t)


def dkv_kernel(
    plan: Plan,
    q_ref,
    k_ref,
    v_ref,
    dy_ref,
    lse_ref,
    delta_ref,
    q_ids_ref,
    k_ids_ref,
    segments_ref,
    kept_ref,
    start_ref,
    dk_ref,
    dv_ref,
):
    """dk and dv of one key block of one KV head: the sum over all its query heads, in a fixed order. dv starts from `start_ref`."""
    j = pl.program_id(0)
    columns = j * plan.block_s + jnp.arange(plan.block_s)
    k_sE = _load(k_ref.at[:, :], plan, columns < plan.S)
    v_sE = _load(v_ref.at[:, :], plan, columns < plan.S)
    k_ids_s = None if k_ids_ref is None else _load_ids(k_ids_ref.at[:], columns < plan.S)
    kept_s = None if kept_ref is None else _load_ids(kept_ref.at[:], columns < plan.S) != 0
    spans = query_spans(plan, j, segments_ref)

    def head(g, carry):
        def step(i, masked, carry):
            dk_sE, dv_sE = carry
            at, rows, inside = _block(plan.T, plan.block_t, i, masked)
            q_tE = _load(q_ref.at[at, g, :], plan, inside)
            dy_tE = _load(dy_ref.at[at, g, :], plan, inside)
            row = {} if inside is None else {"mask": inside, "other": 0.0}
            lse_t = plgpu.load(lse_ref.at[g, at], **(row and row | {"other": jnp.inf})) * LOG2E
            delta_t = plgpu.load(delta_ref.at[g, at], **row)
            s_st, unit = _scores(plan, _dot(k_sE, q_tE, ((1,), (1,))))
            p_st = jnp.exp2(s_st * unit - lse_t[None, :])
            summed_st, dropped_st = p_st, None
            if masked:
                q_ids_t = None if q_ids_ref is None else _load_ids(q_ids_ref.at[at], inside)
                p_st = summed_st = jnp.where(_seen(plan, rows, columns, q_ids_t, k_ids_s, transpose=True), p_st, 0.0)
                if plan.call.drop_diagonal:
                    dropped_st = _dropped(plan, rows, columns, kept_s, transpose=True)
                    summed_st = jnp.where(dropped_st, 0.0, p_st)
            # Before dp, else the capped scores stay in registers beside it and both accumulators, and registers spill.
            p_st = _through_softcap(plan, p_st, s_st)
            dp_st = _dot(v_sE, dy_tE, ((1,), (1,)))
            if dropped_st is not None:
                dp_st = jnp.where(dropped_st, 0.0, dp_st)
            dv_sE = dv_sE + _dot(summed_st.astype(dy_tE.dtype), dy_tE, ((1,), (0,)))
            ds_st = p_st * (dp_st - delta_t[None, :])
            return dk_sE + _dot(ds_st.astype(q_tE.dtype), q_tE, ((1,), (0,))), dv_sE

        return _sweep(plan, spans, step, carry)

    zeros = jnp.zeros(k_sE.shape, jnp.float32)
    dv_sE = zeros if start_ref is None else _load(start_ref.at[:, :], plan, columns < plan.S)
    dk_sE, dv_sE = lax.fori_loop(0, q_ref.shape[1], head, (zeros, dv_sE))
    _store_tile(dk_ref.at[:, :], dk_sE * plan.call.scale, plan, columns < plan.S, plan.S % plan.block_s)
    _store_tile(dv_ref.at[:, :], dv_sE, plan, columns < plan.S, plan.S % plan.block_s)


def _scores(plan: Plan, dot_xx):
    """(scores, the factor that makes them base 2). The factor is left to the exponential, where it costs nothing."""
    if plan.call.softcap is not None:
        return jnp.tanh(dot_xx * (plan.call.scale / plan.call.softcap)), plan.call.softcap * LOG2E
    # The maximum of the scores times the factor is the maximum only if the factor is positive.
    sign = 1.0 if plan.call.scale >= 0 else -1.0
    return (dot_xx if sign > 0 else -dot_xx), abs(plan.call.scale) * LOG2E


def _through_softcap(plan: Plan, ds_xx, tanh_xx):
    return ds_xx if plan.call.softcap is None else ds_xx * (1.0 - tanh_xx * tanh_xx)


def _seen(plan: Plan, rows_t, columns_s, q_ids_t, k_ids_s, transpose: bool):
    """What query rows see of key columns: bool [block_t, block_s], or its transpose."""
    ahead = _pair(columns_s, rows_t + plan.offset, transpose, lambda key, query: key - query)
    seen = _pair(columns_s, rows_t, transpose, lambda key, query: (key < plan.S) & (query < plan.T))
    if plan.ahead is not None:
        seen &= ahead <= plan.ahead
    if plan.back is not None:
        seen &= ahead >= -plan.back
    if plan.segments:
        seen &= _pair(k_ids_s, q_ids_t, transpose, lambda key, query: key == query)
    return seen


def _dropped(plan: Plan, rows_t, columns_s, kept_x, transpose: bool):
    """The diagonal, except where it is kept: `kept_x` is of the tokens of the first axis."""
    own = _pair(columns_s, rows_t + plan.offset, transpose, lambda key, query: key == query)
    return own & jnp.logical_not(kept_x)[:, None]


def _pair(of_key_s, of_query_t, transpose: bool, f):
    if transpose:
        return f(of_key_s[:, None], of_query_t[None, :])
    return f(of_key_s[None, :], of_query_t[:, None])


def _block(length: int, block: int, j, masked: bool):
    """Slice, positions and (where some may lie past the end) validity of block j."""
    positions = j * block + jnp.arange(block)
    return pl.ds(j * block, block), positions, positions < length if masked and length % block else None


def _load(ref, plan: Plan, inside):
    """A tile [rows, E padded], zero outside the array."""
    columns = jnp.arange(ref.shape[-1])
    mask = None if ref.shape[-1] == plan.E else (columns < plan.E)[None, :]
    if inside is not None:
        mask = inside[:, None] if mask is None else mask & inside[:, None]
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)


def _load_ids(ref, inside):
    return plgpu.load(ref, mask=inside, other=None if inside is None else 0)


def _store_row(ref, x_t, inside, ragged):
    plgpu.store(ref, x_t.astype(ref.dtype), mask=inside if ragged else None)


def _store_tile(ref, x_tE, plan: Plan, inside, ragged):
    mask = None if ref.shape[-1] == plan.E else (jnp.arange(ref.shape[-1]) < plan.E)[None, :]
    if ragged:
        mask = inside[:, None] if mask is None else mask & inside[:, None]
    plgpu.store(ref, x_tE.astype(ref.dtype), mask=mask)


def _dot(a, b, contract):
    # Without the precision Triton would multiply float32 in TF32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)
