"""Under a mesh the caller says what every axis is for: what is named is split and nothing is gathered, what is not is refused."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xsa_kernels
from tests.kernels.cases import arrays
from xsa_kernels import Features, MaskSpec, Projection, Sharding, attention, device

SENT = re.compile(r"all-gather|all-to-all|collective-permute|reduce-scatter")
IMPLS = pytest.mark.parametrize("impl", ["xla", "triton", "tpu"])


def make_mesh(*axes, kind=AxisType.Auto):
    names, sizes = zip(*axes, strict=True)
    return jax.make_mesh(sizes, names, (kind,) * len(names), devices=jax.devices()[: int(np.prod(sizes))])


def inputs(mesh=None, spec=None, **shape):
    """q, k, v in float32, placed on a mesh if there is one."""
    x = arrays(**{"B": 4, "T": 16, "E": 8, **shape}, dtype=np.float32)
    qkv = tuple(jnp.asarray(x[name]) for name in "qkv")
    return qkv if mesh is None else tuple(jax.device_put(a, NamedSharding(mesh, spec)) for a in qkv)


def gradient(**options):
    """z and the gradients of q, k and v."""

    def loss(*qkv):
        z = attention(*qkv, xsa=Projection(), **options)
        return jnp.sum(z**2), z

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


@IMPLS
@pytest.mark.parametrize(
    ("axes", "sharding", "spec"),
    [
        ((("dp", 4), ("tp", 2)), Sharding(batch="dp", heads="tp"), P("dp", None, "tp")),
        ((("x", 4),), Sharding(batch=("x",)), P("x")),
        ((("a", 2), ("x", 2), ("h", 2)), Sharding(batch=("a", "x"), heads="h"), P(("a", "x"), None, "h")),
    ],
    ids=["dp and tp", "x", "two for the batch"],
)
def test_named_axes_split_the_work_and_nothing_is_gathered(axes, sharding, spec, impl):
    mesh = make_mesh(*axes)
    alone = jax.jit(gradient(impl=impl))(*inputs())
    with jax.set_mesh(mesh):
        placed = inputs(mesh, spec)
        compiled = jax.jit(gradient(impl=impl, sharding=sharding)).lower(*placed).compile()
    together = compiled(*placed)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), together, alone)
    assert not SENT.search(compiled.as_text())
    (_, z), gradients = together
    for found, given in zip((z, *gradients), (placed[0], *placed), strict=True):
        assert found.sharding.is_equivalent_to(given.sharding, 4)


@pytest.mark.fast
@pytest.mark.parametrize("impl", ["auto", "reference", "xla", "splash", "tpu", "triton", "hopper", "cudnn"])
@pytest.mark.parametrize("sharding", [None, Sharding(), Sharding(batch="data", heads="tensor")], ids=["none", "empty", "others"])
@pytest.mark.parametrize("ambient", [True, False], ids=["set_mesh", "types"])
def test_an_axis_without_a_meaning_is_refused(ambient, sharding, impl):
    """Every device would do the whole batch. The names of the axes are the caller's: none has a meaning by itself."""
    mesh = make_mesh(("dp", 4))
    placed = None if ambient else NamedSharding(mesh, P("dp"))
    qkv = [jax.ShapeDtypeStruct((4, 128, 2, 64), jnp.bfloat16, sharding=placed)] * 3
    call = jax.jit(lambda *qkv: attention(*qkv, impl=impl, sharding=sharding))
    with (
        jax.set_mesh(mesh) if ambient else contextlib.nullcontext(),
        pytest.raises(
            ValueError, match=r"^sharding: found .* under a mesh with the axes 'dp' of size 4, expected every mesh axis "
        ),
    ):
        call.trace(*qkv)


@pytest.mark.fast
@IMPLS
@pytest.mark.parametrize("placed", ["segment_ids", "alpha"])
def test_any_array_may_bring_the_mesh(placed, impl):
    x = arrays(B=4, T=16, E=8, dtype=np.float32)
    x[placed] = jax.device_put(x[placed], NamedSharding(make_mesh(("dp", 4)), P()))

    @jax.jit
    def call(x):
        mask, xsa = MaskSpec(segment_ids=x["segment_ids"]), Projection(x["alpha"])
        return attention(x["q"], x["k"], x["v"], mask=mask, xsa=xsa, impl=impl)

    with pytest.raises(ValueError, match=r"^sharding: found None under a mesh with the axes 'dp' of size 4"):
        call.trace(x)


@pytest.mark.fast
@IMPLS
@pytest.mark.parametrize("batch", [6, 1])
def test_a_batch_that_does_not_divide_is_refused(batch, impl):
    with (
        jax.set_mesh(make_mesh(("dp", 4), ("tp", 2))),
        pytest.raises(ValueError, match=f"^q_BTHE: found {batch} batch rows, expected a multiple of 4, .*replicated"),
    ):
        attention(*inputs(B=batch), impl=impl, sharding=Sharding(batch="dp", heads="tp"))


@pytest.mark.fast
@IMPLS
def test_a_replicated_axis_repeats_the_work(impl):
    """A batch of one row, such as in generation, on a mesh that was made for training."""
    call = gradient(impl=impl, sharding=Sharding(heads="tp", replicated=("dp",)))
    alone = jax.jit(call)(*inputs(B=1))
    with jax.set_mesh(make_mesh(("dp", 4), ("tp", 2))):
        together = jax.jit(call)(*inputs(B=1))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), together, alone)


@pytest.mark.fast
@IMPLS
def test_axes_that_the_mesh_lacks_and_axes_of_one_device_are_ignored(impl):
    sharding = Sharding(batch=("data", "fsdp"), heads="tensor", replicated="pod")
    alone = attention(*inputs(), xsa=Projection(), impl=impl)
    np.testing.assert_array_equal(attention(*inputs(), xsa=Projection(), impl=impl, sharding=sharding), alone)
    with jax.set_mesh(make_mesh(("data", 2), ("stage", 1))):
        np.testing.assert_allclose(attention(*inputs(), xsa=Projection(), impl=impl, sharding=sharding), alone, atol=1e-6)


@IMPLS
def test_the_mesh_may_come_with_the_arrays(impl):
    """Without `jax.set_mesh`, compiled and op by op."""
    mesh, sharding = make_mesh(("dp", 4), ("tp", 2)), Sharding(batch="dp", heads="tp")
    alone, placed = gradient(impl=impl)(*inputs()), inputs(mesh, P("dp", None, "tp"))
    call = gradient(impl=impl, sharding=sharding)
    compiled = jax.jit(call).lower(*placed).compile()
    assert not SENT.search(compiled.as_text())
    for together in (compiled(*placed), call(*placed)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), together, alone)


@pytest.mark.fast
@IMPLS
def test_inside_a_shard_map_of_the_caller_there_is_nothing_left_to_split(impl):
    call = functools.partial(attention, xsa=Projection(), impl=impl)
    alone, mesh = call(*inputs()), make_mesh(("dp", 4))
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)
    np.testing.assert_allclose(jax.jit(mapped)(*inputs()), alone, atol=1e-6)


@pytest.mark.fast
@IMPLS
def test_explicit_axes_in_the_types_are_refused(impl):
    mesh = make_mesh(("dp", 4), kind=AxisType.Explicit)
    with pytest.raises(ValueError, match=r"^the mesh: found axes of types .*Explicit.*, expected AxisType.Auto"):
        jax.jit(lambda *qkv: attention(*qkv, impl=impl, sharding=Sharding(batch="dp")))(*inputs(mesh, P("dp")))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "fields"),
    [
        ("sharding.batch", {"batch": 4}),
        ("sharding.batch", {"batch": ("dp", None)}),
        ("sharding.heads", {"heads": ("tp",)}),
        ("sharding.replicated", {"replicated": None}),
        ("sharding", {"batch": ("dp", "tp"), "heads": "tp"}),
    ],
)
def test_a_bad_sharding_names_its_field(argument, fields):
    with pytest.raises(ValueError, match=f"^{argument}: found .*, expected "):
        Sharding(**fields)


@pytest.mark.fast
def test_what_is_no_sharding_is_refused():
    with pytest.raises(ValueError, match=r"^sharding: found data, expected None or a Sharding"):
        attention(*inputs(), sharding="data")
    assert hash(Sharding(batch=["dp"])) == hash(Sharding(batch="dp"))


CHIPS = {
    "tpu": (AbstractDevice("TPU v5 lite", 1, "tpu"), "tpu", "tpu", "tpu_custom_call"),
    "gpu": (AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu"), "triton", "cuda", "__gpu"),
}


@pytest.mark.parametrize("platform", CHIPS)
@pytest.mark.parametrize("segments", [False, True])
def test_a_program_for_a_chip_that_is_not_here(segments, platform):
    """The mesh says what a program is for: "auto" takes that chip's kernels and nothing is interpreted."""
    abstract_device, name, lowering, custom_call = CHIPS[platform]
    mesh = AbstractMesh((4, 2), ("dp", "tp"), (AxisType.Auto,) * 2, abstract_device=abstract_device)
    options = {"sharding": Sharding(batch="dp", heads="tp"), "xsa": Projection()}
    qkv, ids = [jax.ShapeDtypeStruct((4, 128, 2, 64), jnp.bfloat16)] * 3, jax.ShapeDtypeStruct((4, 128), jnp.int32)

    def loss(qkv, ids):
        return attention(*qkv, mask=MaskSpec(segment_ids=ids if segments else None), **options).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        assert device.platform() == platform
        assert xsa_kernels.check("auto", Features(dtype="bfloat16", head_dim=64)) == name
        text = jax.jit(jax.grad(loss)).trace(qkv, ids).lower(lowering_platforms=(lowering,)).as_text()
    assert len(re.findall(rf"custom_call @{custom_call}\b", text)) >= 2


@pytest.mark.fast
def test_a_mesh_without_a_device_says_nothing_of_the_platform():
    mesh = AbstractMesh((4,), ("dp",), (AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert device.platform() == device.platform(*inputs()) == "cpu"
    placed = NamedSharding(AbstractMesh((4,), ("dp",), (AxisType.Auto,), abstract_device=CHIPS["tpu"][0]), P("dp"))
    found = []
    jax.jit(lambda x: found.append(device.platform({"q": x}))).trace(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=placed))
    assert found == ["tpu"]


@pytest.mark.fast
@pytest.mark.parametrize("impl", ["reference", "xla", "triton"])
@pytest.mark.parametrize("name", ["q", "k", "v", "ids", "sinks", "alpha"])
def test_explicit_axes_in_the_type_of_any_one_array_are_refused(name, impl):
    """Also where the axis is named: else the call would fail deep inside, or run as nobody asked."""
    mesh = make_mesh(("x", 4), kind=AxisType.Explicit)
    x = arrays(B=4, T=16, E=8, dtype=np.float32)
    given = {key: jnp.asarray(x[key]) for key in ("q", "k", "v", "sinks", "alpha")} | {"ids": jnp.asarray(x["segment_ids"])}
    given[name] = jax.device_put(given[name], NamedSharding(mesh, P("x")))
    with pytest.raises(ValueError, match=r"^the mesh: found axes of types .*Explicit.*, expected AxisType.Auto"):
        attention(
            given["q"], given["k"], given["v"], mask=MaskSpec(segment_ids=given["ids"]), sinks_H=given["sinks"],
            xsa=Projection(given["alpha"]), sharding=Sharding(batch="x"), impl=impl,
        )  # fmt: skip
