"""Every call that cannot be honoured raises ValueError and names the argument, while it is traced and with no array at hand."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import xsa_kernels
from xsa_kernels import Features, MaskSpec, Projection

PLAIN = {"dtype": "bfloat16", "head_dim": 64}
F32, BF16 = jnp.float32, jnp.bfloat16


def shape(*sizes, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype)


GOOD = {"q_BTHE": shape(2, 6, 4, 8), "k_BSKE": shape(2, 6, 2, 8), "v_BSKE": shape(2, 6, 2, 8)}
NARROW = {name: shape(*a.shape, dtype=BF16) for name, a in GOOD.items()}
IDS = shape(2, 6, dtype=jnp.int32)
LONG = {"k_BSKE": shape(2, 9, 2, 8), "v_BSKE": shape(2, 9, 2, 8)}
SHORT = {"k_BSKE": shape(2, 5, 2, 8), "v_BSKE": shape(2, 5, 2, 8)}

BAD = [
    ("mask", {}, {"mask": "causal"}),
    ("xsa", {}, {"xsa": True}),
    # argument named, arrays that differ from GOOD, other arguments
    ("q_BTHE", {"q_BTHE": shape(6, 4, 8)}, {}),
    ("q_BTHE", {"q_BTHE": shape(2, 6, 3, 8)}, {}),
    ("q_BTHE", {name: shape(2, 0, 2, 8) for name in GOOD}, {}),
    ("q_BTHE", {name: shape(2, 6, 2, 0) for name in GOOD}, {}),
    ("k_BSKE", {name: shape(2, 0, 2, 8) for name in ("k_BSKE", "v_BSKE")}, {}),
    ("k_BSKE", {name: shape(2, 6, 0, 8) for name in ("k_BSKE", "v_BSKE")}, {}),
    ("k_BSKE", {"k_BSKE": shape(2, 6, 8)}, {}),
    ("k_BSKE", {"k_BSKE": shape(3, 6, 2, 8)}, {}),
    ("k_BSKE", {"k_BSKE": shape(2, 6, 2, 4)}, {}),
    ("k_BSKE", {"k_BSKE": shape(2, 6, 2, 8, dtype=BF16)}, {}),
    ("v_BSKE", {"v_BSKE": shape(2, 6, 1, 8)}, {}),
    ("v_BSKE", {"v_BSKE": shape(2, 6, 2, 8, dtype=BF16)}, {}),
    ("dtype", {name: shape(*a.shape, dtype=jnp.int32) for name, a in GOOD.items()}, {}),
    ("v_self_BTKE", {"v_self_BTKE": shape(2, 6, 4, 8)}, {"xsa": Projection()}),
    ("v_self_BTKE", {"v_self_BTKE": shape(2, 6, 2, 8, dtype=BF16)}, {"xsa": Projection()}),
    ("v_self_BTKE", LONG, {}),
    ("v_self_BTKE", LONG, {"mask": MaskSpec(causal=False), "xsa": Projection()}),
    ("v_self_BTKE", LONG, {"mask": MaskSpec(causal=False, window=3)}),
    ("v_self_BTKE", {**SHORT, "v_self_BTKE": shape(2, 6, 2, 8)}, {"xsa": Projection()}),
    ("mask.window", {}, {"mask": MaskSpec(window=0)}),
    ("mask.window", {}, {"mask": MaskSpec(window=2.5)}),
    ("mask.segment_ids", {"segment_ids": shape(2, 5, dtype=jnp.int32)}, {}),
    ("mask.segment_ids", {"segment_ids": shape(6, dtype=jnp.int32)}, {}),
    ("mask.segment_ids", {"segment_ids": shape(2, 6)}, {}),
    ("mask.segment_ids", {**LONG, "v_self_BTKE": shape(2, 6, 2, 8), "segment_ids": IDS}, {}),
    ("sinks_H", {"sinks_H": shape(2)}, {}),
    ("sinks_H", {"sinks_H": shape(4, dtype=jnp.int32)}, {}),
    ("softcap", {}, {"softcap": 0.0}),
    ("softcap", {}, {"softcap": -1.0}),
    ("softcap", {}, {"softcap": float("inf")}),
    ("scale", {"scale": shape()}, {}),
    ("xsa.alpha", {"alpha": shape(2)}, {}),
    ("xsa.alpha", {}, {"xsa": Projection(alpha=None)}),
    ("xsa.zero_rule", {}, {"xsa": Projection(zero_rule="clip")}),
    ("xsa.eps", {}, {"xsa": Projection(eps=0.0)}),
    ("impl", {}, {"impl": "flash"}),
    ("impl", {}, {"impl": "cudnn"}),
    ("impl", {**NARROW, "segment_ids": IDS}, {"impl": "cudnn"}),
    ("impl", NARROW, {"impl": "cudnn", "softcap": 3.0}),
    ("impl", NARROW, {"impl": "cudnn", "mask": MaskSpec(causal=False, window=3)}),
    ("impl", {name: shape(2, 6, 2, 12, dtype=BF16) for name in GOOD}, {"impl": "cudnn"}),
    ("impl", {name: shape(2, 6, 2, 264, dtype=BF16) for name in GOOD}, {"impl": "cudnn"}),
]


def trace(arrays, options):
    def call(arrays):
        arrays, more = dict(arrays), dict(options)
        if "segment_ids" in arrays:
            more["mask"] = MaskSpec(segment_ids=arrays.pop("segment_ids"))
        if "alpha" in arrays:
            more["xsa"] = Projection(alpha=arrays.pop("alpha"))
        q, k, v = (arrays.pop(name) for name in GOOD)
        return xsa_kernels.attention(q, k, v, **arrays, **more)

    return jax.eval_shape(call, {**GOOD, **arrays})


@pytest.mark.fast
@pytest.mark.parametrize(("argument", "arrays", "options"), BAD)
def test_bad_call_names_its_argument(argument, arrays, options):
    with pytest.raises(ValueError, match=f"^{argument}: found .*, expected "):
        trace(arrays, options)


BAD_WEIGHTS = [
    ("q_BTHE", {"q_BTHE": shape(2, 6, 3, 8)}),
    ("q_BTHE", {"q_BTHE": shape(2, 7, 4, 8)}),
    ("q_BTHE", {"q_BTHE": None}),
    ("k_BSKE", {"k_BSKE": shape(2, 6, 2, 4)}),
    ("dtype", {name: shape(*GOOD[name].shape, dtype=jnp.int32) for name in ("q_BTHE", "k_BSKE")}),
    ("mask", {"mask": "causal"}),
    ("mask.window", {"mask": MaskSpec(window=0)}),
    ("mask.segment_ids", {"mask": MaskSpec(segment_ids=np.zeros((2, 5), np.int32))}),
    ("sinks_H", {"sinks_H": np.zeros(2, np.float32)}),
    ("softcap", {"softcap": 0.0}),
    ("scale", {"scale": "1"}),
]


@pytest.mark.fast
@pytest.mark.parametrize(("argument", "bad"), BAD_WEIGHTS)
def test_bad_call_of_weights_names_its_argument(argument, bad):
    call = {"q_BTHE": GOOD["q_BTHE"], "k_BSKE": GOOD["k_BSKE"], **bad}
    options = {name: call.pop(name) for name in ("mask", "softcap", "scale", "sinks_H") if name in call}
    with pytest.raises(ValueError, match=f"^{argument}: found .*, expected "):
        jax.eval_shape(lambda q, k: xsa_kernels.weights(q, k, **options), *call.values())


@pytest.mark.fast
@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("dtype", {"dtype": "float8"}),
        ("dtype", {"dtype": "int32"}),
        ("dtype", {"dtype": None}),
        ("device", {"device": 0}),
        ("head_dim", {"head_dim": True}),
        ("head_dim", {"head_dim": 0}),
        ("head_dim", {"head_dim": 64.0}),
        ("lengths", {"lengths": (128,)}),
        ("lengths", {"lengths": (128, 0)}),
        ("mask.window", {"window": 0}),
        ("softcap", {"softcap": -1.0}),
        ("features", {"features": {"dtype": "bfloat16"}}),
        ("impl", {"impl": "flash"}),
    ],
)
def test_bad_check_names_its_argument(argument, bad):
    call = {"impl": "auto", "device": None} | {name: bad[name] for name in ("impl", "device", "features") if name in bad}
    with pytest.raises(ValueError, match=f"^{argument}: found .*, expected "):
        xsa_kernels.check(**{"features": Features(**{**PLAIN, **{n: x for n, x in bad.items() if n not in call}}), **call})


@pytest.mark.fast
@pytest.mark.parametrize(
    ("impl", "device"), [("hopper", "cpu"), ("cudnn", "tpu"), ("splash", "gpu"), ("tpu", "gpu"), ("triton", "tpu")]
)
def test_an_implementation_for_other_devices_is_refused_where_the_device_is_known(impl, device):
    features = Features(**PLAIN)
    with pytest.raises(
        ValueError, match=f"^impl: found '{impl}', which cannot honour device={device}, expected one that can: .*'xla'"
    ):
        xsa_kernels.check(impl, features, device=device)
    assert xsa_kernels.check(impl, features) == impl
    assert xsa_kernels.check("xla", features, device="another") == "xla"


@pytest.mark.fast
@pytest.mark.parametrize(("device", "name"), [("tpu", "tpu"), ("gpu", "triton"), ("cpu", "xla"), ("another", "xla"), (None, "xla")])
def test_auto_goes_by_the_device_that_is_named(device, name):
    assert xsa_kernels.check("auto", Features(**PLAIN), device=device) == name


@pytest.mark.fast
def test_lengths_say_whether_queries_are_fewer_than_keys():
    with pytest.raises(ValueError, match=r"cannot honour mask\.causal with fewer queries than keys"):
        xsa_kernels.check("cudnn", Features(**PLAIN, lengths=[128, 256]))
    assert xsa_kernels.check("cudnn", Features(**PLAIN, lengths=(128, 128))) == "cudnn"


@pytest.mark.fast
def test_weights_take_what_attention_takes():
    q, k = (jnp.ones(a.shape) for a in (GOOD["q_BTHE"], GOOD["k_BSKE"]))
    same = xsa_kernels.weights(q, k, MaskSpec(window=2**40), softcap=np.float64(0.3), scale=np.float32(0.5))
    np.testing.assert_array_equal(same, xsa_kernels.weights(q, k, softcap=0.3, scale=0.5))
    assert xsa_kernels.weights(q, k[:, :5], MaskSpec(causal=False)).shape == (2, 2, 2, 6, 5)


@pytest.mark.fast
def test_what_is_no_array_is_named():
    q, k, v = (jnp.zeros(a.shape) for a in GOOD.values())
    with pytest.raises(ValueError, match=r"^q_BTHE: found list, expected an array"):
        xsa_kernels.attention(q.tolist(), k, v)
    with pytest.raises(ValueError, match=r"^k_BSKE: found NoneType, expected an array"):
        xsa_kernels.attention(q, None, v)
    with pytest.raises(ValueError, match=r"^sinks_H: found list, expected an array"):
        xsa_kernels.attention(q, k, v, sinks_H=[0.0] * 4)
    with pytest.raises(ValueError, match=r"^mask.segment_ids: found list, expected an array"):
        xsa_kernels.attention(q, k, v, mask=MaskSpec(segment_ids=[[0] * 6] * 2))


@pytest.mark.fast
def test_a_mesh_of_explicit_axes_is_refused():
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Explicit,))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"^the mesh: found axes of types .*Explicit.*, expected AxisType.Auto"),
    ):
        trace({}, {})


@pytest.mark.fast
def test_a_window_wider_than_the_keys_is_none():
    def program(mask):
        return str(jax.make_jaxpr(lambda q, k, v: xsa_kernels.attention(q, k, v, mask=mask))(*GOOD.values()))

    assert program(MaskSpec(window=2**40)) == program(MaskSpec(window=6)) == program(MaskSpec())
    assert program(MaskSpec(causal=False, window=2**31 - 1)) == program(MaskSpec(causal=False))
    assert program(MaskSpec(window=5)) != program(MaskSpec())


@pytest.mark.parametrize("impl", ["xla", "triton", "tpu"])
def test_a_second_derivative_is_refused(impl):
    q, k, v = (jnp.ones(a.shape) for a in GOOD.values())

    def slope(q, impl):
        return jnp.sum(jax.grad(lambda q: jnp.sum(xsa_kernels.attention(q, k, v, xsa=Projection(), impl=impl) ** 2))(q) ** 2)

    with pytest.raises(NotImplementedError, match=r"found a derivative of its gradient.*impl='reference'"):
        jax.grad(slope)(q, impl)
    assert jax.grad(slope)(q, "reference").shape == q.shape


def test_good_calls_pass():
    assert trace({}, {}).shape == (2, 6, 4, 8)
    assert trace(NARROW, {"xsa": Projection()}).dtype == BF16
    assert trace(LONG, {"mask": MaskSpec(causal=False)}).shape == (2, 6, 4, 8)
    assert trace({**LONG, "v_self_BTKE": shape(2, 6, 2, 8)}, {"xsa": Projection()}).shape == (2, 6, 4, 8)


def test_cudnn_without_cudnn_is_a_value_error():
    with pytest.raises(ValueError, match=r"^impl: found 'cudnn'.*cuDNN is not detected"):
        trace(NARROW, {"impl": "cudnn"})


def test_check_names_what_is_missing_without_arrays():
    with pytest.raises(ValueError, match=r"mask.segment_ids, softcap"):
        xsa_kernels.check("cudnn", Features(**PLAIN, segments=True, sinks=True, softcap=30.0))
    assert xsa_kernels.check("cudnn", Features(**PLAIN, window=128)) == "cudnn"


def test_auto_picks_what_honours_everything():
    assert xsa_kernels.check("auto", Features(**PLAIN)) == "xla"
    features = Features(dtype="float32", head_dim=80, segments=True, sinks=True, softcap=30.0, window=7)
    assert xsa_kernels.check("auto", features) == "xla"


@pytest.mark.skipif(importlib.util.find_spec("tokamax") is not None, reason="tokamax is installed")
def test_tokamax_that_is_not_installed():
    with pytest.raises(ValueError, match=r"^impl: found 'tokamax', which is not installed, expected .*pip install tokamax"):
        trace(NARROW, {"impl": "tokamax"})
