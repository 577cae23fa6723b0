"""Checkpoints: every value comes back on any number of devices, and whatever does not fit is refused by name."""

import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assembled, assert_trees_equal, model_of, tiny_config
from xsa_jax.config import Config
from xsa_jax.errors import ConfigError, UserError
from xsa_jax.model.transformer import Params
from xsa_jax.train.checkpoint import Checkpoints
from xsa_jax.train.state import TrainState

CUBE = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
LEARNED = {"attention.kind": "xsa", "attention.xsa.strength": "learned", "attention.sinks": True}
LOADER = {"row": 24, "order": {"seed": 3, "name": "train"}}


def described(overrides: dict[str, Any], devices: int = 1) -> tuple[Config, TrainState]:
    config = tiny_config(overrides)
    return config, assembled(config, devices).abstract_state


def filled(abstract: TrainState, seed: int = 0) -> TrainState:
    """A state whose every leaf, moments and counters too, holds values that no default has."""
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.normal(size=leaf.shape) if leaf.dtype == jnp.float32 else rng.integers(1, 1000, leaf.shape)
        return jax.device_put(np.asarray(values, leaf.dtype), leaf.sharding)

    return jax.tree.map(fill, abstract)


def files(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder, with size and time of change."""
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")}


def write(workdir: pathlib.Path, config: Config, state: TrainState, steps: list[int]) -> None:
    with Checkpoints(workdir, config.checkpoint) as checkpoints:
        for step in steps:
            checkpoints.save(step, state, config, LOADER)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[pathlib.Path, TrainState]:
    """A run saved at steps 3 and 7 by eight devices."""
    workdir = tmp_path_factory.mktemp("run")
    config, abstract = described(LEARNED | CUBE, devices=8)
    state = filled(abstract)
    write(workdir, config, filled(abstract, seed=1), [3])
    write(workdir, config, state, [7])
    return workdir, state


@pytest.fixture
def damaged(saved, tmp_path) -> pathlib.Path:
    """A copy to spoil."""
    workdir = tmp_path / "copy"
    shutil.copytree(saved[0], workdir)
    return workdir


MESHES = {1: {}, 2: {"mesh.tensor": 2}, 4: {"mesh.fsdp": 4}, 8: CUBE}


@pytest.mark.parametrize("devices", [pytest.param(n, marks=[pytest.mark.fast] * (n == 2)) for n in MESHES])
def test_restored_on_any_number_of_devices(saved, devices):
    workdir, state = saved
    config, abstract = described(LEARNED | MESHES[devices], devices)
    with Checkpoints(workdir) as checkpoints:
        restored, loader = checkpoints.restore(config, abstract)
        params = checkpoints.restore_params(model_of(config), abstract.params)
        earlier, _ = checkpoints.restore(config, abstract, step=3)
    assert_trees_equal(restored, state)
    assert_trees_equal(params, state.params)
    assert loader == LOADER
    assert (np.asarray(earlier.params["embed"]) != np.asarray(state.params["embed"])).any()
    for leaf, wanted in zip(jax.tree.leaves((restored, params)), jax.tree.leaves((abstract, abstract.params)), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
        assert leaf.sharding.device_set == wanted.sharding.device_set


@pytest.mark.fast
def test_what_is_stored_beside_the_values(saved):
    workdir, _ = saved
    with Checkpoints(workdir) as checkpoints:
        assert checkpoints.steps == [3, 7]
        assert checkpoints.latest == 7
        assert checkpoints.loader_state(3) == checkpoints.loader_state() == LOADER
        assert checkpoints.config(3) == checkpoints.config() == tiny_config(LEARNED | CUBE)


@pytest.mark.fast
def test_a_restored_state_can_be_donated(saved):
    config, abstract = described(LEARNED)
    with Checkpoints(saved[0]) as checkpoints:
        restored, _ = checkpoints.restore(config, abstract)
    after = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)(restored)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(restored))
    assert_trees_equal(after, jax.tree.map(lambda x: np.asarray(x) + np.ones((), x.dtype), saved[1]))


@pytest.mark.fast
def test_the_next_step_may_overwrite_what_is_being_saved(tmp_path):
    """The save runs on while a donating step reuses its buffers; the file must hold the values of before."""
    config, abstract = described({"model.vocab_size": 20_000})  # large enough to be still under way
    state = filled(abstract)
    before = jax.tree.map(lambda x: np.array(x, copy=True), state)
    spoil = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 + 5, state), donate_argnums=0)
    with Checkpoints(tmp_path, config.checkpoint) as checkpoints:
        checkpoints.save(1, state, config, LOADER)
        for _ in range(3):
            state = spoil(state)
        jax.block_until_ready(state)
    with Checkpoints(tmp_path) as checkpoints:
        assert_trees_equal(checkpoints.restore(config, abstract)[0], before)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ({}, {"attention.kind": "xsa"}, "attention.kind (run: 'sa', now: 'xsa')"),
        ({"attention.kind": "xsa"}, {}, "attention.kind (run: 'xsa', now: 'sa')"),
        (
            {"attention.kind": "xsa"},
            {"attention.kind": "xsa", "attention.xsa.layers": "first:1"},
            "attention.xsa.layers (run: 'all', now: 'first:1')",
        ),
    ],
)
def test_another_attention_variant_is_refused_naming_both(tmp_path, stored, asked, expected):
    """The weights fit; nothing in them shows the variant."""
    config, abstract = described(stored)
    write(tmp_path, config, filled(abstract), [1])
    other, other_abstract = described(asked)
    with Checkpoints(tmp_path) as checkpoints:
        for restore in (
            lambda: checkpoints.restore(other, other_abstract),
            lambda: checkpoints.restore_params(model_of(other), other_abstract.params),
        ):
            with pytest.raises(ConfigError) as error:
                restore()
            assert expected in str(error.value)
            assert str(tmp_path) in str(error.value)


def test_weights_may_be_read_for_another_kind_of_run_but_not_continued(saved):
    config, abstract = described(LEARNED | {"data.seq_len": 32, "optim.peak_lr": 1.0})
    with Checkpoints(saved[0]) as checkpoints:
        checkpoints.restore_params(model_of(config), abstract.params)
        with pytest.raises(ConfigError, match=r"data\.seq_len \(run: 16, now: 32\); optim\.peak_lr"):
            checkpoints.restore(config, abstract)


def _wider(leaf):
    return jax.ShapeDtypeStruct((*leaf.shape[:-1], leaf.shape[-1] + 1), leaf.dtype, sharding=leaf.sharding)


def _half(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tree: tree["blocks"]["mlp"].update(extra=tree["embed"]), ["params/blocks/mlp/extra is missing", "(60, 32)"]),
        (lambda tree: tree["blocks"]["attention"].pop("sinks"), ["params/blocks/attention/sinks", "(2, 4)", "not in this model"]),
        (lambda tree: tree.update(embed=_wider(tree["embed"])), ["params/embed", "(60, 32)", "(60, 33)"]),
        (lambda tree: tree.update(embed=_half(tree["embed"])), ["params/embed", "float32", "bfloat16"]),
    ],
    ids=["missing", "extra", "misshaped", "other type"],
)
def test_a_leaf_that_does_not_fit_is_named(saved, change, expected):
    """The configs agree, so this is what a checkpoint from other code looks like."""
    config, abstract = described(LEARNED)
    params: Params = jax.tree.map(lambda x: x, abstract.params)
    change(params)
    with Checkpoints(saved[0]) as checkpoints:
        with pytest.raises(UserError) as error:
            checkpoints.restore_params(model_of(config), params)
        whole = TrainState(abstract.step, params, abstract.opt_state, abstract.rng)
        with pytest.raises(UserError):
            checkpoints.restore(config, whole)
    for text in [*expected, str(saved[0] / "checkpoints" / "7")]:
        assert text in str(error.value)


@pytest.mark.fast
def test_a_moment_that_does_not_fit_is_named(saved):
    config, abstract = described(LEARNED)
    moments = jax.tree.map(lambda leaf: _half(leaf) if leaf.shape == (60, 32) else leaf, abstract.opt_state)
    with Checkpoints(saved[0]) as checkpoints, pytest.raises(UserError, match=r"opt_state/optimizer/.*mu/embed.*float32.*bfloat16"):
        checkpoints.restore(config, TrainState(abstract.step, abstract.params, moments, abstract.rng))


@pytest.mark.fast
def test_no_run_no_checkpoint_no_such_step(saved, tmp_path):
    config, abstract = described(LEARNED)
    with pytest.raises(UserError, match="expected a run with a folder 'checkpoints'"):
        Checkpoints(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert (checkpoints.steps, checkpoints.latest) == ([], None)
        for read in (
            checkpoints.config,
            checkpoints.loader_state,
            lambda: checkpoints.restore(config, abstract),
            lambda: checkpoints.restore_params(model_of(config), abstract.params),
        ):
            with pytest.raises(UserError, match="no finished checkpoint"):
                read()
    with Checkpoints(saved[0]) as checkpoints, pytest.raises(UserError, match="no finished checkpoint of step 5; there are 3, 7"):
        checkpoints.restore(config, abstract, step=5)


def _cut(folder: pathlib.Path, item: str) -> None:
    for path in (folder / item).rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.fast
@pytest.mark.parametrize(
    "spoil",
    [
        lambda step: _cut(step, "params"),
        lambda step: [path.unlink() for path in (step / "params").rglob("d/*")],
        lambda step: (step / "params" / "manifest.ocdbt").unlink(),
        lambda step: (step / "params" / "_METADATA").write_text('{"tree_metadata": {'),
        lambda step: (step / "_CHECKPOINT_METADATA").write_text("{"),
        lambda step: shutil.rmtree(step / "params"),
    ],
    ids=["values cut", "values gone", "index gone", "description cut", "head cut", "item gone"],
)
def test_a_damaged_checkpoint_is_named(damaged, spoil):
    spoil(damaged / "checkpoints" / "7")
    config, abstract = described(LEARNED)
    with Checkpoints(damaged) as checkpoints:
        with pytest.raises(UserError) as error:
            checkpoints.restore_params(model_of(config), abstract.params)
        assert str(damaged / "checkpoints" / "7") in str(error.value)
        assert "cannot be read" in str(error.value) or "no item" in str(error.value)
        assert "\n" not in str(error.value)
        checkpoints.restore_params(model_of(config), abstract.params, step=3)


def test_damaged_moments_stop_a_restore_and_leave_the_weights_readable(damaged):
    _cut(damaged / "checkpoints" / "7", "opt_state")
    config, abstract = described(LEARNED)
    with Checkpoints(damaged) as checkpoints:
        checkpoints.restore_params(model_of(config), abstract.params)
        with pytest.raises(UserError, match="cannot be read"):
            checkpoints.restore(config, abstract)


@pytest.mark.parametrize(("keep", "expected"), [((2, 0), [5, 6]), ((1, 3), [3, 6]), ((2, 2), [2, 4, 5, 6])])
def test_what_is_kept(tmp_path, keep, expected):
    config, abstract = described({"checkpoint.keep_last": keep[0], "checkpoint.keep_every": keep[1], "model.num_layers": 1})
    write(tmp_path, config, filled(abstract), [1, 2, 3, 4])
    write(tmp_path, config, filled(abstract), [5, 6])  # a second life of the run
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == expected
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {str(step) for step in expected}


@pytest.mark.fast
def test_a_save_cut_short_is_never_listed_and_only_a_writer_cleans_it(damaged):
    config, abstract = described(LEARNED)
    folder = damaged / "checkpoints"
    leftovers = [folder / f"{step}.orbax-checkpoint-tmp" for step in (8, 9)]  # what killed saves leave
    for leftover in leftovers:
        shutil.copytree(folder / "7", leftover)
        (leftover / "commit_success.txt").unlink()
    before = files(damaged)
    with Checkpoints(damaged) as checkpoints:
        assert checkpoints.steps == [3, 7]
        checkpoints.restore(config, abstract)
        checkpoints.restore_params(model_of(config), abstract.params)
        checkpoints.config()
        checkpoints.loader_state()
    assert files(damaged) == before  # reading created, deleted and changed nothing
    with Checkpoints(damaged, config.checkpoint) as checkpoints:
        assert checkpoints.steps == [3, 7]
        checkpoints.save(9, filled(abstract), config, LOADER)
    assert not any(leftover.exists() for leftover in leftovers)
    with Checkpoints(damaged) as checkpoints:
        assert checkpoints.steps == [7, 9]
