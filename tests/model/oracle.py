"""The decoder again, in float64 numpy, looping over layers, heads and tokens: written from the formulas, not from our code."""

import math
from typing import NamedTuple

import numpy as np

from xsa_jax.config import AttentionConfig, Config


class Output(NamedTuple):
    logits_BTV: np.ndarray
    v_LBTKE: np.ndarray  # the values that attention averaged
    z_LBTHE: np.ndarray


def forward(config: Config, projecting: set[int], params: dict, tokens_BT, segments_BT=None) -> Output:
    """Args: `projecting` holds the indices of the layers that have XSA, so that the oracle does not share our parser."""
    model, attention = config.model, config.attention
    weights = _float64(params)
    segments_BT = np.zeros_like(tokens_BT) if segments_BT is None else np.asarray(segments_BT)
    x_BTD = weights["embed"][np.asarray(tokens_BT)]
    if model.embed_norm:
        x_BTD = _norm(model.norm, x_BTD, weights["embed_norm"])
    v_first, values, outputs = None, [], []
    for layer in range(model.num_layers):
        block = _layer(weights["blocks"], layer)
        h_BTD = _norm(model.norm, x_BTD, block["attention_norm"])
        out_BTD, v_BTKE, z_BTHE = _attention(attention, block["attention"], h_BTD, segments_BT, layer in projecting, v_first)
        v_first = v_BTKE if v_first is None else v_first
        x_BTD = x_BTD + out_BTD
        x_BTD = x_BTD + _mlp(model.mlp, block["mlp"], _norm(model.norm, x_BTD, block["mlp_norm"]))
        values.append(v_BTKE)
        outputs.append(z_BTHE)
    unembed_DV = weights["embed"].T if model.tie_embeddings else weights["unembed"]
    logits_BTV = _norm(model.norm, x_BTD, weights["final_norm"]) @ unembed_DV
    if model.logit_softcap:
        logits_BTV = model.logit_softcap * np.tanh(logits_BTV / model.logit_softcap)
    return Output(logits_BTV, np.stack(values), np.stack(outputs))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def _attention(config: AttentionConfig, weights, x_BTD, segments_BT, projects: bool, v_first):
    q_BTHE, k_BTKE, v_BTKE = (np.einsum("btd,dhe->bthe", x_BTD, weights[name]) for name in "qkv")
    if config.qk_norm:
        q_BTHE, k_BTKE = _norm("rmsnorm", q_BTHE, weights["q_norm"]), _norm("rmsnorm", k_BTKE, weights["k_norm"])
    if config.value_residual and v_first is not None:
        v_BTKE = (1 - weights["value_mix"]) * v_BTKE + weights["value_mix"] * v_first
    position_BT = np.array([[t - row.tolist().index(row[t]) for t in range(len(row))] for row in segments_BT])
    q_BTHE, k_BTKE = _rope(config, q_BTHE, position_BT), _rope(config, k_BTKE, position_BT)
    B, T, H, E = q_BTHE.shape
    z_BTHE = np.zeros((B, T, H, E))
    for b in range(B):
        for h in range(H):
            kv = h // (H // config.num_kv_heads)
            k_TE, v_TE = k_BTKE[b, :, kv], v_BTKE[b, :, kv]
            for t in range(T):
                oldest = max(0, t - config.window + 1) if config.window else 0
                seen = [s for s in range(oldest, t + 1) if segments_BT[b, s] == segments_BT[b, t]]
                score = k_TE[seen] @ q_BTHE[b, t, h] / math.sqrt(E)
                if config.logit_softcap:
                    score = config.logit_softcap * np.tanh(score / config.logit_softcap)
                mass = np.exp(score)
                total = mass.sum() + (np.exp(weights["sinks"][h]) if config.sinks else 0.0)
                y_E, own_E = (mass / total) @ v_TE[seen], v_TE[t]
                if projects:
                    y_E = y_E - _alpha(config, weights, h) * (y_E @ own_E) / _norm2(config, own_E) * own_E
                z_BTHE[b, t, h] = y_E
    return np.einsum("bthe,hed->btd", z_BTHE, weights["out"]), v_BTKE, z_BTHE


def _alpha(config: AttentionConfig, weights, head: int) -> float:
    return {"full": 1.0, "fixed": config.xsa.alpha, "learned": np.tanh(weights.get("gate", np.zeros(head + 1))[head])}[
        config.xsa.strength
    ]


def _norm2(config: AttentionConfig, v_E) -> float:
    n2, eps = float(v_E @ v_E), config.xsa.eps
    if config.xsa.zero_rule == "exact":
        return n2 or math.inf
    return max(n2, eps) if config.xsa.zero_rule == "clamp" else n2 + eps


def _rope(config: AttentionConfig, x_BTHE, position_BT):
    half = config.head_dim // 2
    angle = position_BT[:, :, None, None] * config.rope_theta ** (-np.arange(half) / half)
    turned = (x_BTHE[..., :half] + 1j * x_BTHE[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def _norm(kind: str, x, weights):
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights["scale"]


def _mlp(kind: str, weights, x_BTD):
    up_BTF = x_BTD @ weights["up"]
    if kind == "swiglu":
        gate_BTF = x_BTD @ weights["gate"]
        return (gate_BTF / (1 + np.exp(-gate_BTF)) * up_BTF) @ weights["down"]
    gelu = 0.5 * up_BTF * (1 + np.tanh(math.sqrt(2 / math.pi) * (up_BTF + 0.044715 * up_BTF**3)))
    return gelu @ weights["down"]


def _layer(tree, layer: int):
    return {name: _layer(value, layer) if isinstance(value, dict) else value[layer] for name, value in tree.items()}


def _float64(tree):
    return {name: _float64(value) if isinstance(value, dict) else np.asarray(value, np.float64) for name, value in tree.items()}
