"""What is compiled: no trace of XSA without it, no T x S array, no hidden block, no second forward pass, no gathered heads."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.helpers import model_of, subprocess_env, tiny_config
from tests.kernels.cases import XLA_FORMS, arrays, xla_form
from xsa_kernels import MaskSpec, Projection, Sharding, attention, reference, rows
from xsa_kernels.request import Settings


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
    for owner, name in ((reference, "project"), (rows, "_through_the_projection"), (Settings, "inverse")):
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
    xla_form(monkeypatch, "long", block=8)
    jaxpr = str(jax.make_jaxpr(lambda *qkv: attention(*qkv, mask=mask))(*shapes(1, 61, 1, 1, 4)))
    assert re.findall(r"length=(\d+)", jaxpr) == [str(pairs)]


@pytest.mark.parametrize("impl", ["xla", "cudnn", "splash", "tokamax", "tpu", "triton", "hopper"])
@pytest.mark.parametrize("xsa", [None, Projection()], ids=["sa", "xsa"])
def test_keeps_no_y(xsa, impl, monkeypatch):
    """Forward saves its inputs, z, the log-sum-exp and, for the projection, one number per row; nothing in float32 but these."""
    if impl == "tokamax":
        pytest.importorskip("tokamax", reason="install tokamax")
        monkeypatch.setattr(sys, "argv", ["python"])  # which it parses
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    x = shapes(2, 128, 4, 2, 64, jnp.bfloat16)
    _, pull = jax.eval_shape(lambda *qkv: jax.vjp(lambda *qkv: attention(*qkv, xsa=xsa, impl=impl), *qkv), *x)
    found = sorted((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pull))
    z, number = ("bfloat16", (2, 128, 4, 64)), ("float32", (2, 4, 128))
    assert found == sorted([(a.dtype.name, a.shape) for a in x] + [z] + [number] * (2 if xsa else 1))


@pytest.mark.parametrize("kind", ["sa", "xsa"])
def test_a_rematerialised_layer_runs_attention_forward_once(kind, monkeypatch):
    """Under the model's policy "attention": the scans over blocks inside its scans over layers, forward and backward."""
    xla_form(monkeypatch, "long", block=8)

    def scans(remat):
        model = model_of(tiny_config({"model.remat": remat, "attention.kind": kind, "attention.impl": "xla"}))
        tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        loss = jax.grad(lambda params, tokens: model.bind(params)(tokens)[0].sum())
        return str(jax.make_jaxpr(loss)(model.abstract_params, tokens)).count("= scan[")

    assert scans("full") - scans("attention") == 1
    assert scans("attention") == scans("none")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("form", XLA_FORMS)
def test_eight_devices_equal_one(form, heads, monkeypatch):
    """Batch over data and fsdp, heads over tensor: the same numbers, and nothing is sent but the sums of head-wise gradients."""
    xla_form(monkeypatch, form, block=8)
    x = arrays(B=4, H=heads[0], K=heads[1], dtype=np.float32)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    spec = {"q": P(("data", "fsdp"), None, "tensor"), "segment_ids": P(("data", "fsdp")), "sinks": P("tensor")}
    spec |= {"k": spec["q"], "v": spec["q"], "alpha": spec["sinks"]}

    def loss(floats, ids, sharding=None):
        z = attention(
            floats["q"], floats["k"], floats["v"], mask=MaskSpec(window=9, segment_ids=ids), sinks_H=floats["sinks"],
            xsa=Projection(alpha=floats["alpha"]), sharding=sharding, impl="xla",
        )  # fmt: skip
        return jnp.sum(z**2)

    floats = {name: x[name] for name in ("q", "k", "v", "sinks", "alpha")}
    one = jax.jit(jax.value_and_grad(loss))(floats, x["segment_ids"])
    placed = {name: jax.device_put(a, NamedSharding(mesh, spec[name])) for name, a in floats.items()}
    sharding = Sharding(batch=("data", "fsdp"), heads="tensor")
    call = jax.jit(jax.value_and_grad(functools.partial(loss, sharding=sharding))).lower(
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
    sharding = Sharding(batch="data", heads="tensor")
    call = jax.jit(lambda q, k, v: attention(q, k, v, xsa=Projection(), sharding=sharding, impl="xla"))
    alone = call(x["q"], x["k"], x["v"])
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "tensor"), (AxisType.Auto,) * 2)):
        np.testing.assert_allclose(call(x["q"], x["k"], x["v"]), alone, atol=1e-6)


def custom_calls(call, *x):
    """Those of the program of both passes for a CUDA device, which is not here, without the names of their operands."""
    gradient = jax.jit(jax.grad(lambda *qkv: call(*qkv).astype(jnp.float32).sum(), (0, 1, 2)))
    text = gradient.trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    return [re.sub(r"%\w+(#\d)?", "%", line.strip()) for line in text.splitlines() if "custom_call" in line]


@pytest.mark.parametrize(("causal", "window", "theirs"), [(True, None, None), (True, 16, (15, 0)), (False, None, None)])
def test_cudnn_is_called_as_jax_calls_it(causal, window, theirs, monkeypatch):
    """The same custom calls with the same operands and settings, forward and backward, with the projection and without."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    x = shapes(2, 64, 4, 2, 64, jnp.bfloat16)
    want = custom_calls(
        lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=causal, local_window_size=theirs, implementation="cudnn"), *x
    )
    assert ["fmhaSoftmax(" in want[0], "fmhaSoftmaxBackward(" in want[1]] == [True, True], want
    for xsa in (None, Projection()):
        assert custom_calls(lambda *qkv, xsa=xsa: attention(*qkv, impl="cudnn", mask=MaskSpec(causal, window), xsa=xsa), *x) == want


def test_package_needs_only_jax():
    """Usable beside any other project: importing it loads nothing of ours, and flax and its like stay out."""
    code = "import sys, xsa_kernels; print(*{m.split('.')[0] for m in sys.modules} & {'xsa_jax', 'configs', 'flax', 'optax'})"
    done = subprocess.run([sys.executable, "-c", code], env=subprocess_env(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
