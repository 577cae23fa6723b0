"""Inputs and the gradient call that the kernel tests share."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import xsa_kernels
from tests.kernels import oracle
from xsa_kernels import MaskSpec
from xsa_kernels.spec import CAUSAL
from xsa_kernels.xla import blockwise, short

XLA_FORMS = ("short", "long")


def xla_form(monkeypatch, form, block):
    """Makes impl="xla" use its form for short or for long sequences, whatever the length, in blocks of that many tokens."""
    monkeypatch.setattr(short, "LONGEST", {"short": 10**9, "long": 0}[form])
    for module in (short, blockwise):
        monkeypatch.setattr(module, "BLOCK", block)


def arrays(B=2, T=23, S=None, H=4, K=2, E=6, seed=0, dtype=np.float64):
    """q, k, v, dz, sinks, alpha and segment ids with documents of 1 to 9 tokens; every head and row differs."""
    rng = np.random.default_rng(seed)
    S = S or T
    shapes = {"q": (B, T, H, E), "k": (B, S, K, E), "v": (B, S, K, E), "dz": (B, T, H, E), "sinks": (H,), "alpha": (H,)}
    made = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    starts = rng.random((B, S)) < 0.3
    starts[:, 5:7] = True  # token 5 is a document of its own
    made["segment_ids"] = np.cumsum(starts, axis=1).astype(np.int32)
    return made


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a call asks for beside its arrays. Without a `rule` there is no projection."""

    mask: MaskSpec = CAUSAL
    rule: Literal["clamp", "add", "exact"] | None = None
    eps: float = 1e-12
    alpha: Any = 1.0
    sinks: Any = None
    softcap: float | None = None
    scale: float | None = None
    v_self: Any = None


def run(x, impl, variant, *, jit=True):
    """z and the gradients by autodiff, under the oracle's names."""
    given = {"q": x["q"], "k": x["k"], "v": x["v"], "sinks": variant.sinks, "v_self": variant.v_self}
    if np.ndim(variant.alpha) > 0:  # a plain number stays one: it selects another form
        given["alpha"] = variant.alpha
    given = {name: jnp.asarray(a) for name, a in given.items() if a is not None}

    def loss(given):
        z = xsa_kernels.attention(
            given["q"],
            given["k"],
            given["v"],
            mask=variant.mask,
            xsa=variant.rule and xsa_kernels.Projection(given.get("alpha", variant.alpha), variant.rule, variant.eps),
            sinks_H=given.get("sinks"),
            softcap=variant.softcap,
            scale=variant.scale,
            v_self_BTKE=given.get("v_self"),
            impl=impl,
        )
        return jnp.sum(z.astype(jnp.promote_types(z.dtype, jnp.float32)) * x["dz"]), z

    call = jax.value_and_grad(loss, has_aux=True)
    (_, z), grads = (jax.jit(call) if jit else call)(given)
    return {"z": z} | {f"d{name}": g for name, g in grads.items()}


def expected(x, variant):
    """The same by the oracle."""
    return oracle.run(
        x["q"],
        x["k"],
        x["v"],
        x["dz"],
        v_self=variant.v_self,
        causal=variant.mask.causal,
        window=variant.mask.window,
        segment_ids=variant.mask.segment_ids,
        xsa=variant.rule is not None,
        alpha=variant.alpha,
        zero_rule=variant.rule or "clamp",
        eps=variant.eps,
        sinks=variant.sinks,
        softcap=variant.softcap,
        scale=variant.scale,
    )


def errors(got, want):
    """Largest difference over largest entry (or over 1: values here are of that size, or 0) of z and every gradient taken."""
    return {
        name: float(np.abs(np.asarray(a, np.float64) - want[name]).max() / max(1.0, np.abs(want[name]).max()))
        for name, a in got.items()
    }


def assert_close(got, want, tolerance):
    found = errors(got, want)
    assert all(error <= tolerance for error in found.values()), found


def rounded(x, dtype):
    """Float inputs that `dtype` can hold, as float64 for the oracle, and the same with q, k and v in `dtype`."""
    exact = {name: np.asarray(jnp.asarray(a, dtype), np.float64) if a.dtype.kind == "f" else a for name, a in x.items()}
    return exact, {**exact, **{name: jnp.asarray(exact[name], dtype) for name in "qkv"}}


def regimes(common):
    """bfloat16 inputs with one batch row for each mean own weight in .02, .3, .7, .9, .997; values have a mean `common`."""
    x = arrays(B=5, T=256, H=2, K=2, E=64)
    x["k"] += np.array([0.0, 2.0, 3.2, 4.4, 8.0])[:, None, None, None] * x["q"] / 4
    x["v"] += common * np.random.default_rng(1).normal(size=64)
    return rounded(x, jnp.bfloat16)


def relative(got, want):
    """|error| / |value| of z, dq, dk and dv (first axis) in each batch row."""

    def norms(x):
        return np.linalg.norm(np.asarray(x, np.float64).reshape(len(x), -1), axis=1)

    return np.stack([norms(np.asarray(got[name], np.float64) - want[name]) / norms(want[name]) for name in ("z", "dq", "dk", "dv")])
