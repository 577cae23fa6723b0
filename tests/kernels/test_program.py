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
from kernels import MaskSpec, Projection, attention, compose
from tests.helpers import subprocess_env
from tests.kernels.cases import arrays


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
    for name in ("project", "_fully_projected"):
        owner = compose if hasattr(compose, name) else kernels.reference
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
    monkeypatch.setattr(compose, "BLOCK", 8)
    jaxpr = str(jax.make_jaxpr(lambda *qkv: attention(*qkv, mask=mask))(*shapes(1, 61, 1, 1, 4)))
    assert re.findall(r"length=(\d+)", jaxpr) == [str(pairs)]


def test_saved_names_spare_the_second_forward_pass():
    def layer(*qkv):
        return attention(*qkv, xsa=Projection()).sum()

    def scans(policy):
        rematted = jax.checkpoint(layer, policy=policy)
        return str(jax.make_jaxpr(jax.grad(rematted, (0, 1, 2)))(*shapes(1, 8, 2, 1, 4))).count("= scan[")

    policies = jax.checkpoint_policies
    assert scans(policies.nothing_saveable) == 3
    assert scans(policies.save_only_these_names("attention_out")) == 2


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_eight_devices_equal_one(heads, monkeypatch):
    """Batch over data and fsdp, heads over tensor: the same numbers, and nothing is sent but the sums of head-wise gradients."""
    monkeypatch.setattr(compose, "BLOCK", 8)
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
