"""The registry is true: what it says is honoured gives the oracle's values, what it says is not raises and is named."""

import dataclasses
import functools
import inspect
import itertools
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xsa_kernels
from tests.helpers import subprocess_env
from tests.kernels.cases import Variant, arrays, expected, rounded, run
from xsa_kernels import Features, MaskSpec, api, device, registry
from xsa_kernels.registry import FEATURES, IMPLEMENTATIONS


@dataclasses.dataclass(frozen=True)
class Cell:
    """A call that has the feature, and else as little as possible."""

    mask: str = "causal"
    dtype: str = "bfloat16"
    E: int = 64
    T: int = 128
    S: int = 128
    sinks: bool = False
    softcap: float | None = None


CELLS = {
    "mask.causal": Cell(),
    "mask.causal=False": Cell("full"),
    "mask.window": Cell("window"),
    "mask.window with mask.causal=False": Cell("band"),
    "mask.segment_ids": Cell("segments"),
    "sinks_H": Cell(sinks=True),
    "softcap": Cell(softcap=1.5),
    "mask.causal with fewer queries than keys": Cell(S=256),
    "queries no multiple of 128": Cell(T=100, S=128),
    "keys no multiple of 128": Cell(T=128, S=200),
    "keys no multiple of 8": Cell(T=128, S=204),
    "dtype=bfloat16": Cell(),
    "dtype=float16": Cell(dtype="float16"),
    "dtype=float32": Cell(dtype="float32"),
    "dtype=float64": Cell(dtype="float64"),
    "head_dim 64 or 128": Cell(),
    "head_dim 80 or 96": Cell(E=80),
    "another multiple of 8 up to 256 as head_dim": Cell(E=32),
    "a head_dim up to 256 that 8 does not divide": Cell(E=36),
    "head_dim above 256": Cell(E=264),
}
MASKS = {
    "causal": lambda ids: MaskSpec(),
    "full": lambda ids: MaskSpec(causal=False),
    "window": lambda ids: MaskSpec(window=30),
    "band": lambda ids: MaskSpec(causal=False, window=30),
    "segments": lambda ids: MaskSpec(segment_ids=ids),
}
# |error| / |value|. The libraries round y before it is projected, and the sum of all delta that is the gradient of a sink shows it.
BOUND = {"bfloat16": 0.006, "float16": 0.001, "float32": 1e-5, "float64": 1e-12}


@functools.cache
def inputs(cell):
    """The inputs in float64, in the cell's dtype, and the oracle's results."""
    x = arrays(B=1, T=cell.T, S=cell.S, H=2, K=1, E=cell.E)
    exact, narrow = rounded(x, cell.dtype)
    case = Variant(MASKS[cell.mask](jnp.asarray(x["segment_ids"])), "clamp")
    case = dataclasses.replace(case, sinks=exact["sinks"] if cell.sinks else None, softcap=cell.softcap)
    if cell.S > cell.T:
        case = dataclasses.replace(case, v_self=exact["v"][:, -cell.T :])
    given = case if case.v_self is None else dataclasses.replace(case, v_self=narrow["v"][:, -cell.T :])
    return narrow, given, expected(exact, case)


@functools.cache
def measured(impl, cell):
    """|error| / |value| of z and every gradient."""
    with jax.enable_x64(cell.dtype == "float64"):
        x, case, want = inputs(cell)
        got = {name: np.asarray(a, np.float64) for name, a in run(x, impl, case).items()}
    return {name: np.linalg.norm(a - want[name]) / np.linalg.norm(want[name]) for name, a in got.items()}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("feature", FEATURES)
def test_cell(feature, impl, monkeypatch):
    if impl == "tokamax":
        pytest.importorskip("tokamax", reason="install tokamax")
        monkeypatch.setattr(sys, "argv", ["python"])  # which it parses
    cell, how = CELLS[feature], IMPLEMENTATIONS[impl].cell(feature)
    if how == "-":
        with pytest.raises(ValueError, match=f"{impl}', which cannot honour .*{feature}"):
            measured(impl, cell)
    elif how in ("run", "interpreted"):
        if impl != "splash":  # the others take any length: a short one is faster
            cell = dataclasses.replace(cell, T=cell.T // 4, S=cell.S // 4)
        found = measured(impl, cell)
        assert max(found.values()) <= BOUND[cell.dtype] * (1.5 if impl in ("splash", "tokamax") else 1), found
    else:
        pytest.skip(f"{how} only: no machine here runs it")


@pytest.mark.fast
def test_every_call_has_the_feature_that_its_cell_is_for():
    for feature, cell in CELLS.items():
        features = Features(
            dtype=cell.dtype,
            head_dim=cell.E,
            causal=cell.mask not in ("full", "band"),
            window=30 if cell.mask in ("window", "band") else None,
            segments=cell.mask == "segments",
            sinks=cell.sinks,
            softcap=cell.softcap,
            lengths=(cell.T, cell.S),
        )
        assert FEATURES[feature](features)
    assert list(CELLS) == list(FEATURES)
    assert all(feature in FEATURES for one in IMPLEMENTATIONS.values() for feature in one.unsupported + one.only_compiled)


@pytest.mark.fast
def test_every_list_of_implementations_is_the_registry():
    assert registry.NAMES == tuple(IMPLEMENTATIONS) == tuple(one.name for one in IMPLEMENTATIONS.values())
    assert typing.get_args(registry.Impl) == ("auto", *registry.NAMES)
    assert typing.get_type_hints(api.attention)["impl"] == typing.get_type_hints(api.check)["impl"] == registry.Impl
    for one in IMPLEMENTATIONS.values():
        if one.installed():
            assert list(inspect.signature(one.load()).parameters) == ["request", "sharding"]


@pytest.mark.fast
def test_the_package_and_its_registry_load_no_jax():
    """Programs that read configs or files may ask what implementations there are before they start jax, or without it."""
    code = "import sys, xsa_kernels, xsa_kernels.registry; from xsa_kernels import registry, Features; "
    code += "Features(dtype='bfloat16', head_dim=64); registry.table(); print('jax' in sys.modules, *registry.NAMES[:2])"
    done = subprocess.run([sys.executable, "-c", code], env=subprocess_env(), capture_output=True, text=True, check=True)
    assert done.stdout == "False reference xla\n"


@pytest.mark.fast
@pytest.mark.parametrize(
    "dtype", ["float32", np.float32, np.dtype("float32"), jnp.float32, jnp.dtype("float32"), jnp.zeros(1).dtype], ids=repr
)
def test_a_dtype_may_be_any_dtype_object(dtype):
    assert Features(dtype=dtype, head_dim=64).dtype == "float32"
    assert Features(dtype=jnp.bfloat16, head_dim=64) == Features(dtype=jnp.dtype("bfloat16"), head_dim=64, lengths=[])


PLAIN = {"dtype": "bfloat16", "head_dim": 64}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("platform", "features", "name"),
    [
        ("cpu", {}, "xla"),
        ("tpu", {}, "tpu"),
        ("tpu", {"window": 9, "causal": False, "segments": True, "sinks": True, "softcap": 3.0, "lengths": (100, 100)}, "tpu"),
        ("tpu", {"dtype": "float16"}, "xla"),
        ("tpu", {"head_dim": 512}, "xla"),
        ("gpu", {"segments": True}, "triton"),
        ("gpu", {"dtype": "float64"}, "xla"),
        ("other", {}, "xla"),
    ],
)
def test_auto(platform, features, name, monkeypatch):
    monkeypatch.setattr(device, "kernel_platform", lambda _: platform)
    assert xsa_kernels.check("auto", Features(**{**PLAIN, **features})) == name


@pytest.mark.fast
def test_auto_takes_nothing_whose_values_were_not_checked():
    for name in ("xla", *itertools.chain(*registry.AUTO.values())):
        assert {IMPLEMENTATIONS[name].cell(feature) for feature in FEATURES} <= {"run", "interpreted", "-"}


@pytest.mark.fast
@pytest.mark.parametrize(("capability", "platform"), [("9.0", "gpu"), ("10.0", "gpu"), ("7.5", "other"), ("gfx942", "other")])
def test_gpus_that_the_kernels_were_not_compiled_for(capability, platform, monkeypatch):
    chip = type("Device", (), {"compute_capability": capability})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [chip])
    assert device.kernel_platform(device.platform()) == platform


@pytest.mark.fast
def test_says_what_it_runs(caplog):
    with caplog.at_level("INFO", "xsa_kernels"):
        xsa_kernels.check("auto", Features(**PLAIN, segments=True))
    assert "impl='auto' runs xla" in caplog.text
    assert "segments=True" in caplog.text
