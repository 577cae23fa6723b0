"""What is compiled: no trace of XSA without it, no T x S array, no hidden block, no second forward pass, no gathered heads."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels
from kernels import MaskSpec, Projection, attention, blockwise, fused
from tests.helpers import subprocess_env, tiny_config
from tests.kernels.cases import arrays
from xsa_jax.model.transformer import build


def shapes(B, T, H, K, E, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct((B, T, heads, E), dtype) for heads in (H, K, K)]


def gradient(**options):
    return jax.jit(jax.value_and_grad(lambda *qkv: attention(*qkv, **options).astype(jnp.float32).sum(), (0, 1, 2)))


def ops(text):
    return sorted(re.findall(r"= \"?(stablehlo\.\w+|call @\w+)", text))


@pytest.mark.fast
@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_plain_attention_holds_no_xsa(impl, monkeypatch):
    lower = lambda **options: gradient(impl=impl, **options).lower(*shapes(1, 8, 2, 1, 4)).as_text()  # noqa: E731
    plain, xsa = ops(lower()), ops(lower(xsa=Projection()))
    assert len(xsa) > len(plain) + 10
    for owner, name in ((kernels.reference, "project"), (fused, "_rows"), (fused.Call, "inverse")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("called without xsa"))
    assert ops(lower()) == plain


def test_long_context_never_holds_all_scores():
    """Forward and backward at T = 8192: one T x S array of float32 would be 256 MiB per head."""
    memory = gradient(impl="xla", xsa=Projection()).lower(*shapes(1, 8192, 2, 1, 64)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 64 * 2**20
    dense = gradient(impl="reference", xsa=Projection()).lower(*shapes(1, 2048, 2, 1, 64)).compile().memory_analysis()
    assert dense.temp_size_in_bytes > 2 * 2048 * 2048 * 4


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [(MaskSpec(False), 64), (MaskSpec(), 36), (MaskSpec(window=1), 8), (MaskSpec(window=8), 15), (MaskSpec(window=9), 15),
     (MaskSpec(window=10), 21), (MaskSpec(False, 2), 22)],
)  # fmt: skip
def test_hidden_blocks_are_not_visited(mask, pairs, monkeypatch):
    """8 x 8 blocks of 8 tokens; a scan over the visible pairs is as long as there are pairs."""
    monkeypatch.setattr(blockwise, "BLOCK", 8)
    jaxpr = str(jax.make_jaxpr(lambda *qkv: attention(*qkv, mask=mask))(*shapes(1, 61, 1, 1, 4)))
    assert re.findall(r"length=(\d+)", jaxpr) == [str(pairs)]


@pytest.mark.parametrize("xsa", [None, Projection()], ids=["sa", "xsa"])
def test_keeps_no_y(xsa):
    """Forward saves its inputs, z, the log-sum-exp and, for the projection, one number per row; nothing in float32 but these."""
    x = shapes(2, 24, 4, 2, 8, jnp.bfloat16)
    _, pull = jax.eval_shape(lambda *qkv: jax.vjp(lambda *qkv: attention(*qkv, xsa=xsa, impl="xla"), *qkv), *x)
    found = sorted((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pull))
    z, number = ("bfloat16", (2, 24, 4, 8)), ("float32", (2, 4, 24))
    assert found == sorted([(a.dtype.name, a.shape) for a in x] + [z] + [number] * (2 if xsa else 1))


def test_composed_keeps_y_but_no_copy_in_float32():
    x = shapes(1, 128, 4, 2, 64, jnp.bfloat16)
    _, pull = jax.eval_shape(lambda *qkv: jax.vjp(lambda *qkv: attention(*qkv, xsa=Projection(), impl="splash"), *qkv), *x)
    assert [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.dtype == jnp.float32] == [(1, 4, 128)]


@pytest.mark.parametrize("kind", ["sa", "xsa"])
def test_a_rematerialised_layer_runs_attention_forward_once(kind):
    """Under the model's policy "attention": the scans over blocks inside its scans over layers, forward and backward."""

    def scans(remat):
        model = build(tiny_config({"model.remat": remat, "attention.kind": kind, "attention.impl": "xla"}))
        tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        loss = jax.grad(lambda params, tokens: model.bind(params)(tokens)[0].sum())
        return str(jax.make_jaxpr(loss)(model.abstract_params, tokens)).count("= scan[")

    assert scans("full") - scans("attention") == 1
    assert scans("attention") == scans("none")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_eight_devices_equal_one(heads, monkeypatch):
    """Batch over data and fsdp, heads over tensor: the same numbers, and nothing is sent but the sums of head-wise gradients."""
    monkeypatch.setattr(blockwise, "BLOCK", 8)
    x = arrays(B=4, H=heads[0], K=heads[1], dtype=np.float32)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    spec = {"q": P(("data", "fsdp"), None, "tensor"), "segment_ids": P(("data", "fsdp")), "sinks": P("tensor")}
    spec |= {"k": spec["q"], "v": spec["q"], "alpha": spec["sinks"]}

    def loss(floats, ids):
        z = attention(
            floats["q"], floats["k"], floats["v"], mask=MaskSpec(window=9, segment_ids=ids), sinks_H=floats["sinks"],
            xsa=Projection(alpha=floats["alpha"]), impl="xla",
        )  # fmt: skip
        return jnp.sum(z**2)

    floats = {name: x[name] for name in ("q", "k", "v", "sinks", "alpha")}
    one = jax.jit(jax.value_and_grad(loss))(floats, x["segment_ids"])
    placed = {name: jax.device_put(a, NamedSharding(mesh, spec[name])) for name, a in floats.items()}
    call = jax.jit(jax.value_and_grad(loss)).lower(
        placed, jax.device_put(x["segment_ids"], NamedSharding(mesh, spec["segment_ids"]))
    )
    compiled = call.compile()
    many = compiled(placed, jax.device_put(x["segment_ids"], NamedSharding(mesh, spec["segment_ids"])))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), many, one)
    text = compiled.as_text()
    assert "all-reduce" in text
    assert not re.search(r"all-gather|all-to-all|collective-permute|reduce-scatter", text)
    assert many[1]["k"].sharding.is_equivalent_to(placed["k"].sharding, 4)


def test_heads_that_a_mesh_does_not_divide():
    """Kernels refuse them; what XLA compiles it also places."""
    x = arrays(B=4, H=3, K=3, dtype=np.float32)
    call = jax.jit(lambda q, k, v: attention(q, k, v, xsa=Projection(), impl="xla"))
    alone = call(x["q"], x["k"], x["v"])
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "tensor"), (AxisType.Auto,) * 2)):
        np.testing.assert_allclose(call(x["q"], x["k"], x["v"]), alone, atol=1e-6)


def test_cudnn_lowers_for_cuda(monkeypatch):
    """The program of both passes, for a device that is not here; the window reaches cuDNN with the token itself counted."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    call = gradient(impl="cudnn", xsa=Projection(), mask=MaskSpec(window=16))
    text = call.trace(*shapes(2, 64, 4, 2, 64, jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert re.findall(r"sliding_window_length\\22: (\d+)", text) == ["16", "16"]
    assert re.findall(r"mask_type\\22: \\22(\w+)", text) == ["CAUSAL", "CAUSAL"]


def test_package_needs_only_jax():
    """Usable beside any other project: importing it loads nothing of ours, and flax and its like stay out."""
    code = "import sys, kernels; print(*{m.split('.')[0] for m in sys.modules} & {'xsa_jax', 'configs', 'flax', 'optax'})"
    done = subprocess.run([sys.executable, "-c", code], env=subprocess_env(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_version_is_below_the_package_of_the_same_name():
    """What transformers does with `kernels`: the version must parse, and be too old (its releases ask for 0.9.0 and later)."""
    assert tuple(int(part) for part in kernels.__version__.split(".")) < (0, 9)
