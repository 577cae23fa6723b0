"""What one Triton program computes: FlashAttention-2 (arXiv 2307.08691) with XSA in its epilogue. The launcher is `triton`.

Every kernel sweeps the blocks of the other axis that its own block can see, twice: first the blocks that need no mask, then the rest.
With `skip_own` a token's own value takes part in the softmax but not in the sum (the projection removes it anyway), so that z is never
a small difference of two large numbers.

Shapes beside the package's: a tile of queries has `block_t` rows, a tile of keys `block_s`, and E is padded to a power of two.
Scores are in base 2: exp2 is one instruction.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LOG2E = math.log2(math.e)
# A finite start for the running maximum: where a tile hides all its keys from a row, exp2(-inf - LOWEST) is 0 and not NaN.
LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class Call:
    """All that a kernel knows at compile time."""

    T: int
    S: int
    E: int
    block_t: int
    block_s: int
    causal: bool
    window: int | None
    segments: bool
    scale: float
    softcap: float | None
    xsa: bool
    skip_own: bool
    zero_rule: str
    eps: float

    @property
    def offset(self) -> int:
        """The position of the first query: the queries are the last T of the S tokens."""
        return self.S - self.T

    @property
    def back(self) -> int | None:
        """How far a query sees back; None is without end."""
        return None if self.window is None else self.window - 1

    @property
    def ahead(self) -> int | None:
        return 0 if self.causal else self.back


class Spans(NamedTuple):
    """Block numbers in order: [start, clean), [own, after_own) and [masked, stop) need the mask, the rest of [start, stop) does not."""

    start: jax.Array
    clean: jax.Array
    own: jax.Array
    after_own: jax.Array
    masked: jax.Array
    stop: jax.Array


def key_spans(call: Call, i: jax.Array, segments_ref) -> Spans:
    """The key blocks that query block i sees."""
    first = call.offset + i * call.block_t
    return _spans(call, first, first + call.block_t, call.back, call.ahead, 0, call.S, call.block_s, segments_ref)


def query_spans(call: Call, j: jax.Array, segments_ref) -> Spans:
    """The query blocks that see key block j."""
    first = j * call.block_s
    return _spans(call, first, first + call.block_s, call.ahead, call.back, call.offset, call.T, call.block_t, segments_ref)


def _spans(call, first, last, back, ahead, offset, length, block, segments_ref) -> Spans:
    """Tokens [first, last) see from `back` tokens behind each to `ahead` tokens past it, in an axis of `length` from position `offset`."""
    blocks = jnp.int32(-(-length // block))
    start, stop, clean, masked = jnp.int32(0), blocks, jnp.int32(0), jnp.int32(length // block)
    if back is not None:
        start = _div(jnp.maximum(first - back - offset, 0), block)
        clean = _div(jnp.maximum(last - 1 - back - offset, 0) + block - 1, block)
    if ahead is not None:
        stop = jnp.minimum(_div(jnp.maximum(last + ahead - offset, 0) + block - 1, block), blocks)
        masked = jnp.minimum(_div(jnp.maximum(first + ahead + 1 - offset, 0), block), masked)
    if segments_ref is not None:
        start, stop = jnp.maximum(start, segments_ref[0]), jnp.minimum(stop, segments_ref[1])
        start = jnp.minimum(start, stop)
        return Spans(start, start, start, stop, stop, stop)
    start = jnp.minimum(start, stop)
    clean = jnp.clip(clean, start, stop)
    masked = jnp.clip(masked, clean, stop)
    if not call.skip_own:
        return Spans(start, clean, masked, masked, masked, stop)
    own = jnp.clip(_div(jnp.maximum(first - offset, 0), block), clean, masked)
    after_own = jnp.clip(_div(jnp.maximum(last - offset, 0) + block - 1, block), own, masked)
    return Spans(start, clean, own, after_own, masked, stop)


def _sweep(call: Call, spans: Spans, step, carry):
    """carry = step(block number, masked?, carry) over all blocks of the spans."""
    s = spans

    def clean(n, carry):
        j = s.clean + n
        return step(jnp.where(j < s.own, j, j + (s.after_own - s.own)), False, carry)

    def masked(n, carry):
        j = s.start + n
        j = jnp.where(j < s.clean, j, j + (s.own - s.clean))
        return step(jnp.where(j < s.after_own, j, j + (s.masked - s.after_own)), True, carry)

    num_clean = (s.own - s.clean) + (s.masked - s.after_own)
    if not call.segments:
        carry = lax.fori_loop(0, num_clean, clean, carry)
    return lax.fori_loop(0, (s.stop - s.start) - num_clean, masked, carry)


def forward_kernel(
    call: Call, q_ref, k_ref, v_ref, own_ref, sink_ref, alpha_ref, q_ids_ref, k_ids_ref, segments_ref, z_ref, lse_ref, c_ref
):
    """One query block of one head. `c_ref` is written with XSA only."""
    # The last query blocks see the most keys under a causal mask, and start first.
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    rows = i * call.block_t + jnp.arange(call.block_t)
    q_tE = _load(q_ref.at[:, :], call, rows < call.T)
    q_ids_t = None if q_ids_ref is None else _load_ids(q_ids_ref.at[:], rows < call.T)

    def step(j, masked, carry):
        acc_tE, m_t, l_t = carry
        at, columns, inside = _block(call.S, call.block_s, j, masked)
        k_sE = _load(k_ref.at[at, :], call, inside)
        s_ts, unit = _scores(call, _dot(q_tE, k_sE, ((1,), (1,))))
        if masked:
            k_ids_s = None if k_ids_ref is None else _load_ids(k_ids_ref.at[at], inside)
            s_ts = jnp.where(_seen(call, rows, columns, q_ids_t, k_ids_s, transpose=False), s_ts, -jnp.inf)
        m_new = jnp.maximum(m_t, jnp.max(s_ts, axis=1) * unit)
        p_ts = jnp.exp2(s_ts * unit - m_new[:, None])
        shrink = jnp.exp2(m_t - m_new)
        l_t = l_t * shrink + jnp.sum(p_ts, axis=1)
        if masked and call.skip_own:
            p_ts = jnp.where(_own(call, rows, columns, transpose=False), 0.0, p_ts)
        v_sE = _load(v_ref.at[at, :], call, inside)
        return acc_tE * shrink[:, None] + _dot(p_ts.astype(v_sE.dtype), v_sE, ((1,), (0,))), m_new, l_t

    m_t = jnp.full((call.block_t,), LOWEST, jnp.float32)
    l_t = jnp.zeros((call.block_t,), jnp.float32)
    if sink_ref is not None:
        sink = sink_ref[...].astype(jnp.float32) * LOG2E
        m_t = jnp.maximum(m_t, sink)
        l_t = jnp.exp2(sink - m_t)
    acc_tE = jnp.zeros(q_tE.shape, jnp.float32)
    y_tE, m_t, l_t = _sweep(call, key_spans(call, i, segments_ref), step, (acc_tE, m_t, l_t))

    # Only rows past T can see nothing at all; an infinite log-sum-exp keeps their weights 0 in the backward pass.
    some = l_t > 0
    l_t = jnp.where(some, l_t, 1.0)
    y_tE = y_tE / l_t[:, None]
    if call.xsa:
        v_tE = _load(own_ref.at[:, :], call, rows < call.T).astype(jnp.float32)
        y_tE, c_t = _project(call, y_tE, v_tE, 1.0 if alpha_ref is None else alpha_ref[...])
        _store(c_ref.at[:], c_t, rows < call.T, call.T % call.block_t)
    _store(lse_ref.at[:], jnp.where(some, (m_t + jnp.log2(l_t)) / LOG2E, jnp.inf), rows < call.T, call.T % call.block_t)
    _store_tile(z_ref.at[:, :], y_tE, call, rows < call.T, call.T % call.block_t)


def _project(call: Call, y_tE, v_tE, alpha):
    """z = y - c v with c = alpha (y . v) / n2: the float32 arithmetic of `kernels.reference.project`."""
    # Measured by its largest entry, no |v|^2 leaves the range of float32.
    unit_t = jnp.max(jnp.abs(v_tE), axis=1)
    unit_t = jnp.where(unit_t > 0, unit_t, 1.0)
    u_tE = v_tE / unit_t[:, None]
    n2_t = jnp.sum(u_tE * u_tE, axis=1)
    if call.zero_rule == "clamp":
        n2_t = jnp.maximum(n2_t, call.eps / unit_t / unit_t)
    elif call.zero_rule == "add":
        n2_t = n2_t + call.eps / unit_t / unit_t
    else:
        n2_t = jnp.where(n2_t * unit_t * unit_t >= float(jnp.finfo(jnp.float32).tiny), n2_t, jnp.inf)
    c_t = alpha * jnp.sum(y_tE * u_tE, axis=1) / n2_t
    return y_tE - c_t[:, None] * u_tE, c_t / unit_t


def dq_kernel(call: Call, q_ref, k_ref, v_ref, dy_ref, lse_ref, delta_ref, q_ids_ref, k_ids_ref, segments_ref, dq_ref):
    """dq of one query block of one head."""
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    rows = i * call.block_t + jnp.arange(call.block_t)
    q_tE = _load(q_ref.at[:, :], call, rows < call.T)
    dy_tE = _load(dy_ref.at[:, :], call, rows < call.T)
    lse_t = plgpu.load(lse_ref.at[:], mask=rows < call.T, other=jnp.inf) * LOG2E
    delta_t = plgpu.load(delta_ref.at[:], mask=rows < call.T, other=0.0)
    q_ids_t = None if q_ids_ref is None else _load_ids(q_ids_ref.at[:], rows < call.T)

    def step(j, masked, dq_tE):
        at, columns, inside = _block(call.S, call.block_s, j, masked)
        k_sE = _load(k_ref.at[at, :], call, inside)
        v_sE = _load(v_ref.at[at, :], call, inside)
        s_ts, unit = _scores(call, _dot(q_tE, k_sE, ((1,), (1,))))
        p_ts = jnp.exp2(s_ts * unit - lse_t[:, None])
        dp_ts = _dot(dy_tE, v_sE, ((1,), (1,)))
        if masked:
            k_ids_s = None if k_ids_ref is None else _load_ids(k_ids_ref.at[at], inside)
            p_ts = jnp.where(_seen(call, rows, columns, q_ids_t, k_ids_s, transpose=False), p_ts, 0.0)
            if call.skip_own:
                dp_ts = jnp.where(_own(call, rows, columns, transpose=False), 0.0, dp_ts)
        ds_ts = _through_softcap(call, p_ts * (dp_ts - delta_t[:, None]), s_ts)
        return dq_tE + _dot(ds_ts.astype(k_sE.dtype), k_sE, ((1,), (0,)))

    dq_tE = _sweep(call, key_spans(call, i, segments_ref), step, jnp.zeros(q_tE.shape, jnp.float32))
    _store_tile(dq_ref.at[:, :], dq_tE * call.scale, call, rows < call.T, call.T % call.block_t)


def dkv_kernel(
    call: Call, q_ref, k_ref, v_ref, dy_ref, lse_ref, delta_ref, q_ids_ref, k_ids_ref, segments_ref, dv_self_ref, dk_ref, dv_ref
):
    """dk and dv of one key block of one KV head: the sum over all its query heads, in a fixed order. dv starts from dv_self, if given."""
    j = pl.program_id(0)
    columns = j * call.block_s + jnp.arange(call.block_s)
    k_sE = _load(k_ref.at[:, :], call, columns < call.S)
    v_sE = _load(v_ref.at[:, :], call, columns < call.S)
    k_ids_s = None if k_ids_ref is None else _load_ids(k_ids_ref.at[:], columns < call.S)
    spans = query_spans(call, j, segments_ref)

    def head(g, carry):
        def step(i, masked, carry):
            dk_sE, dv_sE = carry
            at, rows, inside = _block(call.T, call.block_t, i, masked)
            q_tE = _load(q_ref.at[at, g, :], call, inside)
            dy_tE = _load(dy_ref.at[at, g, :], call, inside)
            row = {} if inside is None else {"mask": inside, "other": 0.0}
            lse_t = plgpu.load(lse_ref.at[g, at], **(row and row | {"other": jnp.inf})) * LOG2E
            delta_t = plgpu.load(delta_ref.at[g, at], **row)
            s_st, unit = _scores(call, _dot(k_sE, q_tE, ((1,), (1,))))
            p_st = jnp.exp2(s_st * unit - lse_t[None, :])
            dp_st = _dot(v_sE, dy_tE, ((1,), (1,)))
            own_free_st = p_st
            if masked:
                q_ids_t = None if q_ids_ref is None else _load_ids(q_ids_ref.at[at], inside)
                p_st = own_free_st = jnp.where(_seen(call, rows, columns, q_ids_t, k_ids_s, transpose=True), p_st, 0.0)
                if call.skip_own:
                    own_st = _own(call, rows, columns, transpose=True)
                    dp_st = jnp.where(own_st, 0.0, dp_st)
                    own_free_st = jnp.where(own_st, 0.0, p_st)
            dv_sE = dv_sE + _dot(own_free_st.astype(dy_tE.dtype), dy_tE, ((1,), (0,)))
            ds_st = _through_softcap(call, p_st * (dp_st - delta_t[None, :]), s_st)
            return dk_sE + _dot(ds_st.astype(q_tE.dtype), q_tE, ((1,), (0,))), dv_sE

        return _sweep(call, spans, step, carry)

    zeros = jnp.zeros(k_sE.shape, jnp.float32)
    dv_sE = zeros if dv_self_ref is None else _load(dv_self_ref.at[:, :], call, columns < call.S).astype(jnp.float32)
    dk_sE, dv_sE = lax.fori_loop(0, q_ref.shape[1], head, (zeros, dv_sE))
    _store_tile(dk_ref.at[:, :], dk_sE * call.scale, call, columns < call.S, call.S % call.block_s)
    _store_tile(dv_ref.at[:, :], dv_sE, call, columns < call.S, call.S % call.block_s)


def _scores(call: Call, dot_xx):
    """(scores, the factor that makes them base 2). The factor is left to the exponential, where it costs nothing."""
    if call.softcap is not None:
        return jnp.tanh(dot_xx * (call.scale / call.softcap)), call.softcap * LOG2E
    # The maximum of the scores times the factor is the maximum only if the factor is positive.
    sign = 1.0 if call.scale >= 0 else -1.0
    return (dot_xx if sign > 0 else -dot_xx), abs(call.scale) * LOG2E


def _through_softcap(call: Call, ds_xx, tanh_xx):
    return ds_xx if call.softcap is None else ds_xx * (1.0 - tanh_xx * tanh_xx)


def _seen(call: Call, rows_t, columns_s, q_ids_t, k_ids_s, transpose: bool):
    """What query rows see of key columns: bool [block_t, block_s], or its transpose."""
    ahead = _pair(columns_s, rows_t + call.offset, transpose, lambda key, query: key - query)
    seen = _pair(columns_s, rows_t, transpose, lambda key, query: (key < call.S) & (query < call.T))
    if call.ahead is not None:
        seen &= ahead <= call.ahead
    if call.back is not None:
        seen &= ahead >= -call.back
    if call.segments:
        seen &= _pair(k_ids_s, q_ids_t, transpose, lambda key, query: key == query)
    return seen


def _own(call: Call, rows_t, columns_s, transpose: bool):
    return _pair(columns_s, rows_t + call.offset, transpose, lambda key, query: key == query)


def _pair(of_key_s, of_query_t, transpose: bool, f):
    if transpose:
        return f(of_key_s[:, None], of_query_t[None, :])
    return f(of_key_s[None, :], of_query_t[:, None])


def _block(length: int, block: int, j, masked: bool):
    """Slice, positions and (where some may lie past the end) validity of block j."""
    positions = j * block + jnp.arange(block)
    return pl.ds(j * block, block), positions, positions < length if masked and length % block else None


def _load(ref, call: Call, inside):
    """A tile [rows, E padded], zero outside the array."""
    columns = jnp.arange(ref.shape[-1])
    mask = None if ref.shape[-1] == call.E else (columns < call.E)[None, :]
    if inside is not None:
        mask = inside[:, None] if mask is None else mask & inside[:, None]
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)


def _load_ids(ref, inside):
    return plgpu.load(ref, mask=inside, other=None if inside is None else 0)


def _store(ref, x_t, inside, ragged):
    plgpu.store(ref, x_t.astype(ref.dtype), mask=inside if ragged else None)


def _store_tile(ref, x_tE, call: Call, inside, ragged):
    mask = None if ref.shape[-1] == call.E else (jnp.arange(ref.shape[-1]) < call.E)[None, :]
    if ragged:
        mask = inside[:, None] if mask is None else mask & inside[:, None]
    plgpu.store(ref, x_tE.astype(ref.dtype), mask=mask)


def _dot(a, b, contract):
    # Without the precision Triton would multiply float32 in TF32.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _div(x: jax.Array, n: int) -> jax.Array:
    return lax.div(x, jnp.int32(n))
