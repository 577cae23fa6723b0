"""What many test files share: small configs, batches, meshes, and comparisons that name the leaf that differs."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from xsa_jax.config import Config, flatten, from_config_dict, to_dict
from xsa_jax.model.transformer import Model, Params, build
from xsa_jax.parallel.mesh import Axes, make_mesh
from xsa_jax.train.setup import Setup, assemble

REPO = pathlib.Path(__file__).resolve().parents[1]
SHARED_DATA = REPO / ".." / "shared" / "data"

# A whole model that compiles in about a second. Every size differs from every other, so that a swapped axis cannot pass;
# those that a mesh of 2 x 2 x 2 divides are even.
TINY: Mapping[str, Any] = {
    "model.vocab_size": 60, "model.num_layers": 2, "model.d_model": 32, "model.d_ff": 48, "model.dtype": "float32",
    "attention.num_heads": 4, "attention.num_kv_heads": 2, "attention.head_dim": 6,
    "data.seq_len": 16, "data.batch_size": 8,
    "optim.peak_lr": 1e-2, "optim.warmup_steps": 2,
    "train.num_steps": 20, "train.loss_chunk_tokens": 64, "train.log_every": 1,
    "eval.tokens": 256, "checkpoint.every": 10,
}  # fmt: skip


def tiny_tree(overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The defaults made tiny, as the nested dict that `from_config_dict` reads.

    Args:
      overrides: dotted field name -> value, over those of `TINY`.
    """
    tree = to_dict(Config())
    for name, value in {**TINY, **(overrides or {})}.items():
        *groups, field = name.split(".")
        node = tree
        for group in groups:
            node = node[group]
        node[field] = value
    return tree


def tiny_config(overrides: Mapping[str, Any] | None = None) -> Config:
    """The validated `tiny_tree`: `tiny_config({"attention.kind": "xsa"})`."""
    return from_config_dict(tiny_tree(overrides))


def tiny_flags(overrides: Mapping[str, Any] | None = None) -> list[str]:
    """The same config as flags for `train.py --config configs/smoke.py`."""
    return [f"--config.{name}={value}" for name, value in flatten({**TINY, **(overrides or {})})]


def random_batch(config: Config, seed: int = 0, documents: int = 1) -> dict[str, np.ndarray]:
    """Random tokens [B, T+1]; with more than one document also segment ids, whose borders differ from row to row."""
    rng = np.random.default_rng(seed)
    shape = config.data.batch_size, config.data.seq_len + 1
    batch = {"tokens": rng.integers(0, config.model.vocab_size, shape, dtype=np.int32)}
    if documents > 1:
        starts = [np.isin(np.arange(shape[1]), 1 + rng.permutation(shape[1] - 1)[: documents - 1]) for _ in range(shape[0])]
        batch["segment_ids"] = 1 + np.cumsum(starts, axis=1, dtype=np.int32)
    return batch


def random_params(model: Model, seed: int = 0) -> Params:
    """Parameters of the right shapes without the wait for `Model.init` to compile. Gates, sinks and scales are random too, so
    that no test passes only because they start at 0 or 1."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct, axes: Axes) -> jax.Array:
        matrix = sum(axis != "layers" for axis in axes) > 1
        return jnp.asarray(rng.normal(0.0 if matrix else 0.5, 0.2, leaf.shape), leaf.dtype)

    return jax.tree.map(draw, model.abstract_params, model.axes)


def mesh_of(config: Config, devices: int = 1) -> Mesh:
    """The config's mesh over the first of the eight fake devices."""
    return make_mesh(config.mesh, config.data.batch_size, config.model.d_model, jax.devices()[:devices])


def model_of(config: Config) -> Model:
    """The config's model."""
    return build(config.model, config.attention)


def assembled(config: Config, devices: int = 1) -> Setup:
    """The config's run over the first of the eight fake devices."""
    return assemble(config, jax.devices()[:devices])


def assert_trees_equal(actual: Any, expected: Any) -> None:
    """Same structure, types and bits; the message names the leaf."""
    for path, a, b in _paired(actual, expected):
        assert a.dtype == b.dtype, f"{path}: {a.dtype} and {b.dtype}"
        np.testing.assert_array_equal(a, b, err_msg=path)


def assert_trees_close(actual: Any, expected: Any, tolerance: float) -> None:
    """Largest difference of each leaf at most `tolerance` times the largest entry of that leaf; the message names the leaf."""
    for path, a, b in _paired(actual, expected):
        a, b = a.astype(np.float64), b.astype(np.float64)
        worst, scale = np.max(np.abs(a - b), initial=0.0), np.max(np.abs(b), initial=0.0)
        assert worst <= tolerance * scale, f"{path}: differs by {worst:.3g} where the largest entry is {scale:.3g}"


def _paired(actual: Any, expected: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    found, wanted = str(jax.tree.structure(actual)), str(jax.tree.structure(expected))
    assert found == wanted
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    return [(jax.tree_util.keystr(path), np.asarray(a), np.asarray(b)) for (path, a), b in pairs]


def subprocess_env(devices: int = 1, **more: str) -> dict[str, str]:
    """The environment for another Python process: this repository importable, the CPU, and that many fake devices."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    ours = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'kernels'}"}
    return {**os.environ, **ours, **more}
