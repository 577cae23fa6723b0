"""Attention with XSA and its gradients in dense float64 numpy, head by head, from the formulas: shares no code with `kernels`."""

import numpy as np


def mask(T, S, causal=True, window=None, segment_ids=None):
    """bool [T, S] of one row of the batch; query t is token S - T + t."""
    seen = np.zeros((T, S), bool)
    for t in range(T):
        i = S - T + t
        for j in range(S):
            past = j <= i or not causal
            near = window is None or (i - window < j and (causal or j < i + window))
            same = segment_ids is None or segment_ids[i] == segment_ids[j]
            seen[t, j] = past and near and same
    return seen


def run(
    q, k, v, dz=None, *, v_self=None, causal=True, window=None, segment_ids=None,
    xsa=False, alpha=1.0, zero_rule="clamp", eps=1e-12, sinks=None, softcap=None, scale=None,
):  # fmt: skip
    """Shapes as `xsa_kernels.attention`. Returns z, p [B, H, T, S] and, for the cotangent dz, dq dk dv dv_self dsinks dalpha.

    Without `v_self` the gradient of the own value is part of dv.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (B, T, H, E), (_, S, K, _) = q.shape, k.shape
    own = v if v_self is None else np.asarray(v_self, np.float64)
    dz = np.zeros_like(q) if dz is None else np.asarray(dz, np.float64)
    alpha = np.broadcast_to(np.asarray(alpha if xsa else 0.0, np.float64), (H,))
    scale = E**-0.5 if scale is None else scale
    out = {name: np.zeros_like(x) for name, x in {"z": q, "dq": q, "dk": k, "dv": v, "dv_self": own}.items()}
    out |= {"p": np.zeros((B, H, T, S)), "dsinks": np.zeros(H), "dalpha": np.zeros(H)}

    for b in range(B):
        seen = mask(T, S, causal, window, None if segment_ids is None else np.asarray(segment_ids)[b])
        for h in range(H):
            kv = h // (H // K)
            Q, key, V, own_v, dZ = q[b, :, h], k[b, :, kv], v[b, :, kv], own[b, :, kv], dz[b, :, h]

            raw = Q @ key.T * scale
            s = raw if softcap is None else softcap * np.tanh(raw / softcap)
            s = np.where(seen, s, -np.inf)
            sink = -np.inf if sinks is None else float(np.asarray(sinks)[h])
            top = np.maximum(s.max(1, keepdims=True), sink)
            total = np.exp(s - top).sum(1, keepdims=True) + np.exp(sink - top)
            p, p_sink = np.exp(s - top) / total, np.exp(sink - top) / total

            y = p @ V
            n2 = (own_v**2).sum(1, keepdims=True)
            if zero_rule == "clamp":
                live, n2 = n2 > eps, np.maximum(n2, eps)
            elif zero_rule == "add":
                live, n2 = np.ones_like(n2, bool), n2 + eps
            else:
                live = n2 >= np.finfo(np.float32).tiny
                n2 = np.where(live, n2, np.inf)
            w, r = (y * own_v).sum(1, keepdims=True), (dZ * own_v).sum(1, keepdims=True)
            c = alpha[h] * w / n2
            z = y - c * own_v

            dy = dZ - alpha[h] * r / n2 * own_v
            # c depends on v through w and, unless the rule has replaced it by a constant, through n2.
            d_own = -c * dZ - alpha[h] * r * (y / n2 - np.where(live, 2 * w / n2 / n2, 0) * own_v)
            delta = (y * dy).sum(1, keepdims=True)
            ds = p * (dy @ V.T - delta)
            if softcap is not None:
                ds = ds * (1 - np.tanh(raw / softcap) ** 2)

            out["z"][b, :, h], out["p"][b, h] = z, p
            out["dq"][b, :, h] += ds @ key * scale
            out["dk"][b, :, kv] += ds.T @ Q * scale
            out["dv"][b, :, kv] += p.T @ dy
            out["dv_self"][b, :, kv] += d_own
            out["dsinks"][h] -= (p_sink * delta).sum()
            out["dalpha"][h] -= (w * r / n2).sum() if xsa else 0

    if v_self is None:
        out["dv"] += out["dv_self"]
    return out
